"""``lowrank`` as Numba loops; imported only where Numba is wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from aiops.codecs.lowrank import LANES
from aiops.kernels.jit_cpu import compiled, disjoint

__all__ = ["loops"]

_F = np.float32


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return the loops for M·Q, Mᵀ·P and P·Qᵀ; they are compiled once, and kept on disk.

    Each does a part, from one index to another: the first and the last some rows of M, the second
    some of its columns. So no part has to do with another's results.
    """
    read = types.Array(types.float32, 2, "C", readonly=True, aligned=False)
    written = types.Array(types.float32, 2, "C", aligned=False)
    at = types.int64
    product = types.void(read, read, written, at, at)
    return (
        compiled(_times, product, cache=True),
        compiled(_transposed_times, product, cache=True),
        compiled(_multiply, types.void(read, read, written, at, at, at), cache=True),
    )


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
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
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
        half //= 2
    return lanes[0]


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _scaled(row: Any, factor: Any, out: Any, fresh: Any) -> None:
    disjoint()
    if fresh:
        for j in range(row.size):
            out[j] = row[j] * factor
    else:
        for j in range(row.size):
            out[j] += row[j] * factor


def _times(whole: Any, q: Any, p: Any, low: Any, high: Any) -> None:
    lanes = np.empty(LANES, np.float32)
    for i in range(low, high):
        for k in range(q.shape[0]):
            p[k, i] = _dot(whole[i], q[k], lanes)


def _transposed_times(whole: Any, p: Any, q: Any, low: Any, high: Any) -> None:
    for i in range(whole.shape[0]):
        for k in range(p.shape[0]):
            _scaled(whole[i, low:high], p[k, i], q[k, low:high], False)


def _multiply(p: Any, q: Any, out: Any, sign: Any, low: Any, high: Any) -> None:
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
