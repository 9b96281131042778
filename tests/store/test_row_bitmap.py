"""Which rows are stored, of tables of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms.optimizers import sgd
from aiops.kernels.rule import Rule
from aiops.model.tables import NamedTable, Table
from aiops.store import row_bitmap
from aiops.store.row_bitmap import BLOCK, RowBitmap
from aiops.store.sparse_table import SparseTable
from tests.strategies import DETERMINISTIC

HUGE = 1 << 40


@st.composite
def ids(draw: st.DrawFn) -> list[int]:
    """Rows of a huge table, many of them near the edges of blocks."""
    blocks = st.sampled_from((0, 1, 2, 77, HUGE // BLOCK - 1))
    places = st.sampled_from((0, 1, 7, 8, 63, 64, BLOCK // 2, BLOCK - 1))
    return draw(st.lists(st.builds(lambda b, p: b * BLOCK + p, blocks, places), max_size=12))


@given(steps=st.lists(st.tuples(ids(), ids()), max_size=5))
@DETERMINISTIC
def test_they_are_those_of_a_set(steps: list[tuple[list[int], list[int]]]) -> None:
    rows, there = RowBitmap(HUGE), set[int]()
    for added, removed in steps:
        rows.add(np.array(added, np.int64))
        there |= set(added)
        gone = sorted(there & set(removed))
        there -= set(gone)
        rows.remove(np.array(gone, np.int64), np.array(sorted(there), np.int64))
        assert rows.ids().tolist() == sorted(there)
        assert rows.blocks().tolist() == sorted({each // BLOCK for each in there})
        asked = np.array([*added, *removed], np.int64)
        assert rows.has(asked).tolist() == [each in there for each in asked.tolist()]


@pytest.mark.parametrize("rows", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1])
def test_all_rows_of_a_small_table(rows: int) -> None:
    found, each = RowBitmap(rows), np.arange(rows)
    found.add(each)
    np.testing.assert_array_equal(found.ids(), each)
    found.remove(each, each[:0])
    assert not len(found.ids())


@pytest.mark.parametrize("bound", [{"max_rows": 100}, {"max_age": 32}])
def test_eviction_reads_what_is_stored_and_not_the_whole_table(
    bound: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2⁴⁰ bits would be read for minutes: here each read of more than 300 blocks fails."""
    read = list[int]()
    flatnonzero = np.flatnonzero

    def noted(array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        if array.dtype == np.bool_ and len(array) != HUGE // BLOCK:
            read.append(len(array))
        return flatnonzero(array)

    monkeypatch.setattr(row_bitmap.np, "flatnonzero", noted)
    table = SparseTable(NamedTable("e", 0, Table(HUGE, 1, **bound)), Rule(sgd), "numpy")
    random = np.random.default_rng(1)
    for _push in range(70):
        new = random.choice(HUGE, 10)
        _bad, _count, fresh, evicted = table.update(new, np.ones((10, 1), np.float32), 0.5)
        table.version += 1
        table.made += int(fresh - evicted)
    assert table.made == len(table.stored_ids()) < 400
    assert read
    assert max(read) <= 450 * BLOCK // 64
