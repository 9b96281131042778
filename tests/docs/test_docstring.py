"""Docstrings, read and marked."""

from __future__ import annotations

import doctest

import pytest

from aiops.algorithms import optimizers, schedules
from aiops.cli import policy_catalog, policy_docstring
from aiops.cli.policy_docstring import DocBlock

TEXT = """It halves.

    .. math::

        θ ← θ/2

        g ← 0

    A paragraph of two
    lines::

        code  here
          and here

    ====  ==========
    a     b
    ====  ==========
    1     one
          and more
    2     two | half
    ====  ==========

    Settings
    --------
    lr : float
        A rate.

    Source
    ------
    *Title*, 2020 -- a line that no heading is.

    Example
    -------
    >>> 1 + 1
    2
    """


def test_all_kinds_of_blocks() -> None:
    page = policy_docstring.read(TEXT)
    assert page.summary == "It halves."
    assert page.body == [
        DocBlock("math", "θ ← θ/2\n\ng ← 0"),
        DocBlock("text", "A paragraph of two lines"),
        DocBlock("code", "code  here\n  and here"),
        DocBlock("table", rows=(("a", "b"), ("1", "one and more"), ("2", "two | half"))),
    ]
    assert list(page.sections) == ["Settings", "Source", "Example"]
    assert page.sections["Example"] == [DocBlock("example", ">>> 1 + 1\n2")]


@pytest.mark.parametrize("empty", [None, ""])
def test_none(empty: str | None) -> None:
    assert policy_docstring.read(empty) == policy_docstring.DocPage("")


def test_one_line() -> None:
    assert policy_docstring.read("Alone.") == policy_docstring.DocPage("Alone.")


def test_marks() -> None:
    text = "``lr``, see `SASGD` and `other`; \\|g\\| of *Title*"
    assert policy_docstring.plain(text) == "lr, see SASGD and other; |g| of *Title*"
    link = {"SASGD": "[s](s.md)"}.get
    assert (
        policy_docstring.marked(text, link) == "`lr`, see [s](s.md) and `other`; \\|g\\| of *Title*"
    )


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (optimizers, list(optimizers.OPTIMIZERS)),
        (schedules, list(schedules._PHASES)),
    ],
)
def test_the_shared_tables_name_all_there_are(module: object, names: list[str]) -> None:
    tables = [
        block for block in policy_docstring.read(module.__doc__).body if block.kind == "table"
    ]
    cells = [row[0].strip("`").partition(":")[0] for row in tables[0].rows[1:]]
    assert cells == names


@pytest.mark.parametrize("module", [policy_catalog, policy_docstring])
def test_examples(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]
    assert results.attempted > 0
    assert results.failed == 0
