"""The sum of a statistic or a gauge is exact, and defined for every float."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from aiops.kernels import STATISTIC_CAP, STATISTIC_SCALE, Rule, Spans, build
from tests.kernels.rules import SGD
from tests.rows import each_row


def keep(w, g, v, step):
    """The new state is the gradient, so that a test can choose the statistic's elements."""
    return w, g


def gauged(w, g, v, step):
    """The same, and the sum is the gradient's."""
    return w, v, g


KEEP = Rule(keep, {"v": 0.0}, statistic="v")
GAUGED = Rule(gauged, {"v": 0.0}, gauge=True)


def sums_of(values: np.ndarray, spans: Spans, backend: str) -> list[int]:
    """Return them, which are the same of both rules."""
    found = []
    for rule in (KEEP, GAUGED):
        w, v = np.zeros_like(values), np.zeros_like(values)
        kernel = build(rule, values.dtype, backend)
        found.append(kernel(spans, 1.0, w, values, w, [v]).tolist())
        assert rule is KEEP or not v.any()
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_is_the_exact_sum_of_what_each_element_counts(dtype: type, backend: str) -> None:
    random = np.random.default_rng(2)
    values = (random.standard_normal(50_001) * 10.0 ** random.integers(-9, 3, 50_001)).astype(dtype)
    cuts = [0, 1, 17, 20_000, 50_001]
    spans = Spans(cuts[:-1], cuts[1:], cuts[:-1], [1.0] * 4)
    scale, cap = int(STATISTIC_SCALE), int(STATISTIC_CAP)
    each = [max(-cap, min(int(Fraction(float(x)) * scale), cap)) for x in values]
    expected = [sum(each[lo:hi]) for lo, hi in pairwise(cuts)]
    assert sums_of(values, spans, backend) == expected


@each_row("backend", ["numba", "numpy"])
@each_row("dtype", [np.float32, np.float64])
@each_row(
    ("value", "units"),
    [
        (1.0, 2**24),
        (2.0**-24, 1),
        (0.9 * 2.0**-24, 0),
        (-0.0, 0),
        (64.0, 2**30),
        (65.0, 2**30),
        (3e38, 2**30),
        (np.inf, 2**30),
        (np.nan, 2**30),
        (-np.inf, -(2**30)),
        (-1.5, -3 * 2**23),
        (1e-45, 0),
    ],
)
def test_what_one_element_counts(value: float, units: int, dtype: type, backend: str) -> None:
    assert sums_of(np.full(3, value, dtype), Spans.whole(3, 1.0), backend) == [3 * units]


@each_row("backend", ["numba", "numpy"])
@each_row("units", [2**30, -(2**30), 2**16 - 1, -1, -(2**16) - 1])
def test_many_of_the_largest_do_not_overflow(units: int, backend: str) -> None:
    values = np.full(70_000, units / STATISTIC_SCALE, np.float32)
    assert sums_of(values, Spans.whole(70_000, 1.0), backend) == [70_000 * units]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_it_does_not_depend_on_how_tensors_are_cut(backend: str) -> None:
    values = np.random.default_rng(4).random(40_000).astype(np.float32)
    whole = sums_of(values, Spans.whole(40_000, 1.0), backend)
    cuts = list(range(0, 40_001, 1250))
    parts = sums_of(values, Spans(cuts[:-1], cuts[1:], cuts[:-1], [1.0] * 32), backend)
    assert sum(parts) == whole[0]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_without_a_statistic_the_sums_are_zero(backend: str) -> None:
    w, g = (np.ones(4, np.float32) for _ in range(2))
    spans = Spans([0, 2], [2, 4], [0, 2], [1.0, 1.0])
    sums = build(SGD, np.float32, backend)(spans, 1.0, w, g, w, [])
    assert sums.dtype == np.int64
    assert sums.tolist() == [0, 0]
