"""docs/robustness.md names tests and commands that exist, and no figure without one."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

from aiops.cli import bench
from aiops.cli.main import COMMANDS, command
from tests.rows import each_row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
PROMISES, _, REST = PAGE.partition("## What is not promised")
DEFECTS = REST.partition("## Every defect")[2]
PLANNED = "not promised yet"


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of a text's tables, without heads and rules."""
    found = []
    for table in re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE):
        found += [re.split(r" \| ", line[2:-2]) for line in table.splitlines()]
    return found


def code(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def exists(node: str) -> bool:
    """Return whether a test's id, a file's or a folder's name is one of this repository."""
    name, *inside = node.split("::")
    path = ROOT / name
    if not inside:
        return path.exists()
    body: list[Any] = parsed(path).body if path.is_file() else []
    for wanted in inside:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        found = [each for each in body if isinstance(each, kinds) and each.name == wanted]
        if not found:
            return False
        body = found[-1].body
    return inside[-1].startswith(("test_", "Test"))


def problem(line: str) -> str | None:
    """Return what is wrong with a command, if anything is."""
    program, *words = shlex.split(line.removeprefix("AIOPS_SEEDS=4 "))
    if program == "pytest":
        return next((f"there is no {word}" for word in words if not exists(word)), None)
    if program != "aiops" or not words or words[0] not in COMMANDS:
        return "there is no such command"
    flags = {word for word in words if word.startswith("--")}
    if words[:1] == ["bench"]:
        if words[1] not in bench.COMMANDS:
            return "there is no such benchmark"
        module = importlib.import_module(f"benchmarks.{words[1]}")
        known = {
            f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(module.Options)
        }
        known |= {"--json", "--plot", "--out"}
    else:
        found = command(words[0])
        if len(words) > 1 and not words[1].startswith("-"):
            found = getattr(found, "commands", {}).get(words[1])
        if found is None:
            return "there is no such command"
        known = {flag for option in found.params for flag in option.opts}
    return f"there is no {flags - known}" if flags - known else None


@each_row("row", rows(PROMISES), ids=lambda row: row[0][:40])
def test_a_promise_has_a_figure_and_its_command_or_is_none_yet(row: list[str]) -> None:
    _promise, figure, how = row
    if figure.startswith(PLANNED):
        assert re.fullmatch(r"will be (a part of )?`aiops [a-z ]+`", how)
        return
    assert re.search(r"\d|order", figure), "a promise without a figure"
    [line] = code(how)
    assert problem(line) is None, line


@each_row("row", rows(DEFECTS), ids=lambda row: row[0])
def test_a_defect_has_its_test_and_is_fixed_or_open(row: list[str]) -> None:
    _number, _defect, _by, shown, fixed = row
    tests = code(shown)
    assert all(exists(test) for test in tests), tests
    if not re.match(r"[0-9a-f]{7}\b", fixed):
        assert fixed.startswith("open: ")
    else:
        assert tests, "a fix without a test"
    assert tests or shown.startswith("no test: ")


def test_defects_have_numbers() -> None:
    numbers = [row[0] for row in rows(DEFECTS)]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert len(numbers) >= 28


def test_commands_in_the_text() -> None:
    for line in code(REST.partition("## Every defect")[0]):
        if line.startswith(("aiops ", "pytest ")):
            assert problem(line) is None, line


def test_what_is_not_there_is_found_out() -> None:
    assert not exists("tests/none.py")
    assert not exists("tests/none.py::test_it")
    assert not exists("tests/docs/test_robustness.py::test_none")
    assert not exists("tests/docs/test_robustness.py::rows")
    assert exists("tests/docs/test_robustness.py::test_defects_have_numbers")
    clock = "tests/serving/state/test_kept_state.py::TestClock"
    assert exists(f"{clock}::test_it_is_the_machines_at_first")
    assert not exists(f"{clock}::test_damage_is_refused")
    assert problem("pytest tests/docs tests/none.py")
    assert problem("aiops none")
    assert problem("aiops bench none")
    assert problem("aiops bench memory --none 1")
    assert problem("aiops state none")
    assert problem("aiops stats --none")
    assert problem("make test")
    assert problem("aiops state verify") is None
    assert problem("aiops bench memory --size 1MiB --json out.json") is None
