"""The rows of a table on the server: stored by their first update, unchanged by reading.

A table reserves address space for all its rows. The system commits a page of memory when a row in
it is first written. Reading a row that was never written computes its initial values again. So a
fetch changes nothing, and a table takes memory only for the rows that were pushed. Rows may be
evicted (`aiops.store.row_eviction`): then they are as if they had never been pushed.

Tables are not leased as the dense parameters are: a reply gathers its rows into a buffer. The
engine never runs a gather and an update of rows at the same time. A snapshot reads the rows while
updates go on (`aiops.store.table_image`).
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aiops import kernels
from aiops.errors import UsageError
from aiops.kernels.row_initialiser import RowInitialiser
from aiops.kernels.rule import Rule
from aiops.kernels.table_rows import mover
from aiops.model.arena import aligned
from aiops.model.layout import Array, Bytes, Ints
from aiops.model.tables import ID_BYTES, NamedTable, outside, share_of
from aiops.store.resources import Guard
from aiops.store.row_bitmap import RowBitmap
from aiops.store.row_eviction import RowEviction, stamp_columns
from aiops.store.table_image import TableImage
from aiops.store.untouched import pages_of, untouched

_AT_ONCE = 1 << 16  # rows per step of a pass over all of them

COPIED = 64 << 20
"""The most bytes of rows, with their ids, in one piece of a copy."""


@dataclass(slots=True)
class TableJob:
    """One piece of work on a table, fixed when it is issued: a push, a gather, or both in turn.

    ``pushed``: the rows pushed, and their gradients. ``step``: learning rate times modulation.
    ``scalars``: the rule's, for this update of the table. ``wanted``: the rows to gather, and the
    buffer for them. ``push``: it is a push, though of no rows: those that it has lie on other
    shards.
    """

    store: SparseTable
    pushed: tuple[Ints, Array] | None = None
    step: float = 0.0
    scalars: tuple[float, ...] = ()
    wanted: tuple[Ints, Array] | None = None
    push: bool = False

    @property
    def cost(self) -> int:
        """Bytes read and written, roughly."""
        rows = sum(len(each[0]) for each in (self.pushed, self.wanted) if each is not None)
        return 3 * rows * self.store.record_bytes

    def run(self) -> Ints:
        """Run the job (on any thread, one at a time).

        Returns ``[place, rows, fresh]``: the index among the pushed ids of the first row whose
        gradients have a sum that is not fit to be applied (nothing was changed then; else -1), the
        number of different rows updated (-1 if it is the updated row that is not finite), and the
        number of those updated for the first time. If the table evicts rows, a fourth number is
        that of the rows evicted after it.
        """
        done = np.array([-1, 0, 0])
        if self.pushed is not None:
            done = self.store.update(*self.pushed, self.step, self.scalars)
        elif self.push:
            done = self.store.pass_push()
        if self.wanted is not None and done[0] < 0:
            self.store.gather(*self.wanted)
        return done


class RowsCopy(NamedTuple):
    """Rows of a table as they were at a moment: ``rows`` ids, and the values behind them."""

    table: int
    rows: int
    data: Bytes


@dataclass(slots=True)
class CopyRowsJob:
    """Copy all stored rows of tables, in pieces of at most `COPIED` bytes or so.

    ``copies``: the pieces, once it is done.
    """

    stores: Sequence[SparseTable]
    copies: Sequence[RowsCopy] = ()

    @property
    def cost(self) -> int:
        """Bytes read and written, roughly."""
        return 2 * sum(store.nbytes for store in self.stores)

    def run(self) -> Ints:
        """Run the job (on any thread, while no update of rows runs); its result says nothing."""
        self.copies = [
            RowsCopy(number, len(ids), store.copied(ids))
            for number, store in enumerate(self.stores)
            for ids in _cut(store.stored_ids(), COPIED // (ID_BYTES + store.table.row_bytes))
        ]
        return np.array([-1, 0, 0])


def _cut(ids: Ints, most: int) -> Iterator[Ints]:
    """Yield ids, as many at a time as are allowed."""
    for start in range(0, len(ids), max(1, most)):
        yield ids[start : start + max(1, most)]


class SparseTable:
    """One table's rows, the rule's state for them, and the kernels that update them.

    Parameters
    ----------
    named
        The table's name and description.
    rule
        The mathematics of an update. Rows that an update does not touch keep parameters and state.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``; all give the same bits.
    later
        True if `warm` will be called, on any thread: until then NumPy does the work.
    guard
        Makes what keeps threads apart, if images are read on another one (`image`).
    shards
        The number of servers that the rows lie on: this one keeps its share of ``max_rows``.

    Attributes
    ----------
    version
        The number of pushes applied to the table.
    made
        The number of rows stored.
    columns
        Elements of a stored row, with its state.
    evicted
        The number of evictions so far.
    """

    def __init__(
        self,
        named: NamedTable,
        rule: Rule,
        backend: str = "auto",
        *,
        later: bool = False,
        guard: Guard = nullcontext,
        shards: int = 1,
    ) -> None:
        if rule.reads:
            raise UsageError(f"rule {rule.name!r} reads more than a row has: it takes no tables")
        table = named.table
        self.named, self.table, self.dtype = named, table, np.dtype(table.dtype)
        self.version = self.made = 0
        self.total_staleness = self.rows_pushed = self.evicted = 0
        states = self._states = tuple(rule.state.values())
        columns = (1 + len(states)) * table.width + stamp_columns(table)
        self.columns = columns
        self.record_bytes = columns * self.dtype.itemsize
        self._store = untouched(table.rows * columns, self.dtype).reshape(table.rows, columns)
        self._pages = _Promotion(self._store)
        self._stored = RowBitmap(table.rows)
        first = RowInitialiser(table.init, table.scale, table.seed)
        self._make_mover = partial(mover, first, table.width, states, self.dtype)
        self._backend = backend
        self._mover = self._make_mover("numpy" if later else backend)
        self._kernel = (kernels.build_later if later else kernels.build)(rule, self.dtype, backend)
        self._survey = kernels.surveyor(self.dtype, backend)
        self._infinite = kernels.infinity_finder(self.dtype, backend)
        self._spans = kernels.Spans.whole(0, 0.0, (0.0,) * len(rule.scalars))
        self._arrays = 1 + len(states)
        self._images: tuple[TableImage, ...] = ()
        share = share_of(table, shards)
        self._eviction = RowEviction(share, self._store) if table.evicts else None
        self._guard = guard
        self._room = 0
        self._make_room(256)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are stored, with their state."""
        return self.made * self.record_bytes

    def warm(self) -> None:
        """Compile the kernels."""
        self._kernel = self._kernel.warm()
        self._mover = self._make_mover(self._backend)  # both give the same bits: any moment will do

    def gather(self, ids: Ints, out: Array) -> None:
        """Write the parameters of these rows to ``out``, ``dtype[len(ids), width]``."""
        self._mover.gather(self._store, ids, out)

    def update(
        self,
        ids: Ints,
        grads: Array,
        step: float,
        scalars: tuple[float, ...] = (),
    ) -> Ints:
        """Apply one push and return as `TableJob.run` does.

        Gradients of the same row are added up first. ``scalars``: those that the rule names.
        """
        if len(ids) > self._room:
            self._make_room(len(ids))
        unique, total, work = self._unique, self._total, self._work
        count = self._mover.collect(self._store, ids, grads, unique, total, work)
        size, width = count * self.table.width, self.table.width
        if count < len(ids):  # each was surveyed when it came, but not their sums
            bad = self._survey(total[:size])
            if bad >= 0:
                place = int(np.argmax(ids == unique[bad // width]))
                return np.array([place, 0, 0])
        spans = self._spans
        spans.hi[0], spans.step[0] = size, step
        if scalars:
            spans.scalars[0] = scalars
        arrays = [array[:size] for array in work]
        self._kernel(spans, 1.0, arrays[0], total[:size], arrays[0], arrays[1:])
        bad = self._first_infinite(arrays)
        if bad >= 0:
            return np.array([int(np.argmax(ids == unique[bad // width])), -1, 0])
        for image in self._images:
            image.keep(unique[:count])
        fresh = self._mover.scatter(self._store, self._stored.bits, unique[:count], work)
        if fresh:
            self._stored.mark(unique[:count])
        if 2 * self.made >= self.table.rows:
            self._pages.count_updates(count)
        if self._eviction is None:
            return np.array([-1, count, fresh])
        self._eviction.stamp(unique[:count], self.version + 1)
        return np.array([-1, count, fresh, self._evict(self.version + 1, self.made + fresh)])

    def pass_push(self) -> Ints:
        """Take note of a push that has no rows here; return as `TableJob.run` does."""
        if self._eviction is None:
            return np.array([-1, 0, 0])
        return np.array([-1, 0, 0, self._evict(self.version + 1, self.made)])

    def _first_infinite(self, arrays: Sequence[Array]) -> int:
        """Return the least index of an element that is not finite in one of the arrays, or -1."""
        found = [self._infinite(array) for array in arrays]
        return min((index for index in found if index >= 0), default=-1)

    def _evict(self, push: int, stored: int) -> int:
        """Evict the rows that are due after a push, of those stored; return their number."""
        eviction = self._eviction
        if eviction is None or not eviction.is_due(push, stored):
            return 0
        ids = self.stored_ids()
        evicted = eviction.choose(ids, push)
        chosen = ids[evicted]
        for image in self._images:
            image.keep(chosen)
        kept = ids[~evicted]
        self._stored.remove(chosen, kept)
        eviction.clear(chosen, kept)
        return len(chosen)

    def put(self, ids: Ints, rows: Array) -> None:
        """Store rows of another run in a table that has none yet; their state is that of new rows.

        Raises
        ------
        UsageError
            When they are not rows of this table.
        """
        good = rows.shape == (len(ids), self.table.width) and rows.dtype == self.dtype
        if not good or outside(ids, self.table.rows) >= 0 or len(np.unique(ids)) < len(ids):
            raise UsageError(f"the rows of table {self.named.name!r} in the file do not fit it")
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            if len(some) > self._room:
                self._make_room(len(some))
            size = len(some) * self.table.width
            self._work[0, :size] = rows[start : start + _AT_ONCE].reshape(-1)
            for array, value in zip(self._work[1:], self._states, strict=True):
                array[:size] = value
            self.made += self._mover.scatter(self._store, self._stored.bits, some, self._work)
            self._stored.mark(some)

    def stored(self) -> tuple[Ints, Array]:
        """Return the ids of the rows that are stored, in order, and a copy of their parameters."""
        ids = self.stored_ids()
        rows = np.empty((len(ids), self.table.width), self.dtype)
        self.gather(ids, rows)
        return ids, rows

    def copied(self, ids: Ints) -> Bytes:
        """Return the bytes of ids, and behind them those of the rows' parameters."""
        data = aligned(len(ids) * (ID_BYTES + self.table.row_bytes))
        data[: ids.nbytes] = ids.view(np.uint8)
        rows = data[ids.nbytes :].view(self.dtype).reshape(len(ids), self.table.width)
        self.gather(ids, rows)
        return data

    def image(self) -> TableImage:
        """Return the rows as they are now, with their state, as `restore` takes them.

        While no update runs. It is read while updates go on, and `end_image` ends it.
        """
        evicts = self._eviction is not None
        found = TableImage(self._store, self._stored, self.made, self._guard(), evicts=evicts)
        self._images += (found,)
        return found

    def end_image(self, image: TableImage) -> None:
        """End an image, which is not read any more."""
        self._images = tuple(each for each in self._images if each is not image)
        image.release()

    def state(self) -> dict[str, int]:
        """Return the counts, for `restore`."""
        counts = ("version", "made", "total_staleness", "rows_pushed", "evicted")
        return {name: getattr(self, name) for name in counts}

    def restore(self, state: Mapping[str, int], ids: Ints, records: Array) -> None:
        """Continue, in a table without rows, from what `state` and `image` returned.

        ``records``: ``dtype[len(ids), columns]``.
        """
        self.version, self.made = state["version"], state["made"]
        self.total_staleness, self.rows_pushed = state["total_staleness"], state["rows_pushed"]
        self.evicted = state["evicted"]
        self._store[ids] = records
        self._stored.add(ids)

    def digest(self) -> bytes:
        """Return the SHA-256 of what is stored: ids, parameters and state."""
        return digest_of_rows([self])

    def records(self, ids: Ints) -> Array:
        """Return a copy of rows with their state, [len(ids), arrays * width]."""
        return self._store[ids]

    def report(self) -> dict[str, Any]:
        """Return the table's row of the statistics."""
        table = self.table
        return {
            "name": self.named.name,
            "rows": table.rows,
            "width": table.width,
            "dtype": table.dtype,
            "init": table.init,
            "made": self.made,
            "evicted": self.evicted,
            "bytes": self.nbytes,
            "version": self.version,
            "rows_pushed": self.rows_pushed,
            "mean_staleness": self.total_staleness / max(self.version, 1),
        }

    def stored_ids(self) -> Ints:
        """Return the ids of the rows that are stored, int64[made], in order."""
        return self._stored.ids()

    def _make_room(self, rows: int) -> None:
        self._room = 1 << (rows - 1).bit_length()
        size = self._room * self.table.width
        self._unique = np.empty(self._room, np.int64)
        self._total = np.empty(size, self.dtype)
        self._work = np.empty((self._arrays, size), self.dtype)


class _Promotion:
    """Makes huge pages of a table's memory, once half of its rows are stored.

    With 4 KiB pages every row of a large table misses the processor's address cache: gathering 512
    of 10 million takes half as long again as from huge pages. Copying takes a second per GB or two,
    so it is done in steps while rows are updated.
    """

    _HUGE, _COLLAPSE = 2 << 20, 25  # MADV_COLLAPSE, Linux 6.1
    _STEP = 8 * _HUGE  # bytes per step
    _EVERY = 1 << 17  # rows updated from one step to the next

    def __init__(self, store: Array) -> None:
        self._pages = pages_of(store)
        self._next = -store.ctypes.data % self._HUGE
        self._end = store.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._updated = 0
        if self._end - self._next < self._HUGE:
            self._pages = None

    def count_updates(self, rows: int) -> None:
        """Count updated rows, and promote the next pages after every 131,072 of them."""
        self._updated += rows
        if self._pages is None or self._updated < self._EVERY:
            return
        self._updated = 0
        size = min(self._STEP, self._end - self._next)
        try:
            if self._next < self._HUGE:
                self._pages.madvise(mmap.MADV_HUGEPAGE)
            self._pages.madvise(self._COLLAPSE, self._next, size)
        except (OSError, ValueError):  # an older kernel, or no such page to be had
            self._pages = None
        self._next += size
        if self._end - self._next < self._HUGE:
            self._pages = None


def digest_of_rows(shares: Sequence[SparseTable]) -> bytes:
    """Return the SHA-256 of what is stored of a table: ids, parameters and state.

    ``shares``: the table on each of the servers that its rows lie on; the digest is that of one.
    """
    stored = [share.stored_ids() for share in shares]
    ids, total = np.sort(np.concatenate(stored)), hashlib.sha256()
    total.update(ids.data)
    where = np.empty(len(ids), np.intp)  # the share of each
    for number, theirs in enumerate(stored):
        where[np.searchsorted(ids, theirs)] = number
    for start in range(0, len(ids), _AT_ONCE):
        some, here = ids[start : start + _AT_ONCE], where[start : start + _AT_ONCE]
        rows = shares[0].records(some[:0])
        rows = np.empty((len(some), *rows.shape[1:]), rows.dtype)
        for number, share in enumerate(shares):
            rows[here == number] = share.records(some[here == number])
        total.update(rows.data)
    return total.digest()
