"""Groups of tensors are measured each by itself, and a kernel is called once for each factor."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.kernels import Spans, build
from aiops.kernels.clipping import Clip, by_factor, clipping
from aiops.kernels.rule import FIRST


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_neighbours_of_one_group_are_measured_together() -> None:
    lo, hi = ints(0, 3, 3, 10, 20), ints(3, 3, 8, 20, 21)  # one tensor is empty, one ends early
    rows = np.arange(5)
    assert [*Clip((1.0,)).runs(rows, lo, hi)] == [(0, slice(0, 8)), (0, slice(10, 21))]
    found = Clip((1.0, 2.0), ints(0, 0, 1, 1, 0)).runs(rows, lo, hi)
    assert [*found] == [
        (0, slice(0, 3)),
        (1, slice(3, 8)),
        (1, slice(10, 20)),
        (0, slice(20, 21)),
    ]
    found = Clip((0.0, 2.0), ints(0, 0, 1, 1, 0)).runs(rows, lo, hi)
    assert [*found] == [(1, slice(3, 8)), (1, slice(10, 20))], "no group without a limit"
    assert [*Clip((1.0,)).runs(rows[:0], lo[:0], hi[:0])] == []


def test_each_group_has_its_factor() -> None:
    clip = Clip((0.0, 1.0, 6.0), ints(2, 0, 1, 1))
    factor, scales = clip.clipped(0.5, [0.0, 64.0, 100.0])
    assert factor == 0.5
    assert scales is not None
    assert scales.tolist() == [1.0, 1.0, 0.25, 0.25]
    assert clip.clipped(0.5, [0.0, 4.0, 144.0]) == (0.5, None), "none is too long"
    assert Clip((1.0,)).clipped(0.5, [64.0]) == (0.5 * clipping(1.0, 0.5, 64.0), None)
    some = clip.of(ints(1, 2)).clipped(-0.5, [0.0, 64.0, 0.0])[1]
    assert some is not None
    assert some.tolist() == [1.0, 0.25]


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_kernel_multiplies_each_tensor_with_its_own_factor(backend: str) -> None:
    grad = np.arange(1, 8, dtype=np.float32)
    lo, hi = ints(0, 2, 5), ints(2, 5, 7)
    target, kernel = np.zeros(7, np.float32), build(FIRST, np.float32, backend)
    calls = [*by_factor(Spans(lo, hi, lo, np.ones(3)), 2.0, np.array([0.25, 1.0, 0.25]))]
    assert [rows.tolist() for rows, _spans, _factor in calls] == [[0, 2], [1]]
    for _rows, spans, factor in calls:
        kernel(spans, factor, target, grad, target, ())
    assert target.tolist() == [0.5, 1.0, 6.0, 8.0, 10.0, 3.0, 3.5]
