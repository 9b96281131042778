"""Trimmed means: those of a sort, of any number of values, whatever their order."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.kernels import Spans, build
from aiops.kernels.trimmed_mean import left_out, trimmed_mean
from aiops.model.layout import Array
from tests.rows import each_row

COUNTS = [
    (2, 0),
    (3, 1),
    (4, 0),
    (4, 1),
    (5, 2),
    (7, 1),
    (12, 2),
    (12, 4),
    (13, 6),
    (16, 5),
    (20, 7),
]


def mean(values: Array, cut: int) -> Array:
    """The mean of the middle, added up in rising order, as the rule says."""
    middle = np.sort(values, axis=0)[cut : len(values) - cut] + np.float32(0)
    total = middle[0]
    for each in middle[1:]:
        total = total + each
    return total / np.float32(len(middle)) if len(middle) > 1 else total


def taken(values: Array, cut: int, backend: str) -> Array:
    """What a kernel makes of it, in the place of the first."""
    base, grad, *reads = (row.copy() for row in values)
    kernel = build(trimmed_mean(len(values), cut), values.dtype, backend)
    kernel(Spans.whole(values.shape[1], 1.0), 1.0, base, grad, base, [], reads)
    return base


@each_row(("count", "cut"), COUNTS)
def test_it_is_that_of_a_sort(count: int, cut: int) -> None:
    values = np.random.default_rng(count).normal(size=(count, 100)).astype(np.float32)
    values[:, 7] = -0.0
    values[count // 2, 7] = 0.0
    values[:, 8] = 3.0  # all equal
    assert taken(values, cut, "numpy").tobytes() == mean(values, cut).tobytes()


@pytest.mark.parametrize(("count", "cut"), [(5, 1), (12, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_backend_and_every_order_has_the_same_bits(count: int, cut: int, dtype: type) -> None:
    random = np.random.default_rng(count)
    values = random.normal(size=(count, 300)).astype(dtype)
    values[random.integers(count)] = 2e17
    expected = taken(values, cut, "numpy").tobytes()
    for backend in ("numpy", "numba", "numba"):
        random.shuffle(values)
        assert taken(values, cut, backend).tobytes() == expected


def test_hostile_values_leave_it_among_the_honest_ones() -> None:
    """As many as are left out: whatever they are, and wherever they stand."""
    random = np.random.default_rng(1)
    for attack in (2e17, -2e17, 0.0, 5.0):
        values = random.normal(size=(12, 500)).astype(np.float32)
        honest = values[4:].copy()
        values[:4] = attack
        found = taken(values, 4, "numpy")
        assert (found >= honest.min(axis=0)).all()
        assert (found <= honest.max(axis=0)).all()


@each_row(
    ("share", "count", "cut"),
    [
        (0.0, 9, 0),
        (1 / 3, 12, 4),
        (0.33, 12, 4),
        (0.1, 12, 2),
        (0.49, 2, 0),
        (0.3, 1, 0),
        (0.4, 3, 1),
    ],
)
def test_at_least_the_share_is_left_out_and_something_is_left(
    share: float, count: int, cut: int
) -> None:
    assert left_out(share, count) == cut
