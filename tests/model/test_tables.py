"""What a table may be, and what a message about its rows may say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiops
from aiops.errors import BadPush, UsageError
from aiops.model.parts import Part
from aiops.model.tables import MAX_IDS, NamedTable, Table, Tables, counts, fetch_parts, push_parts
from tests.rows import each_row

TABLE = Table(100, 4)
NAMED = NamedTable("t", 0, TABLE)


class TestTable:
    def test_its_name_is_public(self) -> None:
        assert aiops.Table is Table

    @each_row(
        ("change", "said"),
        [
            ({"rows": 0}, "rows must be a whole number from 1 to"),
            ({"rows": 2**41}, "rows must be a whole number from 1 to"),
            ({"rows": 3.0}, "rows must be a whole number from 1 to"),
            ({"width": 0}, "width must be a whole number from 1 to"),
            ({"width": "4"}, "width must be a whole number from 1 to"),
            ({"rows": True}, "rows must be a whole number from 1 to"),
            ({"dtype": "float16"}, "must be float32 or float64, not 'float16'"),
            ({"dtype": "int64"}, "must be float32 or float64, not 'int64'"),
            ({"dtype": np.int64}, "must be float32 or float64, not <class 'numpy.int64'>"),
            ({"dtype": None}, "must be float32 or float64, not None"),
            ({"dtype": 32}, "must be float32 or float64, not 32"),
            ({"max_rows": -1}, r"max_rows \(0: no bound\) must be a whole number from 0 to"),
            ({"max_age": 1.5}, r"max_age \(0: no bound\) must be a whole number from 0 to"),
            ({"scale": "1"}, "scale must be a number .*, not '1'"),
            ({"scale": True}, "scale must be"),
            ({"scale": 1e18}, "scale must be"),
            ({"init": "unifrom"}, "did you mean 'uniform'"),
            ({"scale": float("nan")}, "scale must be"),
            ({"scale": -1}, "scale must be"),
            ({"seed": -1}, "seed must be"),
            ({"seed": 2**63}, "seed must be"),
        ],
    )
    def test_what_cannot_work_is_refused(self, change: dict[str, Any], said: str) -> None:
        settings = {"rows": 100, "width": 4, **change}
        with pytest.raises(UsageError, match=said):
            Table(**settings)

    def test_numbers_of_numpy_will_do(self) -> None:
        numbers: tuple[Any, Any] = np.int64(5), np.int32(2)
        assert Table(*numbers, scale=1) == Table(5, 2, scale=1.0)
        assert Table(5, 2, scale=np.float32(0.5)) == Table(5, 2, scale=0.5)  # type: ignore[arg-type]

    @each_row("dtype", [np.float64, np.dtype("f8"), np.dtype(">f8"), "float64"])
    def test_types_of_numpy_will_do(self, dtype: Any) -> None:
        table = Table(5, 2, dtype)
        assert (table.dtype, table.row_bytes, table) == ("float64", 16, Table(5, 2, "float64"))

    def test_how_many_rows_a_message_may_carry(self) -> None:
        assert Table(10, 1).most == MAX_IDS
        assert Table(10, 1 << 16).most == 256
        assert Table(10, 16).row_bytes == 64


class TestTables:
    def test_they_are_numbered_by_name_whatever_the_order(self) -> None:
        tables = Tables({"b": TABLE, "a": Table(3, 2)})
        assert [(n.index, n.name) for n in tables.values()] == [(0, "a"), (1, "b")]
        assert Tables.from_description(reversed(tables.described)).described == tables.described

    @each_row(
        ("tables", "said"),
        [
            ({"w": TABLE}, "'w' is the name of a table and of a tensor"),
            ([TABLE], "must be a mapping of names to aiops.Table, not list"),
            ({"": TABLE}, "name"),
            ({"t": (100, 4)}, "must be an aiops.Table"),
            ({f"t{i}": TABLE for i in range(1025)}, "at most 1,024 tables"),
        ],
    )
    def test_what_cannot_stand_together_is_refused(self, tables: Any, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            Tables(tables, ["w"])

    def test_the_same_name_twice_is_refused(self) -> None:
        row = ("t", 3, 2, "float32", "zeros", 0.0, 0)
        with pytest.raises(UsageError, match="same name"):
            Tables.from_description([row, row])

    @each_row(
        ("other", "said"),
        [
            ({"t": TABLE}, None),
            ({"t": Table(101, 4)}, "the rows of its table 't' is 100, not 101"),
            ({"t": Table(100, 4, init="zeros")}, "'uniform', not 'zeros'"),
            ({"t": Table(100, 4, seed=1)}, "the seed of its table 't' is 0, not 1"),
            ({"t": TABLE, "u": TABLE}, "no table 'u'"),
            ({}, "'t' is missing here"),
        ],
    )
    def test_the_first_difference_is_named(self, other: Any, said: str | None) -> None:
        difference = Tables({"t": TABLE}).difference(Tables(other))
        assert difference is None if said is None else said in (difference or "")

    def test_an_unknown_name(self) -> None:
        with pytest.raises(UsageError, match="did you mean 'embedding'"):
            Tables({"embedding": TABLE}).named("embeding")
        with pytest.raises(UsageError, match="no tables at all"):
            Tables({}).named("t")


class TestIds:
    @each_row(
        ("ids", "said"),
        [
            ([-1], "no row -1 .it is number 0"),
            ([0, 100], "no row 100 .it is number 1"),
            (np.array([2**63 + 5], np.uint64), "no row 9223372036854775813"),
            ([0.5], "flat array of integers, not float64"),
            ([[1]], "flat array of integers"),
            ([True], "flat array of integers, not bool"),
            (np.zeros(MAX_IDS + 1, np.int64), "at most 1,048,576 of this width"),
        ],
    )
    def test_what_is_no_id_is_refused_by_its_number(self, ids: Any, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            NAMED.check_ids(ids)

    @each_row("dtype", ["int8", "uint64", ">i8", "uint32"])
    def test_any_integers_will_do(self, dtype: str) -> None:
        got = NAMED.check_ids(np.arange(0, 100, 7, dtype=dtype)[::2])
        assert got.dtype == np.int64
        assert got.flags.c_contiguous
        assert got.tolist() == list(range(0, 100, 14))

    def test_none_at_all(self) -> None:
        assert NAMED.check_ids([]).dtype == np.int64

    @each_row(
        ("grads", "said"),
        [
            (np.zeros((2, 4), np.float64), "float64, the table is float32"),
            (np.zeros((2, 4), ">f4"), "convert them"),
            (np.zeros((1, 4), np.float32), r"2 ids need \(2, 4\)"),
            (np.zeros(8, np.float32), "shape"),
        ],
    )
    def test_gradients_that_do_not_fit_are_refused(self, grads: Any, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            NAMED.check_gradients(grads, 2)


class TestParts:
    def test_what_is_sent_is_what_is_taken(self) -> None:
        assert counts(NAMED, fetch_parts(TABLE, 7), push=False) == (0, 7)
        assert counts(NAMED, push_parts(TABLE, 7, 0), push=True) == (7, 0)
        assert counts(NAMED, push_parts(TABLE, 7, 9), push=True) == (7, 9)

    @pytest.mark.parametrize(
        ("parts", "push"),
        [
            (push_parts(TABLE, 3, 2), False),
            ((*push_parts(TABLE, 3, 2), Part(0, 3, "raw", 24, 0)), True),
        ],
    )
    def test_another_number_of_payloads_is_refused(self, parts: Any, push: bool) -> None:
        with pytest.raises(BadPush, match=f"{len(parts)} payloads came"):
            counts(NAMED, parts, push)

    def test_a_server_may_have_none_of_the_rows(self) -> None:
        """Of a push of rows that are spread over servers, one may get neither rows nor wishes."""
        assert counts(NAMED, (), push=True) == (0, 0)
        assert counts(NAMED, (), push=False) == (0, 0)
        assert counts(NAMED, fetch_parts(TABLE, 3), push=True) == (0, 3)

    @pytest.mark.parametrize(
        ("parts", "push"),
        [
            ((Part(0, 0, "raw", 0, 0),), False),
            ((Part(0, 0, "raw", 0, 0), *push_parts(TABLE, 0, 2)), True),
        ],
    )
    def test_payloads_of_no_rows_are_refused(self, parts: Any, push: bool) -> None:
        with pytest.raises(BadPush, match="leave it out"):
            counts(NAMED, parts, push)

    @each_row("place", [0, 1, 2])
    @each_row(
        "change", [{"start": 1}, {"stop": 5}, {"codec": "int8"}, {"nbytes": 23}, {"nbytes": 2**31}]
    )
    def test_a_lying_part_is_refused(self, place: int, change: dict[str, Any]) -> None:
        parts = list(push_parts(TABLE, 3, 2))
        parts[place] = parts[place]._replace(**change)
        with pytest.raises(BadPush, match="announced as"):
            counts(NAMED, tuple(parts), push=True)

    @pytest.mark.parametrize("count", [MAX_IDS + 1, 2**62])
    def test_too_many_rows_are_refused_before_anything_else(self, count: int) -> None:
        with pytest.raises(BadPush, match="at most 1,048,576"):
            counts(NAMED, (Part(0, count, "raw", 8, 0),), push=False)


@each_row("row", [(), ("t",), ("t", 3), ("t", *range(40))])
def test_a_description_of_too_few_or_too_many_values(row: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match=f"described by {len(row)} values"):
        Tables.from_description([row])
