"""The generated text, and what the compiler makes of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aiops.kernels import Rule, build, numba_kernel
from aiops.kernels.rule_parser import parse
from aiops.kernels.rule_program import Dialect, Literal, Name, Operation
from tests.kernels.rules import ADAPTIVE, COMPENSATED, EVERY_WORD, EVERYTHING, FASGD, LITERAL

FOLDER = Path(__file__).parent / "golden"
GOLDEN = FOLDER / "fasgd_float32.py.txt"
AGREED = {GOLDEN: FASGD, FOLDER / "everything_float32.py.txt": EVERYTHING}


@pytest.mark.parametrize("file", AGREED, ids=lambda file: file.stem)
def test_the_text_is_as_agreed(file: Path) -> None:
    """Read the difference; if it is meant, run ``python -m tests.kernels.test_numba_source``."""
    assert build(AGREED[file], np.float32, "numba").text == file.read_text()


def test_the_text_is_the_same_for_other_values_of_the_constants() -> None:
    other = Rule(FASGD.function, FASGD.state, dict.fromkeys(FASGD.constants, 0.5), "v")
    assert build(other, np.float32, "numba").text == GOLDEN.read_text()


def test_the_text_says_the_dtype() -> None:
    text = build(FASGD, np.float64, "numba").text
    assert "_real = _np.float64\n" in text
    assert "float32" not in text.replace("int32", "")


class _C(Dialect):
    """A dialect that is not Python: enough of C to show that programs do not care."""

    def literal(self, value: float) -> str:
        return f"{value!r}f"

    def name(self, name: str) -> str:
        return name

    def call(self, word: str, arguments: Sequence[str]) -> str:
        return f"{word}({', '.join(arguments)})"

    def assignment(self, name: str, value: str) -> str:
        return f"auto {name} = {value};"


def test_a_program_can_be_written_in_another_dialect() -> None:
    lines = _C().statements(parse(EVERY_WORD))
    assert lines[0] == "auto step = (step * 0.5f);"
    assert lines[1] == "auto clipped = minimum(maximum(g, -1.5f), 1.5f);"
    assert lines[2].startswith("auto calm = (absolute(m) <= (absolute(clipped) * 3")


def test_literals_are_worked_out_as_python_does() -> None:
    program = parse(EVERY_WORD)
    assert "half" not in program.assigned
    assert program.results[1:] == (Name("m"), Name("k"))
    assert _C().write(Operation("negative", (Literal(-0.0),))) == "(--0.0f)"


def test_the_rule_is_read_once_for_all_values_of_its_constants() -> None:
    other = Rule(LITERAL.function, {"m": 3.0}, {"gamma": 0.1})
    assert parse(other) is parse(LITERAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rule", "operations"),
    [
        ("float32", FASGD, ["fdiv", "@llvm.sqrt"]),
        ("float64", ADAPTIVE, ["fdiv", "@llvm.sqrt"]),
        ("float32", COMPENSATED, ["fsub"]),
    ],
    ids=["fasgd", "adaptive", "compensated"],
)
def test_both_loops_vectorise_without_run_time_checks(
    dtype: str,
    rule: Rule,
    operations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # code from a cache has no text to look at
    text = build(rule, dtype, "numba").text
    numba_kernel._compile.__wrapped__(
        "looked_at",
        text,
        dtype,
        states=len(rule.state),
        reads=len(rule.reads),
        scalars=bool(rule.scalars),
    )
    module = next(m for name, m in sys.modules.items() if "aiops_kernel_looked_at" in name)
    real = {"float32": "float", "float64": "double"}[dtype]
    try:
        for loop in (module._in_place, module._out_of_place):
            (code,) = loop.inspect_llvm().values()
            for operation in operations:
                vector = rf"\.v\d+f{dtype[-2:]}" if "@" in operation else rf" <\d+ x {real}>"
                assert re.search(re.escape(operation) + vector, code)
            assert "vector.memcheck" not in code
            assert not re.search(r"f(mul|add|sub|div) [a-z]*(fast|contract|reassoc)", code)
            assert not re.search(r"llvm\.fm(a|uladd)", code)
    finally:
        del sys.modules[module.__name__]


if __name__ == "__main__":
    for file, rule in AGREED.items():
        file.write_text(build(rule, np.float32, "numba").text)
