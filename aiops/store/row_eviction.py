"""Evict the rows of a table that no push has named for long.

A table that evicts (`Table.max_age`, `Table.max_rows`) has in each record, behind the parameters
and the rule's state, the number of the last push that named the row. So images, snapshots and
digests have it too, and it lies in the cache when the row is updated. The numbers of pushes are the
time of a table: eviction follows from the pushes alone, so a replay, a standby and a simulation
evict the same rows at the same push.

To find the oldest rows all stored ones are read, which is not done for every push. Rows are looked
at by their age after every ``max_age // 16`` pushes. When there are more than ``max_rows``, the
oldest are evicted until 15/16 of them are left.

An evicted row is what it was before its first push: a record of zeros. Memory pages in which no row
is stored any more go back to the system.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from aiops.model.layout import Array, Ints
from aiops.model.tables import Table
from aiops.store.untouched import give_back, pages_of

_SHARE = 16
"""Rows are evicted by 1/16 of a bound at a time."""

_LOW_32 = (1 << 32) - 1


def stamp_columns(table: Table) -> int:
    """Return the elements of a record that hold the number of a push: none if no row is evicted."""
    return 8 // np.dtype(table.dtype).itemsize if table.evicts else 0


class RowEviction:
    """Notes which push named a row last, and tells the rows to evict.

    Parameters
    ----------
    table
        Its bounds.
    store
        The records, ``dtype[rows, columns]``; the last `stamp_columns` of each are used here.
    """

    def __init__(self, table: Table, store: Array) -> None:
        self._table, self._store = table, store
        unsigned = np.dtype(f"u{store.dtype.itemsize}")
        self._stamps: Any = store.view(unsigned)[:, -stamp_columns(table) :]
        self._every = max(1, table.max_age // _SHARE)
        self._pages = pages_of(store)

    def stamp(self, ids: Ints, push: int) -> None:
        """Note that a push, by its number, has named these rows."""
        if self._stamps.shape[1] == 1:
            self._stamps[ids, 0] = push
            return
        self._stamps[ids, 0] = push & _LOW_32
        self._stamps[ids, 1] = push >> 32

    def is_due(self, push: int, stored: int) -> bool:
        """Return whether rows may have to be evicted after a push, with ``stored`` rows stored."""
        table = self._table
        aged = table.max_age and push >= table.max_age and push % self._every == 0
        return bool(aged or (table.max_rows and stored > table.max_rows))

    def choose(self, ids: Ints, push: int) -> Any:
        """Return of each stored row whether it is to be evicted after a push: bool[len(ids)].

        ``ids``: the stored rows, in order.
        """
        table, last = self._table, self._last(ids)
        evicted = np.zeros(len(ids), bool)
        if table.max_age and push % self._every == 0:
            evicted = push - last >= table.max_age
        left = len(ids) - int(evicted.sum())
        if table.max_rows and left > table.max_rows:
            surplus = left - (table.max_rows - table.max_rows // _SHARE)
            rest = np.flatnonzero(~evicted)
            oldest = np.argsort(last[rest], kind="stable")[:surplus]  # then by the row's number
            evicted[rest[oldest]] = True
        return evicted

    def clear(self, ids: Ints, kept: Ints) -> None:
        """Make records of zeros of rows; ``kept``: the rows that stay stored. Both in order."""
        self._store[ids] = 0
        if self._pages is None or not len(ids):
            return
        record, page = self._store.strides[0], mmap.PAGESIZE
        begins, ends = ids * record // page, ((ids + 1) * record - 1) // page
        spread = begins[:, None] + np.arange(record // page + 2)  # at most the pages of one record
        touched = np.unique(np.minimum(spread, ends[:, None]))
        first = touched * page // record  # the rows that have a byte in each of these pages
        last = ((touched + 1) * page - 1) // record
        stored = np.searchsorted(kept, last, "right") - np.searchsorted(kept, first, "left")
        whole = (touched + 1) * page <= self._store.nbytes
        give_back(self._pages, touched[(stored == 0) & whole], page)

    def _last(self, ids: Ints) -> Ints:
        """Return the number of the push that named each row last."""
        last: Ints = self._stamps[ids, 0].astype(np.int64)
        if self._stamps.shape[1] > 1:
            last |= self._stamps[ids, 1].astype(np.int64) << 32
        return last
