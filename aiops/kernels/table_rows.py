"""Gather and scatter the rows of sparse tables, and add up their gradients.

A table is stored as ``rows`` records of ``width`` elements of each array: the parameters, then the
rule's state, so that one place in memory holds all that an update of a row needs. The record itself
marks whether it has been written, for a mark elsewhere would be another cache miss: its first
element is stored with all its bits flipped, so a record whose first element is all zero bits has
never been written. (A NaN of all ones, which no arithmetic makes, is stored as another.) ``made``
has a bit per record too, to enumerate those that have been written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aiops.kernels.backend import resolve
from aiops.kernels.lazy_numba import helper, prefetch
from aiops.kernels.row_initialiser import (
    GOLDEN,
    KINDS,
    MIX,
    RowInitialiser,
    first_rows,
    quantiles,
)
from aiops.kernels.vocabulary import Array

__all__ = ["RowMover", "mover", "parameters_of"]

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]


class RowMover(Protocol):
    """Moves rows between a table and compact arrays.

    ``store`` is ``dtype[rows, (1 + states) * width]``, at first all zero; ``made`` is uint8 with a
    bit per row. Arrays are contiguous.
    """

    def gather(self, store: Array, ids: Ints, out: Array) -> None:
        """Copy the parameters of the rows ``ids`` to ``out``, ``dtype[len(ids), width]``."""

    def collect(
        self,
        store: Array,
        ids: Ints,
        grads: Array,
        unique: Ints,
        total: Array,
        work: Array,
    ) -> int:
        """Add up the gradients of each row, and gather the rows; return the number of rows.

        Rows are in the order of their first mention in ``ids``; each one's ``grads``,
        ``dtype[len(ids), width]``, are added to zero in that order. ``unique`` receives the ids,
        ``total`` (flat) the sums and ``work[k]`` (flat) the k-th array of the records; all have
        room for ``len(ids)`` rows.
        """

    def scatter(self, store: Array, made: Bits, unique: Ints, work: Array) -> int:
        """Write records back; return the number of those written for the first time."""


def mover(
    first: RowInitialiser, width: int, states: tuple[float, ...], dtype: np.dtype[Any], backend: str
) -> RowMover:
    """Return the mover of one table's rows.

    Parameters
    ----------
    first
        The initial values of the parameters.
    width
        Elements per row.
    states
        The initial value of each state array.
    dtype
        float32 or float64.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``.
    """
    if resolve(backend) == "numpy":
        return NumpyMover(first, width, states, dtype)
    return NumbaMover(first, width, states, dtype)


def parameters_of(records: Array, width: int) -> Array:
    """Return a copy of the parameters, ``dtype[n, width]``, of records that have been written."""
    found = np.array(records[:, :width], order="C")
    heads = found.view(np.dtype(f"u{found.dtype.itemsize}"))
    heads[:, 0] = ~heads[:, 0]
    return found


class NumpyMover:
    """Implements `RowMover` in NumPy: the specification."""

    def __init__(
        self, first: RowInitialiser, width: int, states: tuple[float, ...], dtype: np.dtype[Any]
    ) -> None:
        self._first, self._width, self._states, self._dtype = first, width, states, dtype
        self._bits = np.dtype(f"u{dtype.itemsize}")

    def gather(self, store: Array, ids: Ints, out: Array) -> None:
        """Copy known rows, and initialise the others."""
        heads = store.view(self._bits)[ids, 0]
        known = heads != 0
        out[known] = store[ids[known], : self._width]
        out.view(self._bits)[known, 0] = ~heads[known]
        if not known.all():
            fresh = ~known
            out[fresh] = first_rows(self._first, ids[fresh], self._width, self._dtype)

    def collect(
        self,
        store: Array,
        ids: Ints,
        grads: Array,
        unique: Ints,
        total: Array,
        work: Array,
    ) -> int:
        """Find the distinct rows by sorting."""
        _sorted, place, whose = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(place)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        count, width = len(order), self._width
        rows = ids[place[order]]
        unique[:count] = rows
        sums = total[: count * width].reshape(count, width)
        sums[:] = 0
        np.add.at(sums, rank[whose.reshape(-1)], grads)
        heads = store.view(self._bits)[rows, 0]
        known = heads != 0
        for index, value in enumerate((0.0, *self._states)):
            array = work[index, : count * width].reshape(count, width)
            array[known] = store[rows[known], index * width : (index + 1) * width]
            if index:
                array[~known] = value
            else:
                array[~known] = first_rows(self._first, rows[~known], width, self._dtype)
                array.view(self._bits)[known, 0] = ~heads[known]
        return count

    def scatter(self, store: Array, made: Bits, unique: Ints, work: Array) -> int:
        """Write records back, and mark the new ones."""
        count, width = len(unique), self._width
        heads = store.view(self._bits)
        fresh = heads[unique, 0] == 0
        for index in range(len(self._states) + 1):
            array = work[index, : count * width].reshape(count, width)
            store[unique, index * width : (index + 1) * width] = array
        flipped = ~heads[unique, 0]
        heads[unique, 0] = np.maximum(flipped, 1)
        rows = unique[fresh]
        np.bitwise_or.at(made, rows >> 3, np.left_shift(1, rows & 7).astype(np.uint8))
        return len(rows)


# ---------------------------------------------------------------- Numba

_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(GOLDEN), _U(MIX[0]), _U(MIX[1])
_S11, _S27, _S30, _S31, _S52 = _U(11), _U(27), _U(30), _U(31), _U(52)
_AHEAD = 24
"""Rows prefetched ahead of their use: a row is a cache miss, and many misses can overlap."""

_PATIENCE = 16
"""Occupied slots probed per id, on average, before hashing is given up for sorting."""

_ONE, _LOW_52 = _U(1), _U(2**52 - 1)
_ZEROS, _UNIFORM = KINDS.index("zeros"), KINDS.index("uniform")


class NumbaMover:
    """Implements `RowMover` with compiled loops, on the calling thread."""

    def __init__(
        self, first: RowInitialiser, width: int, states: tuple[float, ...], dtype: np.dtype[Any]
    ) -> None:
        self._gather, self._collect, self._scatter = _loops(dtype.name)
        self._first = (KINDS.index(first.kind), _U(first.start), float(first.scale), quantiles())
        self._width = width
        self._sorting = NumpyMover(first, width, states, dtype)
        self._values = np.array([0.0, *states], dtype)
        self._slots = np.zeros(0, np.int32)
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._ones = self._bits.type(2 ** (8 * dtype.itemsize) - 1)

    def gather(self, store: Array, ids: Ints, out: Array) -> None:
        """Copy known rows, and initialise the others."""
        flat, to = store.reshape(-1), out.reshape(-1)
        arrays = (flat, flat.view(self._bits), store.shape[1], ids, to, to.view(self._bits))
        self._gather(*arrays, self._ones, self._width, *self._first)

    def collect(
        self,
        store: Array,
        ids: Ints,
        grads: Array,
        unique: Ints,
        total: Array,
        work: Array,
    ) -> int:
        """Find the distinct rows with a hash table."""
        bits = max(4, (2 * len(ids) - 1).bit_length())  # at most half full
        if 1 << bits > len(self._slots):
            self._slots = np.zeros(1 << bits, np.int32)
        flat = store.reshape(-1)
        table = (flat, flat.view(self._bits), store.shape[1])
        made_of = (ids, grads, unique, total, work, work[0].view(self._bits))
        rest = (self._ones, self._values, self._slots, bits)
        count: int = self._collect(*table, *made_of, *rest, *self._first)
        if count < 0:  # ids chosen to collide in the hash table: sort them instead
            return self._sorting.collect(store, ids, grads, unique, total, work)
        return count

    def scatter(self, store: Array, made: Bits, unique: Ints, work: Array) -> int:
        """Write records back, and mark the new ones."""
        flat = store.reshape(-1)
        table = (flat, flat.view(self._bits), store.shape[1], made)
        from_ = (unique, work, work[0].view(self._bits))
        fresh: int = self._scatter(*table, *from_, self._ones, self._width)
        return fresh


@functools.cache
def _loops(real: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    ints, flat = array_of("int64"), array_of(real, writable=True)
    bits = array_of(real.replace("float", "uint"), writable=True)
    matrix = types.Array(getattr(types, real), 2, "C")
    grads = types.Array(getattr(types, real), 2, "C", readonly=True, aligned=False)
    made, slots = types.Array(types.uint8, 1, "C"), types.Array(types.int32, 1, "C")
    first = (types.int64, types.uint64, types.float64, array_of("float64"))
    size, unique = types.int64, array_of("int64", writable=True)
    ones = getattr(types, real.replace("float", "uint"))
    gather = types.void(flat, bits, size, ints, flat, bits, ones, size, *first)
    arrays = (flat, bits, size, ints, grads, unique, flat, matrix, bits)
    collect = types.int64(*arrays, ones, array_of(real), slots, size, *first)
    scatter = types.int64(flat, bits, size, made, ints, matrix, bits, ones, size)
    return (
        compile_loop(_gather, gather),
        compile_loop(_collect, collect),
        compile_loop(_scatter, scatter),
    )


@helper()
def _begin(
    id: Any, width: Any, kind: Any, start: Any, scale: Any, table: Any, out: Any, at: Any
) -> Any:
    """Write the initial values of a row, as `first_rows` specifies them."""
    if kind == _ZEROS:
        for c in range(width):
            out[at + c] = 0.0
        return
    z = _U(id) + start + _GOLDEN
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    state = z ^ (z >> _S31)
    for c in range(width):
        state += _GOLDEN
        z = state
        z = (z ^ (z >> _S30)) * _MIX_1
        z = (z ^ (z >> _S27)) * _MIX_2
        z = z ^ (z >> _S31)
        if kind == _UNIFORM:
            unit = np.float64(z >> _S11) * 2.0**-52 - 1.0
        else:
            cell = np.int64(z >> _S52)
            inside = np.float64(z & _LOW_52) * 2.0**-52
            unit = table[cell] + inside * (table[cell + 1] - table[cell])
        out[at + c] = unit * scale


def _gather(
    store: Any,
    heads: Any,
    stride: Any,
    ids: Any,
    out: Any,
    out_heads: Any,
    ones: Any,
    width: Any,
    kind: Any,
    start: Any,
    scale: Any,
    table: Any,
) -> Any:
    line = 64 // store.itemsize
    for i in range(min(_AHEAD, ids.size)):
        for c in range(0, width, line):
            prefetch(store, ids[i] * stride + c)
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            for c in range(0, width, line):
                prefetch(store, ids[i + _AHEAD] * stride + c)
        id, at = ids[i], np.uintp(i * width)
        here = np.uintp(id * stride)
        head = heads[here]
        if head:
            for c in range(width):
                out[at + np.uintp(c)] = store[here + np.uintp(c)]
            out_heads[at] = head ^ ones
        else:
            _begin(id, width, kind, start, scale, table, out, at)


def _collect(
    store: Any,
    heads: Any,
    stride: Any,
    ids: Any,
    grads: Any,
    unique: Any,
    total: Any,
    work: Any,
    work_heads: Any,
    ones: Any,
    values: Any,
    slots: Any,
    bits: Any,
    kind: Any,
    start: Any,
    scale: Any,
    table: Any,
) -> Any:
    width, count = grads.shape[1], 0
    room = 1 << bits
    mask, shift = room - 1, _U(64 - bits)
    slots[:room] = 0
    patience = _PATIENCE * ids.size
    for i in range(ids.size):  # an open hash table from ids to their number
        id = ids[i]
        slot = np.int64((_U(id) * _GOLDEN) >> shift)
        while slots[slot] and unique[slots[slot] - 1] != id:
            slot = (slot + 1) & mask
            patience -= 1
        if patience < 0:
            return -1
        if slots[slot]:
            at = np.int64(slots[slot] - 1) * width
            for c in range(width):
                total[at + c] += grads[i, c]
        else:
            at = count * width
            unique[count] = id
            count += 1
            slots[slot] = count
            for c in range(width):
                total[at + c] = values[0] + grads[i, c]
    line = 64 // store.itemsize
    for i in range(min(_AHEAD, count)):
        for c in range(0, stride, line):
            prefetch(store, unique[i] * stride + c)
    for i in range(count):
        if i + _AHEAD < count:
            for c in range(0, stride, line):
                prefetch(store, unique[i + _AHEAD] * stride + c)
        id, at = unique[i], i * width
        here = np.uintp(id * stride)
        head = heads[here]
        if head:
            for k in range(values.size):
                for c in range(width):
                    work[k, at + c] = store[here + np.uintp(k * width + c)]
            work_heads[at] = head ^ ones
        else:
            _begin(id, width, kind, start, scale, table, work[0], at)
            for k in range(1, values.size):
                for c in range(width):
                    work[k, at + c] = values[k]
    return count


def _scatter(
    store: Any,
    heads: Any,
    stride: Any,
    made: Any,
    unique: Any,
    work: Any,
    work_heads: Any,
    ones: Any,
    width: Any,
) -> Any:
    fresh = 0
    for i in range(unique.size):
        id, at = unique[i], i * width
        here = np.uintp(id * stride)
        if not heads[here]:
            made[id >> 3] |= np.uint8(1 << (id & 7))
            fresh += 1
        for k in range(work.shape[0]):
            for c in range(width):
                store[here + np.uintp(k * width + c)] = work[k, at + c]
        head = _U(work_heads[at] ^ ones)
        heads[here] = head if head else _ONE  # both unsigned, or Numba makes a float of them
    return fresh
