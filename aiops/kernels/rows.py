"""The rows of tables: how they begin, how they are gathered, how gradients are added up.

How a row begins is defined here, in NumPy, and nowhere else. Element c of row r of a table with
seed s is drawn from output c of the generator splitmix64 started at ``mix(mix(s) + r)``: integers
and correctly rounded operations only, so it is the same on every machine and in both backends.

A table is stored as ``rows`` records of ``width`` elements of each array: the parameters, then the
rule's state, so that one place in memory holds all that an update of a row needs. Whether a record
has been written must be seen in the record, for a look elsewhere would be another cache miss: its
first element is stored with all its bits flipped, so that one of all zeros has never been written
(or its first element is the one NaN of all ones, which no arithmetic makes; it is stored as
another). ``made`` has a bit per record too, for going through all that have been written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aiops.kernels.backend import resolve
from aiops.kernels.vocabulary import Array

__all__ = ["CELLS", "First", "RowMover", "first_rows", "mover", "quantiles"]

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

GOLDEN = 0x9E37_79B9_7F4A_7C15
MIX = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
CELLS = 4096
"""Cells of equal probability into which the normal distribution is cut; linear within a cell."""

KINDS = ("zeros", "uniform", "normal")


@dataclass(frozen=True, slots=True)
class First:
    """How the elements of a table begin: ``kind`` is one of `KINDS`."""

    kind: str
    scale: float
    seed: int

    @property
    def start(self) -> int:
        """What row numbers are added to, before they are mixed into the start of a generator."""
        return _mixed(self.seed)


def _mixed(x: int) -> int:
    """Return the first output of splitmix64 started at x."""
    z = (x + GOLDEN) % (1 << 64)
    z = (z ^ z >> 30) * MIX[0] % (1 << 64)
    z = (z ^ z >> 27) * MIX[1] % (1 << 64)
    return z ^ z >> 31


def first_rows(first: First, ids: Ints, width: int, dtype: np.dtype[Any]) -> Array:
    """Return what the rows of these ids are before any update: ``dtype[len(ids), width]``."""
    if first.kind == "zeros":
        return np.zeros((len(ids), width), dtype)
    with np.errstate(over="ignore"):  # sums and products are meant modulo 2**64
        starts = _mix(ids.view(np.uint64) + np.uint64(first.start) + np.uint64(GOLDEN))
        steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        drawn = _mix(starts[:, None] + steps)
    if first.kind == "uniform":
        unit = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    else:
        table = quantiles()
        cell = (drawn >> np.uint64(52)).astype(np.intp)
        inside = (drawn & np.uint64(2**52 - 1)).astype(np.float64) * 2.0**-52
        unit = table[cell] + inside * (table[cell + 1] - table[cell])
    return (unit * first.scale).astype(dtype)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(MIX[0])
    z = (z ^ z >> np.uint64(27)) * np.uint64(MIX[1])
    return z ^ z >> np.uint64(31)


@functools.cache
def quantiles() -> npt.NDArray[np.float64]:
    """Return z with P(Z < z) = i/4096 for the normal distribution cut to [-2, 2], i = 0 to 4096.

    By Newton's method on the Maclaurin series, in additions, multiplications and divisions only:
    a library's ``log`` or ``exp`` may differ in the last bit from one machine to the next.
    """
    whole = _area(np.array([2.0]))[0]
    wanted = np.linspace(-1.0, 1.0, CELLS + 1) * whole
    z: npt.NDArray[np.float64] = wanted / whole * 2.0
    for _ in range(40):
        z = z - (_area(z) - wanted) / _bell(z)
        z = np.clip(z, -2.0, 2.0)
    z[0], z[-1] = -2.0, 2.0
    z.flags.writeable = False
    return z


def _area(z: Array) -> Array:
    """Return the integral of exp(-x²/2) from 0 to z, for |z| ≤ 2."""
    term, total = z, z
    for n in range(1, 40):
        term = term * z * z / (-2.0 * n)
        total = total + term / (2 * n + 1)
    return total


def _bell(z: Array) -> Array:
    """Return exp(-z²/2) for |z| ≤ 2."""
    term = total = np.ones_like(z)
    for n in range(1, 40):
        term = term * z * z / (-2.0 * n)
        total = total + term
    return total


# ---------------------------------------------------------------- moving rows


class RowMover(Protocol):
    """Moves rows between a table and compact arrays.

    ``store`` is ``dtype[rows, (1 + states) * width]``, zeros at first; ``made`` is uint8 with a bit
    per row. Arrays are contiguous.
    """

    def gather(self, store: Array, ids: Ints, out: Array) -> None:
        """Write the parameters of these rows to ``out``, ``dtype[len(ids), width]``."""

    def collect(
        self,
        store: Array,
        ids: Ints,
        grads: Array,
        unique: Ints,
        total: Array,
        work: Array,
    ) -> int:
        """Add up the gradients of each row, and gather the rows; return how many rows there are.

        Rows come in the order of their first mention, and each one's gradients are added to zero
        in the order in which they come. ``unique`` is given the ids, ``total`` (flat) the sums and
        ``work[k]`` (flat) the k-th array of the records; all have room for ``len(ids)`` rows.
        """

    def scatter(self, store: Array, made: Bits, unique: Ints, work: Array) -> int:
        """Write records back; return how many of them had never been written before."""


def mover(
    first: First, width: int, states: tuple[float, ...], dtype: np.dtype[Any], backend: str
) -> RowMover:
    """Return what moves the rows of a table; ``states`` are the initial values of the state."""
    if resolve(backend) == "numpy":
        return NumpyMover(first, width, states, dtype)
    from aiops.kernels.rows_cpu import NumbaMover

    return NumbaMover(first, width, states, dtype)


class NumpyMover:
    """The specification."""

    def __init__(
        self, first: First, width: int, states: tuple[float, ...], dtype: np.dtype[Any]
    ) -> None:
        self._first, self._width, self._states, self._dtype = first, width, states, dtype
        self._bits = np.dtype(f"u{dtype.itemsize}")

    def gather(self, store: Array, ids: Ints, out: Array) -> None:
        """See `RowMover`."""
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
        """See `RowMover`."""
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
        """See `RowMover`."""
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
