"""A table's rows as they were at one moment, read on another thread while updates go on.

Theory of operation
===================

A snapshot of a table has the rows and the state that it had at one row of the journal. To copy them
would stop training for seconds and double the memory of a large table. A `TableImage` copies
nothing when it is made. From then on,

- an update hands over the ids of the rows that it is about to write (`TableImage.keep`). Those that
  the reader has not passed, and that were not kept before, are copied aside. A row is in the
  processor's cache by then, for the update has just read it;
- the reader (`TableImage.rows`) goes through the rows in the order of their ids, some at a time.
  It takes a row from where it was copied to, if it was, and else from the table. Behind the reader
  updates keep nothing, and the places of the copies that it has taken are used again. Behind the
  last row the image ends, and gives up its memory.

Rows are kept one by one and not by chunks: ids of a push are spread over the table, so one push
would copy nearly all chunks, which is the pause that is to be avoided.

**The set of rows** is that of the moment, too. A row that is stored for the first time after it is
marked (`_NEW`) and passed over. One that is evicted after it has a copy, for eviction writes the
row, and so it is among the rows though its bit is gone. So the bits of the table, which tell the
rows that are stored, are not copied either.

**Memory.** At most one copy of each row that was stored, as if all were copied: that is if pushes
touch all rows before the reader has begun. Beside it 4 bytes (8 for more than 2³¹ rows) for each
row in a page of `_places` that was touched, and for each place. Memory comes page by page with its
use, and goes with the image.

**Threads.** Updates run on one thread at a time, the reader on another. What both use is used under
a guard: `keep` for the time of its copies, and the reader for the time in which it takes `_BYTES`.
An update calls `keep` before it writes. So a row that is being written while the reader holds the
guard either has a copy, or is behind the reader, or was not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from aiops.errors import UsageError
from aiops.model.arena import aligned
from aiops.model.layout import Array, Ints
from aiops.store.row_bitmap import BLOCK
from aiops.store.untouched import untouched

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiops.store.row_bitmap import RowBitmap

_PAGE = 4096
"""Bytes: pieces of whole pages, at whole pages, can be written past the system's cache."""

_BYTES = 1 << 20
"""Bytes of rows that are read at a time, about: for as long an update may have to wait."""

_IDS = 1 << 17  # ids that are handed out at a time

_NEW = -1
"""The place of a row that was not stored at the moment."""


class TableImage:
    """The rows of a table at the moment at which this is made, when no update runs.

    Parameters
    ----------
    store, stored, made
        The table's records, which rows are stored, and their number.
    guard
        Keeps the threads of updates and of the reader apart.
    evicts
        Whether rows may be evicted while it is read.

    Attributes
    ----------
    held
        Rows whose copies are held at present.
    nbytes
        Bytes of all copies, if all rows are kept.
    """

    def __init__(
        self,
        store: Array,
        stored: RowBitmap,
        made: int,
        guard: AbstractContextManager[Any],
        *,
        evicts: bool = False,
    ) -> None:
        self._evicts = evicts
        self._store, self._stored, self._made, self._guard = store, stored, made, guard
        # Of this moment: rows that are evicted meanwhile are in no other.
        self._begins = (stored.blocks() * BLOCK).tolist()
        rows = len(store)
        small = np.dtype(np.int32 if rows < 1 << 31 else np.int64)
        # By row, one more than its place among the copies; 0: it has none.
        self._places = untouched(rows, small)
        self._copies = untouched(made * store.shape[1], store.dtype).reshape(made, store.shape[1])
        self._free = untouched(made, small)  # places that are free again: the first ones
        self.nbytes = self._copies.nbytes + self._free.nbytes
        self._frees = self._top = self.held = 0  # their number; places from `_top` on are free
        self._passed = 0  # the reader needs no row before it
        self._over = False  # all was read, or released

    @property
    def ids(self) -> RowStream:
        """The ids of the rows that were stored, int64[made], in order."""
        return RowStream(np.dtype(np.int64), (self._made,), self._read_ids)

    @property
    def rows(self) -> RowStream:
        """Their records, in the same order. They are read once, and after the ids."""
        shape = self._made, self._store.shape[1]
        return RowStream(self._store.dtype, shape, self._read_rows)

    def keep(self, ids: Ints) -> None:
        """Copy rows that are about to be written, as far as the reader needs them.

        ``ids``: all different.
        """
        with self._guard:
            if self._over:
                return
            first = ids[(self._places[ids] == 0) & (ids >= self._passed)]
            stored = self._stored.has(first)
            self._places[first[~stored]] = _NEW
            rows = first[stored]
            places = self._take(len(rows))
            self._copies[places] = self._store[rows]
            self._places[rows] = places + 1

    def release(self) -> None:
        """Keep nothing more, and give up the memory; may be called twice."""
        with self._guard:
            self._over, self.held = True, 0
            self._places = self._free = np.empty(0, self._free.dtype)
            self._copies = np.empty((0, 0), self._store.dtype)

    def _take(self, count: int) -> Ints:
        """Return free places; those that were in use before come first, for they have memory."""
        again = min(count, self._frees)
        places = np.empty(count, np.int64)
        self._frees -= again
        places[:again] = self._free[self._frees : self._frees + again]
        places[again:] = np.arange(self._top, self._top + count - again)
        self._top += count - again
        self.held += count
        return places

    def _give_back(self, places: Ints) -> None:
        self._free[self._frees : self._frees + len(places)] = places
        self._frees += len(places)
        self.held -= len(places)

    # ------------------------------------------------------------ the reader

    def _read_ids(self) -> Iterator[Ints]:
        """Yield the ids, in pieces of whole pages but for the last."""
        return _regrouped(self._windows(), _IDS)

    def _windows(self) -> Iterator[Ints]:
        """Yield the ids of the rows that were stored, from one range of rows after the other."""
        for begin in self._begins:
            with self._guard:
                self._check()
                bits = self._stored.bits[begin >> 3 : (begin + BLOCK) >> 3]
                stored = np.unpackbits(bits, bitorder="little")
                if self._evicts:  # copies of rows that were evicted meanwhile
                    places = self._places[begin : begin + BLOCK]
                    stored[: len(places)] |= places > 0
                ids = np.flatnonzero(stored) + begin
                yielded = ids[self._places[ids] != _NEW]
            if len(yielded):
                yield yielded

    def _read_rows(self) -> Iterator[Array]:
        """Yield the records, in pieces of whole pages but for the last."""
        record = self._store.shape[1] * self._store.dtype.itemsize
        whole = _PAGE // gcd(_PAGE, record)  # rows that take whole pages
        for ids in _regrouped(self._windows(), whole * max(1, _BYTES // (whole * record))):
            yield self._pass(ids)
        self.release()

    def _pass(self, ids: Ints) -> Array:
        """Return the records of the next rows, and have updates keep them no longer."""
        store = self._store
        found = aligned(len(ids) * store.shape[1] * store.dtype.itemsize, _PAGE)
        records: Array = found.view(store.dtype).reshape(len(ids), -1)
        with self._guard:
            self._check()
            if ids[-1] - ids[0] == len(ids) - 1:  # all of a range: faster
                records[:] = store[ids[0] : ids[-1] + 1]
            else:
                np.take(store, ids, axis=0, out=records, mode="clip")  # which writes in place
            places = self._places[ids]
            kept = np.flatnonzero(places > 0)
            places = places[kept].astype(np.int64) - 1
            records[kept] = self._copies[places]
            self._give_back(places)
            self._passed = int(ids[-1]) + 1
        return records

    def _check(self) -> None:
        if self._over:
            raise UsageError("the rows of a table's image are read once, before it is released")


@dataclass(frozen=True, slots=True)
class RowStream:
    """An array that is not in memory, to be read in order.

    Attributes
    ----------
    dtype, shape
        Of the array.
    pieces
        Yields consecutive parts along the first axis, each contiguous, which do not change.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


def _regrouped(arrays: Iterable[Ints], count: int) -> Iterator[Ints]:
    """Yield the same elements, in arrays of ``count`` but for the last."""
    waiting, length = list[Ints](), 0
    for array in arrays:
        waiting.append(array)
        length += len(array)
        if length < count:
            continue
        joined = np.concatenate(waiting)
        whole = length - length % count
        yield from joined[:whole].reshape(-1, count)
        waiting, length = [joined[whole:]], length - whole
    if length:
        yield np.concatenate(waiting)
