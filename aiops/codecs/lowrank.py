"""``lowrank``: encode a matrix as a product of two thin ones (PowerSGD, Vogels et al. 2019).

A tensor is taken as a matrix M of a = shape[0] rows and b columns, all other axes together. One
step of the power method per payload: P = M·Q with the Q of the payload before, the columns of P
orthonormalised (Gram-Schmidt), Q = Mᵀ·P. The first Q is drawn from a normal distribution with a
fixed seed. A tensor of one axis has one column, and gains nothing: use another codec for it.

Payload: ``uint32`` r, the rank, at most a and b; ``uint8`` form (0: bf16, 1: float32), three bytes
of 0; P as r columns of a numbers each, then Q as r columns of b. Element (i, j) is the sum over
k = 0 … r-1, in this order and in float32, of ``P[k][i] * Q[k][j]``. The sum over k of the largest
magnitude in P[k] times that in Q[k] must be below 1e18.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from aiops.codecs.base import (
    HEADER,
    LIMIT,
    Bytes,
    Codec,
    Encoder,
    Floats,
    Shape,
    check_choices,
    elements,
    header_fault,
    length_fault,
    one_of,
    read_header,
)
from aiops.codecs.half import BF16, BF16_LARGEST
from aiops.codecs.onebit import LANES, add_halves, sum_lanes
from aiops.errors import UsageError
from aiops.kernels import current_backend, survey
from aiops.kernels.lazy_numba import disjoint, helper
from aiops.kernels.parallel import LARGE, PIECE, ParallelMap, add
from aiops.kernels.row_initialiser import RowInitialiser, first_rows

__all__ = ["LowRank", "loops"]

FORMS = ("bf16", "float32")
WIDTHS = (2, 4)

ROWS = 64
"""Rows of a matrix that NumPy processes at a time, so that they stay in cache."""

NARROW = 128
"""Elements of Q up to which NumPy adds many rows at a time: they would be short steps of Python."""

PRODUCTS = 1 << 13
"""Products that it makes at a time then, so that they stay in cache."""

LINE = 16
"""Columns in a cache line: two threads do not write to the same line."""

NOISE = 1e-6
"""A column of P is left out when orthonormalising leaves less than this of its length."""


@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """Two thin matrices for a large one: r·(a+b) numbers for a·b of them.

    Settings
    --------
    rank : int, default 4
        Columns of each matrix, 1 or more.
    values : str, default ``bf16``
        The format of their elements, ``bf16`` or ``float32``.
    """

    name: ClassVar[str] = "lowrank"
    accumulates: ClassVar[bool] = True

    rank: int = 4
    values: str = one_of(*FORMS)

    def __post_init__(self) -> None:
        check_choices(self)
        if not 1 <= self.rank < 2**32:
            raise UsageError(
                f"codec 'lowrank': rank is {self.rank}; give a whole number, 1 or more"
            )

    def most(self, shape: Shape) -> int:
        """Return the length of every payload of a tensor of this shape, in bytes."""
        rows, columns = matrix(shape)
        rank = min(self.rank, rows, columns)
        return HEADER + rank * (rows + columns) * WIDTHS[FORMS.index(self.values)] if rank else 0

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """Return an encoder that keeps the last Q."""
        return _LowRankEncoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """Return what is wrong with the header, the length or the numbers of a payload, or None."""
        rows, columns = matrix(shape)
        fault = header_fault(payload, rows * columns, FORMS)
        if fault or not rows * columns:
            return fault
        rank, form = read_header(payload)
        if not 1 <= rank <= min(rows, columns):
            return f"has rank {rank} for a matrix of {rows} x {columns}"
        fault = length_fault(payload, HEADER + rank * (rows + columns) * WIDTHS[form])
        fault = fault or _values_fault(payload[HEADER:], form, backend)
        if fault is None and _bound(*_factors(payload, rows, columns, "numpy")) >= LIMIT:
            fault = "stands for elements that may be 1e18 or more in magnitude"
        return fault

    @classmethod
    def pieces(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> Sequence[Callable[[], None]]:
        """Return `decode` in pieces of whole rows."""
        if not out.size:
            return []
        rows, columns = matrix(shape)
        backend = current_backend(backend)
        p, q = _factors(payload, rows, columns, backend)
        return _products(p, q, out.reshape(rows, columns), 1 if add else 0, backend)

    @classmethod
    def warm(cls) -> None:
        """Compile the loops, and those of bf16."""
        loops()
        BF16.warm()


def matrix(shape: Shape) -> tuple[int, int]:
    """Return the rows and columns of a tensor taken as a matrix."""
    return (shape[0], elements(shape[1:])) if shape else (1, 1)


def _values_fault(section: Bytes, form: int, backend: str) -> str | None:
    if FORMS[form] == "bf16":
        return BF16.sections_fault([section.view("<u2")], backend)
    values = section.view("<f4")
    index = survey(values, backend)
    return None if index < 0 else f"has {float(values[index]):g} for number {index}"


def _factors(payload: Bytes, rows: int, columns: int, backend: str) -> tuple[Floats, Floats]:
    """Return P (float32[r, rows]) and Q (float32[r, columns]), copied out of a payload."""
    rank, form = read_header(payload)
    section = payload[HEADER:]
    flat = np.empty(rank * (rows + columns), np.float32)
    if FORMS[form] == "bf16":
        BF16.decode_sections([section.view("<u2")], flat, False, backend)
    else:
        flat[:] = section.view("<f4")
    return flat[: rank * rows].reshape(rank, rows), flat[rank * rows :].reshape(rank, columns)


def _bound(p: Floats, q: Floats) -> float:
    """Return an upper bound of the magnitudes in the product."""
    most_p, most_q = (np.abs(factor).max(axis=1).astype(np.float64) for factor in (p, q))
    return float((most_p * most_q).sum())


class _LowRankEncoder(Encoder):
    def __init__(self, codec: LowRank, shape: Shape, *, feedback: bool, backend: str) -> None:
        super().__init__(codec, shape, feedback=feedback, backend=backend)
        self._rows, self._columns = matrix(shape)
        self._form = FORMS.index(codec.values)
        rank = min(codec.rank, self._rows, self._columns)
        self._q = np.zeros((rank, self._columns), np.float32)
        if self.size:
            self.payload[:HEADER].view("<u4")[:] = rank, self._form

    def write(self, values: Floats) -> int:
        exact = values
        if self.rest is not None:
            exact = add(self.rest, values, self.parallel_map)
        whole = exact.reshape(self._rows, self._columns)
        rank, backend, parallel_map = len(self._q), self.backend, self.parallel_map
        _seed(self._q)
        p = _times(whole, self._q, backend, parallel_map)
        _orthonormalise(p)
        cut = HEADER + rank * self._rows * WIDTHS[self._form]
        self._store(p, self.payload[HEADER:cut])
        p, _ = _factors(self.payload, self._rows, self._columns, backend)
        q = _transposed_times(whole, p, backend, parallel_map)
        self._q[:] = q
        self._store(q, self.payload[cut:])
        p, q = _factors(self.payload, self._rows, self._columns, backend)
        while _bound(p, q) >= LIMIT:  # a reader would refuse it; the rest keeps what is left out
            q *= np.float32(0.5)
            self._store(q, self.payload[cut:])
        if self.rest is not None:
            parallel_map(_products(p, q, whole, -1, backend))
        return len(self.payload)

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the rest, and the last Q, with which the next payload begins."""
        return {**super().state(), "q": self._q}

    def _store(self, factor: Floats, section: Bytes) -> None:
        """Write one factor, rounded."""
        flat = factor.reshape(-1)
        if FORMS[self._form] == "bf16":
            BF16.encode_sections(flat, flat[:0], [section.view("<u2")], self.backend)
        else:
            section.view("<f4")[:] = np.clip(flat, -BF16_LARGEST, BF16_LARGEST)


def _seed(q: Floats) -> None:
    """Scale the columns of the last Q (rows here) to length 1; draw those that are zero."""
    drawn = None
    for index, column in enumerate(q):
        wide = column.astype(np.float64)
        length = float(np.sqrt((wide * wide).sum()))
        if length > 0.0:
            column[:] = wide / length
        else:
            if drawn is None:
                ids = np.arange(q.shape[1])
                drawn = first_rows(RowInitialiser("normal", 1.0, 0), ids, len(q), q.dtype)
            column[:] = drawn[:, index]


def _orthonormalise(p: Floats) -> None:
    """Make the columns of P (rows here) orthonormal, or zero where nothing is left of one."""
    done: list[Any] = []
    for column in p:
        wide = column.astype(np.float64)
        before = np.sqrt((wide * wide).sum())
        for other in done:
            wide -= (wide * other).sum() * other
        length = np.sqrt((wide * wide).sum())
        wide = wide / length if length > NOISE * before else np.zeros_like(wide)
        done.append(wide)
        column[:] = wide


def _times(whole: Floats, q: Floats, backend: str, parallel_map: ParallelMap) -> Floats:
    """Return M·Q as float32[r, a], of float32[a, b] and float32[r, b]."""
    rank, (rows, columns) = len(q), whole.shape
    p = np.empty((rank, rows), np.float32)
    if backend == "numba":
        times = loops()[0]
        parallel_map([partial(times, whole, q, p, *rows) for rows in _cuts(rows, whole)])
        return p
    padded = np.zeros((min(ROWS, rows), -(-columns // LANES) * LANES), np.float32)
    for start in range(0, rows, ROWS):
        part = whole[start : start + ROWS]
        products = padded[: len(part)]
        for index, column in enumerate(q):
            np.multiply(part, column, out=products[:, :columns])
            lanes = np.zeros((len(part), LANES), np.float32)
            for at in range(0, products.shape[1], LANES):
                lanes += products[:, at : at + LANES]
            p[index, start : start + ROWS] = sum_lanes(lanes)
    return p


def _transposed_times(whole: Floats, p: Floats, backend: str, parallel_map: ParallelMap) -> Floats:
    """Return Mᵀ·P as float32[r, b], of float32[a, b] and float32[r, a]: row after row."""
    q = np.zeros((len(p), whole.shape[1]), np.float32)
    if backend == "numba":
        times = loops()[1]
        cuts = _cuts(whole.shape[1], whole, LINE)
        parallel_map([partial(times, whole, p, q, *columns) for columns in cuts])
        return q
    if q.size > NARROW:
        for index, row in enumerate(whole):
            q += p[:, index, None] * row
        return q
    at_once = PRODUCTS // max(1, q.size)
    for start in range(0, len(whole), at_once):
        part = whole[start : start + at_once]
        sums = np.empty((1 + len(part), *q.shape), np.float32)
        sums[0] = q
        np.multiply(p[:, start : start + at_once].T[:, :, None], part[:, None, :], out=sums[1:])
        np.add.accumulate(sums, axis=0, out=sums)  # in order; sum() may add by pairs
        q[:] = sums[-1]
    return q


def _products(
    p: Floats, q: Floats, out: Floats, sign: int, backend: str
) -> Sequence[Callable[[], None]]:
    """Return pieces that write P·Qᵀ to ``out``, float32[a, b] (sign 0), add it (1) or subtract it.

    Several threads may call them in any order.
    """
    if backend == "numba":
        multiply = loops()[2]
        return [partial(multiply, p, q, out, sign, *rows) for rows in _cuts(len(out), out)]
    return [
        partial(_multiply_numpy, p[:, low : low + ROWS], q, out[low : low + ROWS], sign)
        for low in range(0, len(out), ROWS)
    ]


def _multiply_numpy(p: Floats, q: Floats, out: Floats, sign: int) -> None:
    made = p[0, :, None] * q[0]
    for left, right in zip(p[1:], q[1:], strict=True):
        made += left[:, None] * right
    if sign == 0:
        out[:] = made
    elif sign > 0:
        out += made
    else:
        out -= made


def _cuts(most: int, whole: Floats, least: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows (or columns) of the pieces, multiples of ``least``."""
    if whole.nbytes < LARGE:
        each = most
    else:
        each = -(-most * PIECE // whole.nbytes)
        each += -each % least
    for low in range(0, most, each):
        yield low, min(low + each, most)


# ---------------------------------------------------------------- Numba

_F = np.float32


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return the loops for M·Q, Mᵀ·P and P·Qᵀ; they are compiled once, and kept on disk.

    Each does a range of indices: the first and the last of rows of M, the second of columns. So the
    ranges of several threads do not depend on each other.
    """
    from numba import types

    from aiops.kernels.numba_jit import compile_loop

    read = types.Array(types.float32, 2, "C", readonly=True, aligned=False)
    written = types.Array(types.float32, 2, "C", aligned=False)
    at = types.int64
    product = types.void(read, read, written, at, at)
    return (
        compile_loop(_times_loop, product),
        compile_loop(_transposed_times_loop, product),
        compile_loop(_multiply_loop, types.void(read, read, written, at, at, at)),
    )


@helper()
def _dot(one: Any, two: Any, lanes: Any) -> Any:
    disjoint()
    lanes[:] = _F(0.0)
    whole = one.size // LANES
    for row in range(whole):
        at = np.uintp(row * LANES)
        for lane in range(np.uintp(LANES)):
            lanes[lane] += one[at + lane] * two[at + lane]
    for i in range(whole * LANES, one.size):
        lanes[i - whole * LANES] += one[i] * two[i]
    return add_halves(lanes)


@helper()
def _scaled(row: Any, factor: Any, out: Any, fresh: Any) -> None:
    disjoint()
    if fresh:
        for j in range(row.size):
            out[j] = row[j] * factor
    else:
        for j in range(row.size):
            out[j] += row[j] * factor


def _times_loop(whole: Any, q: Any, p: Any, low: Any, high: Any) -> None:
    lanes = np.empty(LANES, np.float32)
    for i in range(low, high):
        for k in range(q.shape[0]):
            p[k, i] = _dot(whole[i], q[k], lanes)


def _transposed_times_loop(whole: Any, p: Any, q: Any, low: Any, high: Any) -> None:
    for i in range(whole.shape[0]):
        for k in range(p.shape[0]):
            _scaled(whole[i, low:high], p[k, i], q[k, low:high], False)


def _multiply_loop(p: Any, q: Any, out: Any, sign: Any, low: Any, high: Any) -> None:
    made = np.empty(out.shape[1], np.float32)
    for i in range(low, high):
        for k in range(p.shape[0]):
            _scaled(q[k], p[k, i], made, k == 0)
        row = out[i]
        if sign == 0:
            for j in range(row.size):
                row[j] = made[j]
        elif sign > 0:
            for j in range(row.size):
                row[j] += made[j]
        else:
            for j in range(row.size):
                row[j] -= made[j]
