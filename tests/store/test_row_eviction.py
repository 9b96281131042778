"""Rows are evicted as the rule of ages and numbers says, and are then as if never pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms.optimizers import adagrad
from aiops.errors import UsageError
from aiops.kernels.rule import Rule
from aiops.model.tables import NamedTable, Table, Tables
from aiops.store.sparse_table import SparseTable
from aiops.wire.fields import CHECKS
from aiops.wire.messages import TableRows
from tests.rows import each_row
from tests.store.test_sparse_table import Tabled, ones
from tests.strategies import DETERMINISTIC

ADAGRAD = Rule(adagrad, {"s": 0.0}, {"decay": 0.0, "eps": 1e-10})


def made(table: Table, backend: str = "numpy") -> SparseTable:
    return SparseTable(NamedTable("t", 0, table), ADAGRAD, backend)


def push(store: SparseTable, ids: Any, value: float = 1.0) -> int:
    """Push, and count as the engine does; return the number of rows evicted."""
    grads = np.full((len(ids), store.table.width), value, store.dtype)
    _place, _rows, fresh, *evicted = store.update(np.asarray(ids, np.int64), grads, 0.5)
    store.version += 1
    store.made += int(fresh) - sum(map(int, evicted))
    return sum(map(int, evicted))


class Model:
    """Which rows are stored, and since when, by the words of `Table`."""

    def __init__(self, table: Table, version: int) -> None:
        self.table, self.version = table, version
        self.last: dict[int, int] = {}

    def push(self, ids: list[int]) -> set[int]:
        """Return the rows that are evicted after a push."""
        self.version += 1
        self.last.update(dict.fromkeys(ids, self.version))
        age, most = self.table.max_age, self.table.max_rows
        gone = set()
        if age and self.version % max(1, age // 16) == 0:
            gone = {row for row, last in self.last.items() if self.version - last >= age}
        left = sorted(set(self.last) - gone, key=lambda row: (self.last[row], row))
        if most and len(left) > most:
            gone |= set(left[: len(left) - (most - most // 16)])
        for row in gone:
            del self.last[row]
        return gone


@DETERMINISTIC
@given(data=st.data())
def test_it_evicts_what_the_rule_says(data: st.DataObject) -> None:
    table = Table(
        *(60, 3, data.draw(st.sampled_from(("float32", "float64")))),
        max_rows=data.draw(st.sampled_from((0, 1, 10, 40))),
        max_age=data.draw(st.sampled_from((0, 1, 5, 40))),
    )
    backend = data.draw(st.sampled_from(("numpy", "auto")))
    begin = data.draw(st.sampled_from((0, 2**32 - 3)))  # a push number has 64 bits
    store, model = made(table, backend), Model(table, begin)
    store.version = begin
    every = np.arange(60)
    expected = np.empty((60, 3), store.dtype)
    initial = np.empty_like(expected)
    store.gather(every, initial)
    expected[:] = initial
    for ids in data.draw(st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12))):
        unevicted = made(Table(60, 3, table.dtype))  # the same push on the same rows and states
        kept, records = store.stored_ids(), store._store[store.stored_ids(), :6]
        unevicted._store[kept] = records
        push(unevicted, ids)
        unevicted.gather(every, expected)
        gone = model.push(ids)
        expected[sorted(gone)] = initial[sorted(gone)]
        assert push(store, ids) == (len(gone) if table.evicts else 0)
        got = np.empty_like(expected)
        store.gather(every, got)
        assert got.tobytes() == expected.tobytes()
        assert store.stored_ids().tolist() == sorted(model.last)
        assert store.made == len(model.last)


def test_in_an_engine_evicted_rows_have_their_initial_values_again() -> None:
    inline = Tabled(settings={"optimizer": "adam"}, table=Table(50, 3, max_rows=4, max_age=8))
    first = inline.values(np.arange(50))
    for row in range(6):
        assert isinstance(inline.push_rows([row], ones(1), wanted=[row]), TableRows)
    [line] = inline.engine.report()["tables"]
    assert (line["made"], line["evicted"]) == (4, 2)
    np.testing.assert_array_equal(inline.values([0, 1]), first[:2])
    assert (inline.values([2, 3, 4, 5]) != first[2:6]).all()
    for _ in range(8):
        inline.push_rows([9], ones(1))
    assert inline.store.stored_ids().tolist() == [9]
    again = inline.push_rows([0], ones(1), version=0)
    assert isinstance(again, TableRows)
    assert again.staleness == 14, "a gradient of an evicted row is one of the row as it began"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("width", [700, 1500])
def test_memory_goes_back_to_the_system(width: int) -> None:
    """Of rows that share pages with others and of rows that span several."""
    rows = (32 << 20) // (8 * width)
    store = made(Table(rows, width, "float32", max_age=1))
    store.version = 1
    ids = np.arange(rows)
    push(store, ids)
    before = resident()
    assert push(store, [rows // 2]) == rows - 1
    assert before - resident() > 20 << 20
    out = np.empty((3, width), np.float32)
    store.gather(np.array([rows // 2 - 1, rows // 2, rows // 2 + 1]), out)
    twin = made(Table(rows, width, "float32"))
    push(twin, [rows // 2])
    push(twin, [rows // 2])
    found = np.empty_like(out)
    twin.gather(np.array([rows // 2 - 1, rows // 2, rows // 2 + 1]), found)
    assert out.tobytes() == found.tobytes()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_its_description() -> None:
    table = Table(10, 2, max_rows=5, max_age=7)
    described = Tables({"t": table, "plain": Table(10, 2)}).described
    assert [len(row) for row in described] == [7, 9]
    assert CHECKS["Sparse"](described)
    assert not CHECKS["Sparse"]((described[1][:8],))
    assert not CHECKS["Sparse"](((*described[1][:8], -1),))
    back = Tables.from_description(described)
    assert back["t"].table == table
    other = Tables({"t": Table(10, 2, max_rows=5), "plain": Table(10, 2)})
    assert other.difference(back) == "the max_age of its table 't' is 0, not 7"


@each_row("bounds", [{"max_rows": -1}, {"max_age": 1.5}, {"max_age": 2**60}])
def test_bounds_out_of_range(bounds: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=r"max_\w+ \(0: no bound\) must be a whole number from 0 to"
    ):
        Table(10, 2, **bounds)


def test_rows_that_a_server_begins_with_are_the_oldest() -> None:
    store = made(Table(20, 2, max_rows=4))
    store.put(np.array([3, 7, 11]), np.ones((3, 2), np.float32))
    assert store.made == 3
    push(store, [1, 2])
    assert store.stored_ids().tolist() == [1, 2, 7, 11]
