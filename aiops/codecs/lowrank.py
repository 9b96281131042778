"""``lowrank``: a matrix as a product of two thin ones (PowerSGD, Vogels et al. 2019).

A tensor is taken as a matrix M of a = shape[0] rows and b columns, all other axes together. One
step of the power method per payload: P = M·Q with the Q of the payload before, the columns of P
orthonormalised (Gram-Schmidt), Q = Mᵀ·P. The first Q is drawn from a normal distribution, always
the same. A tensor of one axis has one column, and gains nothing: send it otherwise.

Payload: ``uint32`` r, the rank, at most a and b; ``uint8`` form (0: bf16, 1: float32), three bytes
of 0; P as r columns of a numbers each, then Q as r columns of b. Element (i, j) is the sum over
k = 0 … r-1, in this order and in float32, of ``P[k][i] * Q[k][j]``. The sum over k of the largest
magnitude in P[k] times that in Q[k] must be below 1e18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from aiops.codecs import half
from aiops.codecs.base import (
    LIMIT,
    Bytes,
    Codec,
    Encoder,
    Floats,
    Shape,
    check_choices,
    choice,
    elements,
)
from aiops.errors import UsageError
from aiops.kernels import at_hand, survey
from aiops.kernels.rows import First, first_rows
from aiops.kernels.sharing import LARGE, PIECE, ParallelMap, add, serial_map

__all__ = ["HEADER", "LANES", "LowRank"]

HEADER = 8
FORMS = ("bf16", "float32")
WIDTHS = (2, 4)

LANES = 64
"""Sums that run side by side in a row of M·Q; then their second half is added to the first."""

ROWS = 64
"""Rows of a matrix that NumPy works on at a time, so that they stay in cache."""

LINE = 16
"""Columns in a cache line, which two threads had better not write to."""

NOISE = 1e-6
"""A column of P is left out when orthonormalising leaves less than this of its length."""


@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """Two thin matrices for a large one: r·(a+b) numbers for a·b of them.

    ``rank``: columns of each, 1 or more (default 4). ``values``: ``bf16`` (default) or ``float32``.
    """

    name: ClassVar[str] = "lowrank"
    saves_up: ClassVar[bool] = True

    rank: int = 4
    values: str = choice(*FORMS)

    def __post_init__(self) -> None:
        check_choices(self)
        if not 1 <= self.rank < 2**32:
            raise UsageError(
                f"codec 'lowrank': rank is {self.rank}; give a whole number, 1 or more"
            )

    def most(self, shape: Shape) -> int:
        """Return the payload's length, which is always the same."""
        rows, columns = matrix(shape)
        rank = min(self.rank, rows, columns)
        return HEADER + rank * (rows + columns) * WIDTHS[FORMS.index(self.values)] if rank else 0

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """See `Codec.encoder`."""
        return _Encoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """See `Codec.check`."""
        rows, columns = matrix(shape)
        if not rows * columns:
            return f"has {len(payload)} bytes instead of 0" if len(payload) else None
        if len(payload) < HEADER:
            return f"has {len(payload)} bytes, and its header alone {HEADER}"
        rank, form = _header(payload)
        if not 1 <= rank <= min(rows, columns):
            return f"has rank {rank} for a matrix of {rows} x {columns}"
        if form >= len(FORMS) or payload[5:HEADER].any():
            return f"has the form {bytes(payload[4:HEADER]).hex()}, which is none"
        wanted = HEADER + rank * (rows + columns) * WIDTHS[form]
        if len(payload) != wanted:
            return f"has {len(payload)} bytes instead of {wanted}"
        fault = _values_fault(payload[HEADER:], form, backend)
        if fault is None and _bound(*_factors(payload, rows, columns, "numpy")) >= LIMIT:
            fault = "stands for elements that may be 1e18 or more in magnitude"
        return fault

    @classmethod
    def decode(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> None:
        """See `Codec.decode`."""
        serial_map(cls.pieces(payload, shape, out, add=add, backend=backend))

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
        """See `Codec.pieces`."""
        if not out.size:
            return []
        rows, columns = matrix(shape)
        backend = at_hand(backend)
        p, q = _factors(payload, rows, columns, backend)
        return products(p, q, out.reshape(rows, columns), 1 if add else 0, backend)

    @classmethod
    def warm(cls) -> None:
        """See `Codec.warm`."""
        from aiops.codecs import lowrank_cpu

        lowrank_cpu.loops()
        half.warm("bf16")


def matrix(shape: Shape) -> tuple[int, int]:
    """Return the rows and columns of a tensor taken as a matrix."""
    return (shape[0], elements(shape[1:])) if shape else (1, 1)


def _header(payload: Bytes) -> tuple[int, int]:
    return int(payload[:4].view("<u4")[0]), int(payload[4])


def _values_fault(section: Bytes, form: int, backend: str) -> str | None:
    if FORMS[form] == "bf16":
        return half.halves_fault("bf16", section, backend)
    values = section.view("<f4")
    index = survey(values, backend)
    return None if index < 0 else f"has {float(values[index]):g} for number {index}"


def _factors(payload: Bytes, rows: int, columns: int, backend: str) -> tuple[Floats, Floats]:
    """Return P (float32[r, rows]) and Q (float32[r, columns]), copied out of a payload."""
    rank, form = _header(payload)
    section = payload[HEADER:]
    flat = np.empty(rank * (rows + columns), np.float32)
    if FORMS[form] == "bf16":
        half.decode("bf16", section.view("<u2"), flat, False, backend)
    else:
        flat[:] = section.view("<f4")
    return flat[: rank * rows].reshape(rank, rows), flat[rank * rows :].reshape(rank, columns)


def _bound(p: Floats, q: Floats) -> float:
    """Return what no magnitude in the product exceeds."""
    most_p, most_q = (np.abs(factor).max(axis=1).astype(np.float64) for factor in (p, q))
    return float((most_p * most_q).sum())


class _Encoder(Encoder):
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
        p = times(whole, self._q, backend, parallel_map)
        _orthonormalise(p)
        cut = HEADER + rank * self._rows * WIDTHS[self._form]
        self._store(p, self.payload[HEADER:cut])
        p, _ = _factors(self.payload, self._rows, self._columns, backend)
        q = transposed_times(whole, p, backend, parallel_map)
        self._q[:] = q
        self._store(q, self.payload[cut:])
        p, q = _factors(self.payload, self._rows, self._columns, backend)
        while _bound(p, q) >= LIMIT:  # nobody would take it; the rest keeps what is left out
            q *= np.float32(0.5)
            self._store(q, self.payload[cut:])
        if self.rest is not None:
            parallel_map(products(p, q, whole, -1, backend))
        return len(self.payload)

    def _store(self, factor: Floats, section: Bytes) -> None:
        """Write one factor, rounded."""
        flat = factor.reshape(-1)
        if FORMS[self._form] == "bf16":
            half.encode("bf16", flat, flat[:0], section.view("<u2"), self.backend)
        else:
            section.view("<f4")[:] = np.clip(flat, -half.BF16_LARGEST, half.BF16_LARGEST)


def _seed(q: Floats) -> None:
    """Make the columns of the last Q of length 1; draw those that are zero."""
    drawn = None
    for index, column in enumerate(q):
        wide = column.astype(np.float64)
        length = float(np.sqrt((wide * wide).sum()))
        if length > 0.0:
            column[:] = wide / length
        else:
            if drawn is None:
                ids = np.arange(q.shape[1])
                drawn = first_rows(First("normal", 1.0, 0), ids, len(q), q.dtype)
            column[:] = drawn[:, index]


def _orthonormalise(p: Floats) -> None:
    """Make the columns (rows here) of P orthonormal, or zero where nothing is left of one."""
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


def times(whole: Floats, q: Floats, backend: str, parallel_map: ParallelMap = serial_map) -> Floats:
    """Return M·Q as float32[r, a], of float32[a, b] and float32[r, b]."""
    rank, (rows, columns) = len(q), whole.shape
    p = np.empty((rank, rows), np.float32)
    if backend == "numba":
        from aiops.codecs import lowrank_cpu

        times = lowrank_cpu.loops()[0]
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
            while lanes.shape[1] > 1:
                middle = lanes.shape[1] // 2
                lanes = lanes[:, :middle] + lanes[:, middle:]
            p[index, start : start + ROWS] = lanes[:, 0]
    return p


def transposed_times(
    whole: Floats, p: Floats, backend: str, parallel_map: ParallelMap = serial_map
) -> Floats:
    """Return Mᵀ·P as float32[r, b], of float32[a, b] and float32[r, a]: row after row."""
    q = np.zeros((len(p), whole.shape[1]), np.float32)
    if backend == "numba":
        from aiops.codecs import lowrank_cpu

        times = lowrank_cpu.loops()[1]
        cuts = _cuts(whole.shape[1], whole, LINE)
        parallel_map([partial(times, whole, p, q, *columns) for columns in cuts])
        return q
    for index, row in enumerate(whole):
        q += p[:, index, None] * row
    return q


def products(
    p: Floats, q: Floats, out: Floats, sign: int, backend: str
) -> Sequence[Callable[[], None]]:
    """Return what writes P·Qᵀ to ``out``, float32[a, b] (sign 0), or adds it (1), or subtracts it.

    In pieces, which several threads may do in any order.
    """
    if backend == "numba":
        from aiops.codecs import lowrank_cpu

        multiply = lowrank_cpu.loops()[2]
        return [partial(multiply, p, q, out, sign, *rows) for rows in _cuts(len(out), out)]
    return [
        partial(_multiply, p[:, low : low + ROWS], q, out[low : low + ROWS], sign)
        for low in range(0, len(out), ROWS)
    ]


def _multiply(p: Floats, q: Floats, out: Floats, sign: int) -> None:
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
    """Yield from which row (or column) to which one goes at a time, multiples of ``least``."""
    if whole.nbytes < LARGE:
        each = most
    else:
        each = -(-most * PIECE // whole.nbytes)
        each += -each % least
    for low in range(0, most, each):
        yield low, min(low + each, most)
