"""The scans as Numba loops; imported only where Numba is wanted."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from aiops.kernels.jit_cpu import array_of, compiled
from aiops.kernels.scan import LANES, SUM_BLOCK, SURVEY_BLOCK
from aiops.kernels.vocabulary import Array

__all__ = ["compiled_survey", "sum_squares", "survey"]


def survey(bits: Array, magnitude: int, limit: int) -> int:
    """Return the first index whose bits under the mask ``magnitude`` reach ``limit``, or -1."""
    scan, mask, bound = compiled_survey(bits.itemsize, magnitude, limit)
    found: int = scan(bits, mask, bound)
    return found


def sum_squares(array: Array, total: float) -> float:
    """Add the squares of float32 or float64 elements to ``total``, block by block."""
    added: float = _sum_squares(array.itemsize)(array, total)
    return added


@functools.cache
def compiled_survey(itemsize: int, magnitude: int, limit: int) -> tuple[Any, Any, Any]:
    """Return the loop for unsigned integers of so many bytes, and what to call it with after them.

    It is compiled once, and kept on disk.
    """
    dtype = np.dtype(f"u{itemsize}")
    scalar = getattr(types, dtype.name)
    signature = types.int64(array_of(dtype.name), scalar, scalar)
    scan = compiled(_survey_loop, signature, cache=True)
    return scan, dtype.type(magnitude), dtype.type(limit)


@functools.cache
def _sum_squares(itemsize: int) -> Any:
    signature = types.float64(array_of(f"float{8 * itemsize}"), types.float64)
    return compiled(_sum_squares_loop, signature, cache=True)


def _survey_loop(bits: Any, magnitude: Any, limit: Any) -> Any:
    unsigned = type(limit)  # Numba works out & in 64 bits, which holds half as many per vector
    for start in range(0, bits.size, SURVEY_BLOCK):
        block = bits[start : start + SURVEY_BLOCK]
        largest = unsigned(0)
        for i in range(block.size):
            this = unsigned(block[i] & magnitude)
            largest = this if this > largest else largest
        if largest >= limit:
            for i in range(block.size):
                if unsigned(block[i] & magnitude) >= limit:
                    return start + i
    return -1


def _sum_squares_loop(array: Any, total: Any) -> Any:
    lanes = np.empty(LANES, np.float64)
    for start in range(0, array.size, SUM_BLOCK):
        block = array[start : start + SUM_BLOCK]
        lanes[:] = 0.0
        rows = block.size // LANES
        by_four = rows - rows % 4
        # Unsigned, because Numba lets a signed index count from the end, which costs a test.
        for row in range(0, by_four, 4):
            at = np.uintp(row * LANES)
            for lane in range(np.uintp(LANES)):
                sum_ = lanes[lane]
                x = np.float64(block[at + lane])
                sum_ += x * x
                x = np.float64(block[at + lane + np.uintp(LANES)])
                sum_ += x * x
                x = np.float64(block[at + lane + np.uintp(2 * LANES)])
                sum_ += x * x
                x = np.float64(block[at + lane + np.uintp(3 * LANES)])
                sum_ += x * x
                lanes[lane] = sum_
        for i in range(by_four * LANES, block.size):
            x = np.float64(block[i])
            lanes[i % LANES] += x * x
        sum_ = lanes[0]
        for lane in range(1, LANES):
            sum_ += lanes[lane]
        total += sum_
    return total
