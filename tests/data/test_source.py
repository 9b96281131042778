"""The examples of a data set, in each form that a user may give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.data.source import RowRanges, source_of
from aiops.errors import UsageError
from tests.rows import each_row

X, Y = np.arange(10.0).reshape(5, 2), np.arange(5)
SOME = np.array([3, 0])


def test_arrays_keep_their_form() -> None:
    assert (source_of(Y).rows(SOME) == [3, 0]).all()
    x, y = source_of((X, Y)).rows(SOME)
    assert (x[:, 0] == [6, 0]).all()
    assert (y == [3, 0]).all()
    named = source_of({"x": X, "y": Y}).rows(SOME)
    assert list(named) == ["x", "y"]
    assert len(source_of([X, Y])) == 5


def test_a_sequence_gives_a_list_of_its_items() -> None:
    assert source_of("abcde").rows(SOME) == ["d", "a"]
    assert source_of(range(5)).rows(SOME) == [3, 0]


def test_a_source_is_taken_as_it_is() -> None:
    class Own:
        def __len__(self) -> int:
            return 7

        def rows(self, indices: Any) -> Any:
            return indices * 2

    assert (source_of(Own()).rows(SOME) == [6, 0]).all()


@each_row(
    ("data", "words"),
    [
        ((X, Y[:4]), "of one length, not of [4, 5]"),
        (np.zeros(0), "is empty"),
        (7, "not int"),
        (list(range(20)), "this list holds int: make an array"),
        ((X, [1, 2, 3, 4, 5]), "this tuple holds list: make an array"),
        ({"x": "text"}, "this dict holds str: make an array"),
        ((np.float64(3), X), "this tuple holds float64: make an array"),
        (np.array(3), "this ndarray holds a number, which has no length: make an array"),
        (iter("abc"), "RowRanges"),
    ],
)
def test_what_is_no_data_set(data: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        source_of(data)
    assert words in str(caught.value)


class TestRowRanges:
    @each_row("form", ["array", "tuple", "mapping"])
    def test_rows_are_read_by_units_that_are_kept(self, form: str) -> None:
        asked: list[tuple[int, int]] = []

        def read(start: int, stop: int) -> Any:
            asked.append((start, stop))
            rows = np.arange(start, stop)
            return {"array": rows, "tuple": (rows, rows * 2), "mapping": {"a": rows}}[form]

        source = RowRanges(25, read, unit=10, kept=2)
        found = source.rows(np.array([3, 21, 9, 24]))
        first = found["a"] if form == "mapping" else found[0] if form == "tuple" else found
        assert first.tolist() == [3, 21, 9, 24]
        source.rows(np.array([0, 20]))
        assert asked == [(0, 10), (20, 25)]
        source.rows(np.array([10]))
        source.rows(np.array([20]))
        assert asked == [(0, 10), (20, 25), (10, 20)]
        source.rows(np.array([0]))
        assert asked[-1] == (0, 10), "two are kept"

    def test_units_of_different_sizes_and_types(self) -> None:
        blocks = {
            0: np.array(["a", "b"]),
            2: np.array(["long"]),
            3: np.array(["c", "longer", "d"]),
        }
        asked: list[tuple[int, int]] = []

        def read(start: int, stop: int) -> Any:
            asked.append((start, stop))
            return blocks[start]

        source = RowRanges(6, read, unit=[0, 2, 3])
        assert source.rows(np.array([5, 1, 2, 4])).tolist() == ["d", "b", "long", "longer"]
        assert asked == [(0, 2), (2, 3), (3, 6)]

    def test_bad_sizes(self) -> None:
        for sizes, said in (
            ({"length": 0}, "the length must be a whole number from 1 to"),
            ({"length": 6.0}, "the length must be a whole number from 1 to"),
            ({"unit": 0}, "the unit must be a whole number from 1 to"),
            ({"unit": 2.5}, "the unit must be a whole number from 1 to"),
            ({"kept": 0}, "units kept must be a whole number from 1 to"),
            *(({"unit": unit}, "rise from 0") for unit in ([], [1, 2], [0, 3, 3], [0, 6])),
            *(({"unit": unit}, "rise from 0") for unit in ([0, 2.5], ["0", "2"], [[0, 2]], "0")),
        ):
            given: dict[str, Any] = {"length": 6, **sizes}
            with pytest.raises(UsageError, match=said):
                RowRanges(read=lambda start, stop: None, **given)
