"""Sweeps: how many cases they have, and that no value of a factor is left out."""

from __future__ import annotations

import pytest

from tests.rows import each_row
from tests.seeds import by_turns, examples


@each_row("factors", [("abc", [1, 2]), ("a", [1, 2, 3, 4]), ("abcd", range(2), range(3))])
def test_every_value_has_a_turn(factors: tuple[object, ...]) -> None:
    tables = [list(factor) for factor in factors]  # type: ignore[call-overload]
    found = by_turns(*tables)
    assert len(found) == max(map(len, tables))
    for table, had in zip(tables, zip(*found, strict=True), strict=True):
        assert set(had) == set(table)


def test_a_sweep_has_an_example_at_least() -> None:
    assert (examples(1), examples(1000) >= 1) == (1, True)


def test_a_factor_without_values_has_no_turn() -> None:
    with pytest.raises(ZeroDivisionError):
        by_turns("ab", [])
