"""Sums and medians of samples, with the same bits from NumPy and from compiled loops.

A sum of floating-point numbers depends on its order. So each order is fixed here, and such that
both are quick: several sums run side by side, element i goes to one of them by i alone, and they
are added from left to right in the end.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aiops.kernels.lazy_numba import disjoint, helper
from aiops.model.layout import Ints

Values: TypeAlias = npt.NDArray[np.float64]

LANES = 16
"""Sums that run side by side in an inner product: element i goes to lane i mod 16."""

_QUARTERS = 4  # the same of squares by tensor, as many tensors have few elements


def dot(one: Values, other: Values) -> float:
    """Return the inner product of two arrays, flat and of one size."""
    return float(dots(one[None], other)[0])


def dots(rows: Values, other: Values) -> Values:
    """Return the inner product of each row with an array of as many elements."""
    products = rows * other
    count, size = products.shape
    whole = size - size % LANES
    # Along an outer axis NumPy adds row after row; along the inner one it would not.
    lanes = np.add.reduce(products[:, :whole].reshape(count, -1, LANES), axis=1)
    lanes[:, : size - whole] += products[:, whole:]
    found: Values = np.add.accumulate(lanes, axis=1)[:, -1] + 0.0  # so that no zero is negative
    return found


def squares_by_tensor(values: Values, tensors: Ints, count: int) -> Values:
    """Return the sum of squares of each of ``count`` tensors; ``tensors``: that of each value."""
    lanes = _QUARTERS * tensors + np.arange(len(values)) % _QUARTERS
    sums = np.bincount(lanes, values * values, _QUARTERS * count).reshape(-1, _QUARTERS)
    found: Values = np.add.accumulate(sums, axis=1)[:, -1]
    return found


def lower_median(values: Values) -> float:
    """Return the median of some numbers (n > 0), of an even count the lower."""
    ordered = values.copy()
    ordered.sort()
    return float(ordered[(len(ordered) - 1) // 2])


def lower_medians(rows: Values) -> Values:
    """Return `lower_median` of each column, of its elements that are not NaN; NaN without any."""
    if not len(rows):
        return np.full(rows.shape[1:], np.nan)
    counts = np.add.reduce(~np.isnan(rows), axis=0)  # those that are not NaN, which is sorted last
    middle = np.maximum(counts - 1, 0) // 2
    ordered = rows.copy()
    ordered.sort(axis=0)
    found: Values = ordered[middle, np.arange(rows.shape[1])]
    return found


# ---------------------------------------------------------------- loops


@helper()
def copy_loop(values: Any, out: Any) -> Any:
    """Copy values. (Of an assignment to a slice Numba makes much more code.)"""
    for i in range(values.size):
        out[i] = values[i]


@helper()
def dot_loop(one: Any, other: Any, lanes: Any) -> Any:
    """Return `dot`; ``lanes``: room for `LANES` sums."""
    disjoint()
    whole = one.size - one.size % LANES
    for lane in range(LANES):
        lanes[lane] = 0.0
    # Unsigned, because Numba lets a signed index count from the end, which costs a test.
    for row in range(whole // LANES):
        at = np.uintp(row * LANES)
        for lane in range(np.uintp(LANES)):
            lanes[lane] += one[at + lane] * other[at + lane]
    for i in range(whole, one.size):
        lanes[i - whole] += one[i] * other[i]
    return total_loop(lanes)


@helper()
def total_loop(lanes: Any) -> Any:
    """Return the sum of all lanes, from left to right; no zero is negative."""
    found = lanes[0]
    for lane in range(1, LANES):
        found += lanes[lane]
    return found + 0.0


@helper()
def squares_loop(values: Any, begin: Any, end: Any, lanes: Any) -> Any:
    """Return the sum of squares of one tensor, of the values in [begin, end).

    ``lanes``: room for four sums, at least.
    """
    for lane in range(_QUARTERS):
        lanes[lane] = 0.0
    first = min(begin + -begin % 4, end)
    last = max(end - end % 4, first)
    for i in range(begin, first):
        lanes[i % 4] += values[i] * values[i]
    one, two, three, four = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(first, last, 4):
        at = np.uintp(i)
        one += values[at] * values[at]
        two += values[at + np.uintp(1)] * values[at + np.uintp(1)]
        three += values[at + np.uintp(2)] * values[at + np.uintp(2)]
        four += values[at + np.uintp(3)] * values[at + np.uintp(3)]
    lanes[0], lanes[1], lanes[2], lanes[3] = one, two, three, four
    for i in range(last, end):
        lanes[i % 4] += values[i] * values[i]
    return lanes[0] + lanes[1] + lanes[2] + lanes[3]


@helper()
def lower_median_loop(values: Any, count: Any) -> Any:
    """Return `lower_median` of the first ``count`` values, whose order changes.

    Hoare's selection: what cannot be the median is left behind at every turn.
    """
    wanted, low, high = (count - 1) // 2, 0, count - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while pivot < values[right]:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if wanted <= right:
            high = right
        elif wanted >= left:
            low = left
        else:
            break
    return values[wanted]
