"""docs/guide-own-algorithm.md: what it shows is run, what it quotes is said."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import aiops
from aiops.algorithms import available, find
from aiops.cli import policy_docstring
from aiops.errors import AiopsError
from aiops.lab.workloads import MLP, batches, load
from tests.contract.cases import others
from tests.support import PATIENCE, Process, ServerThread, server_process

PAGE = (Path(__file__).parents[2] / "docs" / "guide-own-algorithm.md").read_text("utf-8")
FILES = dict(re.findall(r"```python (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
ENTRY_POINTS = "".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
QUOTED = dict(re.findall(r"^\| (.+?) \| ((?:rule|policy|signum)\W.+?) \|$", PAGE, re.MULTILINE))
POLICIES = ["signum:Signum", "checked:Checked", "backup:Backup", "local_signum:LocalSignum"]

# How the words of the table of slips are made in the file, or what else is asked for.
SLIPS = {
    "`numpy.tanh(m)` in the rule": ("sign(m), m", "numpy.tanh(m), m"),
    "`return w - step * sign(m)`": ("sign(m), m", "sign(m)"),
    "`def signum(w, g, step, m, beta, rest)`": ("m, step, beta", "step, m, beta"),
    '`Rule(signum, ["m"], ...)`': ('{"m": 0.0}', '["m"]'),
    "no `return` in `rule`": ("return Rule", "Rule"),
    "no `return` in `policy`": (
        "    def modulation(",
        "    def policy(self, workers):\n        pass\n\n    def modulation(",
    ),
    "`1 / staleness`": ("1 / (staleness + 1)", "1 / staleness"),
    '`lr: str = "0.002"`': ("lr: float = 0.002", 'lr: str = "0.002"'),
    "`beta: float`": ("beta: float = 0.9", "beta: float"),
    "no `@dataclass`": ("@dataclass(frozen=True, kw_only=True)\n", ""),
    "no `name`": ('    name = "signum"\n', ""),
    "`--policy signum:Signim`": "signum:Signim",
    "`--set bta=0.8`": {"bta": "0.8"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the guide, from which they can be imported."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    importlib.invalidate_caches()


def accuracy(url: str, steps: int = 300) -> float:
    digits = load("digits").flat()
    model = MLP((digits.features, 32, digits.classes))
    with aiops.Worker(url, model.init(seed=0)) as worker:
        for x, y in islice(batches(digits, 16, seed=0), steps):
            _loss, gradients = model.gradients(worker.params, x, y)
            worker.step(gradients)
        return model.accuracy(worker.params, digits.test_x, digits.test_y)


def test_it_is_as_short_as_is_said() -> None:
    assert next(iter(FILES)) == "signum.py"
    assert len(FILES["signum.py"].splitlines()) <= 40
    assert max(len(line) for text in FILES.values() for line in text.splitlines()) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains(policy: str, folder: Path) -> None:
    settings = ["lr=0.01"] if "local" in policy else []
    with ServerThread(policy=policy, workers=1, kernels="numpy", set=settings) as server:
        assert accuracy(server.url) > 0.85


@pytest.mark.slow
def test_it_trains_at_a_server_of_its_own(folder: Path) -> None:
    path = {"PYTHONPATH": str(folder)}
    with server_process("--policy", "signum:Signum", "--set", "beta=0.8", env=path) as server:
        with aiops.Client(server.url) as client:
            assert client.stats()["settings"]["beta"] == 0.8
        assert accuracy(server.url) > 0.85


def install(folder: Path) -> None:
    """Leave what an installer would leave of the package."""
    info = folder / "signum_for_aiops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signum-for-aiops\nVersion: 1.0\n")
    found = re.fullmatch(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"\n', ENTRY_POINTS)
    assert found, "the guide's pyproject.toml"
    (info / "entry_points.txt").write_text(f"[{found[1]}]\n{found[2]} = {found[3]}\n")


def test_its_entry_point(folder: Path) -> None:
    assert "signum" not in available()
    install(folder)
    importlib.invalidate_caches()
    assert available()["signum"] == "signum:Signum"
    assert policy_docstring.summary(find("signum")).startswith("Signum")
    with (
        ServerThread(policy="signum", kernels="numpy") as server,
        aiops.Client(server.url, role="worker") as client,
    ):
        client.define({"w": np.ones(3, np.float32)})
        params = client.fetch()
        client.push(params, {"w": np.array([2, -2, 0], np.float32)})
        got = client.fetch()["w"]
    np.testing.assert_allclose(got, [0.998, 1.002, 1], rtol=1e-6)


@pytest.mark.slow
def test_its_entry_point_at_a_server_of_its_own(folder: Path) -> None:
    install(folder)
    path = {"PYTHONPATH": str(folder)}
    with (
        server_process("--policy", "signum", env=path) as server,
        aiops.Client(server.url) as client,
    ):
        assert client.stats()["policy"] == "signum"
    listing = Process("-m", "aiops", "policies", env=path)
    status, out, err = listing.end()
    assert (status, err) == (0, "")
    assert re.search(r"^Other\n  signum +Signum: step by the sign", out, re.MULTILINE)


def check(policy: str, settings: dict[str, str]) -> None:
    """Do what a server does before it starts."""
    find(policy).make(settings).check(workers=None)


def said(folder: Path, slip: str) -> str:
    """What the command line would say to a slip."""
    how = SLIPS[slip]
    policy = how if isinstance(how, str) else "signum:Signum"
    if isinstance(how, tuple):
        old, new = how
        assert FILES["signum.py"].count(old) == 1
        text = FILES["signum.py"].replace(old, new)
        (folder / "signum.py").write_text(text, encoding="utf-8")
    with pytest.raises(AiopsError) as caught:
        check(policy, how if isinstance(how, dict) else {})
    return str(caught.value).replace(f"{folder}/", "")


def test_all_slips_are_tried() -> None:
    assert set(QUOTED) == set(SLIPS)


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered_as_quoted(slip: str, folder: Path) -> None:
    assert said(folder, slip) == QUOTED[slip]


def test_its_tests_pass(folder: Path) -> None:
    module: ModuleType = importlib.import_module("test_signum")
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_backup_workers_do_not_wait_for_who_is_gone(folder: Path) -> None:
    policy = find("backup:Backup").make({}).policy(workers=4)
    policy.workers_changed(frozenset({1, 2, 3, 4}))
    assert policy.push(1, 0).divide is None
    assert policy.workers_changed(frozenset({1, 2})) is None
    verdict = policy.workers_changed(frozenset({1}))
    assert verdict is not None
    assert verdict.divide == 1
    assert policy.push(1, 0).divide == 1


def test_what_the_contract_is_run_over() -> None:
    command = re.search(r'AIOPS_CONTRACT="(.+)" make test ARGS="(\S+) -k signum"', PAGE)
    assert command, "the guide's command"
    assert others(command[1]) == {command[1]: ("signum:Signum", {"lr": "0.02"})}
    assert (Path(__file__).parents[2] / command[2]).exists()
    assert others("") == {}
    assert list(others("a:B; c:D k=1;")) == ["a:B", "c:D k=1"]


@pytest.mark.slow
def test_the_contract_holds(folder: Path) -> None:
    cases = "signum:Signum lr=0.02; backup:Backup lr=0.01; local_signum:LocalSignum lr=0.02"
    env = {"PYTHONPATH": str(folder), "AIOPS_CONTRACT": f"{cases} local_steps=4"}
    flags = ("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-q")
    chosen = ("tests/contract/test_algorithms.py", "-k", "signum or Signum or backup")
    suite = Process("-m", "pytest", *flags, *chosen, env=env)
    try:
        status, out, _err = suite.end(4 * PATIENCE)
    finally:
        suite.kill()
    assert status == 0, out
    passed = re.search(r"^(\d+) passed", out.splitlines()[-1])
    assert passed, out
    assert int(passed[1]) >= 3 * 12
