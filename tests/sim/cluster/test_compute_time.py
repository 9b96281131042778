"""Models of compute time."""

from __future__ import annotations

import doctest
import statistics

import pytest

from aiops.sim.cluster import compute_time
from aiops.sim.virtual import fair_sharing
from aiops.testing import Diurnal, Fixed, LogNormal, Straggler


def test_what_the_pages_say() -> None:
    for module in (compute_time, fair_sharing):
        failed, run = doctest.testmod(module)
        assert run
        assert not failed


def test_a_paces_median_and_spread() -> None:
    pace = LogNormal(0.2, 0.5).pace(worker=3, seed=1)
    drawn = sorted(pace(0.0) for _ in range(4001))
    assert statistics.median(drawn) == pytest.approx(0.2, rel=0.05)
    assert drawn[3364] / drawn[2000] == pytest.approx(2.718281828**0.5, rel=0.07)  # one sigma


def test_a_pace_belongs_to_seed_and_worker() -> None:
    def drawn(worker: int, seed: int) -> list[float]:
        pace = LogNormal(0.2).pace(worker, seed)
        return [pace(now) for now in (0.0, 1.0, 2.0)]

    assert drawn(1, 1) == drawn(1, 1)
    assert len({tuple(drawn(w, s)) for w in range(3) for s in range(3)}) == 9


def test_stragglers_are_slower_by_a_factor() -> None:
    slow, plain = Straggler(LogNormal(0.2), times=7.0, workers=(1, 2)), LogNormal(0.2)
    for worker, times in ((0, 1), (1, 7), (2, 7), (3, 1)):
        one, other = slow.pace(worker, 5), plain.pace(worker, 5)
        assert [one(0.0) for _ in range(5)] == [times * other(0.0) for _ in range(5)]


def test_a_day_has_a_slow_middle() -> None:
    pace = Diurnal(Fixed(2.0), period=8.0, depth=3.0).pace(0, 0)
    assert [pace(now) for now in (0.0, 2.0, 4.0, 6.0, 8.0)] == pytest.approx([2, 5, 8, 5, 2])
