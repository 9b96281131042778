"""The rows of a table on the server: stored when they are first updated, read without a trace.

A table has room for all its rows in address space and none of it in memory: a page is committed
when a row in it is first written. Reading a row that was never written works its first values out
anew. So fetching changes nothing, and what a table costs is what has been pushed to it.

Tables are not leased as the dense parameters are: a reply gathers its rows. The engine never lets
a gather and an update of rows run at the same time.
"""

from __future__ import annotations

import hashlib
import mmap
import platform
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops import kernels
from aiops.errors import UsageError
from aiops.kernels.row_initialiser import RowInitialiser
from aiops.kernels.rule import Rule
from aiops.kernels.table_rows import mover
from aiops.model.layout import Array, Ints
from aiops.model.tables import NamedTable, outside

_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
_USUAL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _USUAL else 0)  # Python 3.13 has the name
_SMALL = 1 << 20  # bytes that are simply allocated
_AT_ONCE = 1 << 16  # rows, when all of them are gone through


@dataclass(slots=True)
class TableJob:
    """One piece of work on a table, fixed when it is issued: a push, a gather, or first one and
    then the other.

    ``pushed``, ``grads``: the rows pushed and their gradients; None when nothing is pushed.
    ``step``: learning rate times modulation. ``wanted``, ``out``: the rows to gather, and where to.
    """

    store: SparseTable
    pushed: Ints | None = None
    grads: Array | None = None
    step: float = 0.0
    wanted: Ints | None = None
    out: Array | None = None

    @property
    def cost(self) -> int:
        """Bytes read and written, roughly."""
        rows = sum(len(ids) for ids in (self.pushed, self.wanted) if ids is not None)
        return 3 * rows * self.store.record_bytes

    def run(self) -> Ints:
        """Do it (on any thread, one at a time).

        Returns ``[place, rows, fresh]``: the place among the pushed ids of the first row whose
        gradients add up to what no model survives (nothing was changed then; else -1), how many
        different rows were updated, and how many of them for the first time.
        """
        done = np.array([-1, 0, 0])
        if self.pushed is not None:
            assert self.grads is not None
            done = self.store.update(self.pushed, self.grads, self.step)
        if self.wanted is not None and done[0] < 0:
            assert self.out is not None
            self.store.gather(self.wanted, self.out)
        return done


class SparseTable:
    """One table's rows, the rule's state for them, and the kernels that update them.

    Parameters
    ----------
    named
        What the table is.
    rule
        The mathematics of an update. Rows that an update does not touch keep parameters and state.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``; all give the same bits.
    later
        Whether `warm` will be called, on whichever thread: until then NumPy does the work.

    Attributes
    ----------
    version
        How many pushes have been applied to the table.
    made
        How many rows are stored.
    """

    def __init__(
        self, named: NamedTable, rule: Rule, backend: str = "auto", *, later: bool = False
    ) -> None:
        if rule.reads or rule.scalars:
            raise UsageError(f"rule {rule.name!r} reads more than a row has: it takes no tables")
        table = named.table
        self.named, self.table, self.dtype = named, table, np.dtype(table.dtype)
        self.version = self.made = 0
        self.total_staleness = self.rows_pushed = 0
        states = self._states = tuple(rule.state.values())
        columns = (1 + len(states)) * table.width
        self.record_bytes = columns * self.dtype.itemsize
        self._store = _untouched(table.rows * columns, self.dtype).reshape(table.rows, columns)
        self._pages = _Promotion(self._store)
        self._bits = _untouched(-(-table.rows // 8), np.dtype(np.uint8))
        first = RowInitialiser(table.init, table.scale, table.seed)
        self._make_mover = partial(mover, first, table.width, states, self.dtype)
        self._backend = backend
        self._mover = self._make_mover("numpy" if later else backend)
        self._kernel = (kernels.build_later if later else kernels.build)(rule, self.dtype, backend)
        self._survey = kernels.surveyor(self.dtype, backend)
        self._spans = kernels.Spans.whole(0, 0.0)
        self._arrays = 1 + len(states)
        self._room = 0
        self._make_room(256)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are stored, with their state."""
        return self.made * self.record_bytes

    def warm(self) -> None:
        """Compile the kernels."""
        self._kernel.warm()
        self._mover = self._make_mover(self._backend)  # they may take turns at any moment

    def gather(self, ids: Ints, out: Array) -> None:
        """Write the parameters of these rows to ``out``, ``dtype[len(ids), width]``."""
        self._mover.gather(self._store, ids, out)

    def update(self, ids: Ints, grads: Array, step: float) -> Ints:
        """Apply one push: gradients of the same row are added up first. See `TableJob.run`."""
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
        arrays = [array[:size] for array in work]
        self._kernel(spans, 1.0, arrays[0], total[:size], arrays[0], arrays[1:])
        fresh = self._mover.scatter(self._store, self._bits, unique[:count], work)
        if 2 * self.made >= self.table.rows:
            self._pages.go_on(count)
        return np.array([-1, count, fresh])

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
            self.made += self._mover.scatter(self._store, self._bits, some, self._work)

    def stored(self) -> tuple[Ints, Array]:
        """Return the ids of the rows that are stored, in order, and a copy of their parameters."""
        ids = self._stored_ids()
        rows = np.empty((len(ids), self.table.width), self.dtype)
        self.gather(ids, rows)
        return ids, rows

    def digest(self) -> bytes:
        """Return the SHA-256 of what is stored: ids, parameters and state."""
        total, ids = hashlib.sha256(), self._stored_ids()
        total.update(ids.data)
        for start in range(0, len(ids), _AT_ONCE):
            total.update(self._store[ids[start : start + _AT_ONCE]].data)
        return total.digest()

    def report(self) -> dict[str, Any]:
        """Return its line of the statistics."""
        table = self.table
        return {
            "name": self.named.name,
            "rows": table.rows,
            "width": table.width,
            "dtype": table.dtype,
            "init": table.init,
            "made": self.made,
            "bytes": self.nbytes,
            "version": self.version,
            "rows_pushed": self.rows_pushed,
            "mean_staleness": self.total_staleness / max(self.version, 1),
        }

    def _stored_ids(self) -> Ints:
        bytes_ = np.flatnonzero(self._bits)
        bits = np.unpackbits(self._bits[bytes_], bitorder="little").reshape(-1, 8)
        where, bit = np.nonzero(bits)
        return np.ascontiguousarray(bytes_[where] * 8 + bit, np.int64)

    def _make_room(self, rows: int) -> None:
        self._room = 1 << (rows - 1).bit_length()
        size = self._room * self.table.width
        self._unique = np.empty(self._room, np.int64)
        self._total = np.empty(size, self.dtype)
        self._work = np.empty((self._arrays, size), self.dtype)


class _Promotion:
    """Makes huge pages of the ones that a table takes up, once it takes up most of them anyway.

    With 4 KiB pages every row of a large table misses the processor's address cache: gathering 512
    of 10 million takes half as long again as from huge pages. Copying them over takes a second per
    GB or two, so it is done bit by bit while rows are updated.
    """

    _HUGE, _COLLAPSE = 2 << 20, 25  # MADV_COLLAPSE, Linux 6.1
    _STEP = 8 * _HUGE  # bytes at once
    _EVERY = 1 << 17  # rows updated from one step to the next

    def __init__(self, store: Array) -> None:
        base: Any = store.base
        while isinstance(base, np.ndarray):
            base = base.base
        pages = base.obj if isinstance(base, memoryview) else base
        self._pages: mmap.mmap | None = pages if isinstance(pages, mmap.mmap) else None
        self._next = -store.ctypes.data % self._HUGE
        self._end = store.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._updated = 0
        if self._end - self._next < self._HUGE:
            self._pages = None

    def go_on(self, rows: int) -> None:
        """Hear of so many rows updated, and promote the next few pages if it is time."""
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


def _untouched(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros that take up memory page by page, as they are written.

    They may be more than the machine has (no reserve). Not from huge pages, which NumPy asks for
    where it can: a row would take 2 MiB.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _SMALL or _NO_HUGE_PAGES is None:
        return np.zeros(count, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    pages = mmap.mmap(-1, nbytes, flags=flags)
    pages.madvise(_NO_HUGE_PAGES)
    return np.frombuffer(pages, dtype)
