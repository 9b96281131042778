"""Series keep the shape of a long run in bounded memory."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from aiops.dashboard.series import COARSE, FINE, MOST_NAMES, RunSeries


def test_points_are_kept_as_they_were_added() -> None:
    series = RunSeries()
    series.add(1.0, {"a": 2.0})
    series.add(2.0, {"a": None, "b": 3.0})
    assert series.columns() == {"t": [1.0, 2.0], "a": [2.0, None], "b": [None, 3.0]}


def test_a_long_run_is_coarse_at_its_beginning_and_fine_at_its_end() -> None:
    series, count = RunSeries(), 10_000
    for k in range(count):
        series.add(float(k), {"a": float(k)})
    columns = series.columns()
    times, values = columns["t"], columns["a"]
    assert len(times) <= FINE + COARSE + 1
    assert times[-FINE:] == [float(k) for k in range(count - FINE, count)]
    assert times == sorted(times)
    gaps = {after - before for before, after in pairwise(times[:200])}
    assert gaps == {16.0}, "each average takes as many points"
    assert values[0] == pytest.approx(sum(range(16)) / 16)


def test_a_name_that_comes_late_or_rarely_is_no_reason_for_gaps_to_be_zero() -> None:
    series = RunSeries()
    for k in range(FINE + 2 * COARSE):
        series.add(float(k), {"a": 1.0, **({"late": 5.0} if k % 3 == 0 and k > 100 else {})})
    late = series.columns()["late"]
    assert set(late) == {None, 5.0}


def test_own_names_always_have_room_and_others_that_are_gone_make_room() -> None:
    series = RunSeries(["own"])
    series.add(0.0, {f"n{k}": 1.0 for k in range(MOST_NAMES)})
    assert series.add(1.0, {"own": 1.0, "n0": 1.0, "late": 2.0}) == {
        "own": 1.0,
        "n0": 1.0,
        "late": 2.0,
    }
    assert set(series.names) == {"own", "late", "n0", *(f"n{k}" for k in range(2, MOST_NAMES))}
    kept = series.add(2.0, {**dict.fromkeys(series.names, 1.0), "more": 1.0})
    assert "more" not in kept, "all others are in use"


def test_means_of_the_largest_numbers_are_finite() -> None:
    series = RunSeries()
    for k in range(FINE + 2 * COARSE):
        series.add(float(k), {"a": 1.7e308, "b": math.inf})
    assert series.columns()["a"][0] == 1.7e308
    assert series.names == ["a"]


def test_names_are_bounded() -> None:
    series = RunSeries()
    kept = series.add(0.0, {f"n{k}": 1.0 for k in range(2 * MOST_NAMES)})
    assert len(kept) == MOST_NAMES == len(series.names)
