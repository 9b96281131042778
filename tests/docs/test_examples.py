"""Every file in examples/ runs as its reader would run it, and does what it says."""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import math
import re
from pathlib import Path

import pytest

from aiops.algorithms import find
from tests.rows import each_row
from tests.support import PATIENCE, Process, ServerThread
from tests.zygote import IMPORTED, NESTED

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
NEEDS = {"gpt.py": "torch", "pytorch_loop.py": "torch", "jax_loop.py": "jax"}

# What makes an example shorter that takes a minute by itself.
SHORTER = {"gpt.py": ["--steps", "3"]}

# What a server must be, for an example that is not content with any.
POLICY = {
    "average_numpy.py": "average",
    "custom_algorithm.py": "examples.custom_algorithm:Signum",
}


def need(example: str) -> None:
    """Skip an example whose library is not installed (finding it is quicker than importing it)."""
    library = NEEDS.get(example)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def assert_has_learnt(example: str, out: str) -> None:
    last = out.splitlines()[-1]
    if example in SHORTER:
        found = re.search(r"([\d.]+) nats", last)
        assert found, f"no nats in the last line of {out!r}"
        assert 2 < float(found.group(1)) < math.log(256)  # of all bytes alike
        return
    found = re.search(r"accuracy:? +([\d.]+)%", last)
    assert found, f"no accuracy in the last line of {out!r}"
    assert float(found.group(1)) > 90


def test_there_are_examples() -> None:
    assert {"numpy_loop.py", "asyncio_client.py", "custom_algorithm.py"} <= set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_by_itself(example: str) -> None:
    """One of them, and its server, is started with the kernels of its choice; others are forked."""
    need(example)
    started = example == "numpy_loop.py"
    env = {"AIOPS_URL": "", "AIOPS_KERNELS": "auto" if started else "numpy"}
    if not started:
        env[NESTED] = "1"
    if NEEDS.get(example) == "torch":  # two of them, which follow each other
        env[IMPORTED] = "torch,torch._dynamo"
    process = Process(f"examples/{example}", *SHORTER.get(example, ()), env=env, started=started)
    try:
        status, out, err = process.end(3 * PATIENCE)
    finally:
        process.kill()
    assert status == 0, err
    assert_has_learnt(example, out)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_at_a_server_that_runs_somewhere(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    need(example)
    module = importlib.import_module(f"examples.{example.removesuffix('.py')}")
    with ServerThread(policy=POLICY.get(example, "fasgd")) as server:
        status = module.main([server.url, *SHORTER.get(example, ())])
        assert (asyncio.run(status) if inspect.iscoroutine(status) else status) == 0
    assert_has_learnt(example, capsys.readouterr().out)


@each_row("example", EXAMPLES)
def test_begins_by_saying_how_to_run_it(example: str) -> None:
    text = ast.get_docstring(ast.parse((FOLDER / example).read_text())) or ""
    assert f"python examples/{example}" in text


def test_the_custom_algorithm_is_as_short_as_is_said() -> None:
    path = FOLDER / "custom_algorithm.py"
    tree = ast.parse(path.read_text())
    parts = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in ("signum", "Signum")
    ]
    assert len(parts) == 2
    assert sum((part.end_lineno or 0) - part.lineno + 1 for part in parts) <= 40


def test_the_custom_algorithm_by_its_numbers() -> None:
    algorithm = find("examples.custom_algorithm:Signum").make({"lr": "0.5", "beta": 0.75})
    assert [algorithm.modulation(tau) for tau in (0, 1, 3)] == [1.0, 0.5, 0.25]
    rule = algorithm.rule()
    w, m = rule.function(w=2.0, g=-4.0, m=1.0, step=0.5, **rule.constants)
    assert (w, m) == (2.5, -0.25)
