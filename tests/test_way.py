"""The way of a gradient, as CONTRIBUTING.md tells it, is the way through the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from tests.rows import each_row

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

STEP = re.compile(r"^(?P<link>[→⇢ ]) (?P<name>[\w.]+) +(?P<file>[\w/]+\.py)(?: {2,}(?P<by>.+))?$")


class Step(NamedTuple):
    """One line of the page: a function, and how the one before it leads there."""

    link: str
    name: str
    file: str
    by: str | None


def ways() -> list[list[Step]]:
    """Return the page's ways, each a list of steps."""
    section = PAGE.partition("## A gradient's way")[2].partition("\n## ")[0]
    blocks = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    found = []
    for block in blocks:
        steps = [STEP.match(line) for line in block.splitlines()]
        assert all(steps), f"a line of the page is not a step: {block}"
        found.append([Step(**step.groupdict()) for step in steps if step is not None])
    return found


def function(step: Step) -> ast.AST:
    """Return the definition of a step's function."""
    node: ast.AST = ast.parse((ROOT / "aiops" / step.file).read_text(encoding="utf-8"))
    for name in step.name.split("."):
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and child.name == name
        )
    return node


def mentioned(node: ast.AST) -> set[str]:
    """Return the names that a function's code has."""
    return {
        *(child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)),
        *(child.id for child in ast.walk(node) if isinstance(child, ast.Name)),
    }


STEPS = [
    (way[index - 1] if index else None, step) for way in ways() for index, step in enumerate(way)
]


def test_the_page_has_both_ways() -> None:
    short, general = ways()
    assert short[0].name == "Worker.step"
    assert short[-1].name == "SteadyExchange.finish"
    assert len(general) > 20


@each_row(("before", "step"), STEPS, ids=lambda step: getattr(step, "name", ""))
def test_a_step(before: Step | None, step: Step) -> None:
    """Each function is where the page says, and a call stands in the function above it."""
    node = function(step)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if step.link == "→":
        assert before is not None
        assert step.name.rpartition(".")[2] in mentioned(function(before))
    else:
        assert (step.link == "⇢") == (step.by is not None), "name what leads there"
