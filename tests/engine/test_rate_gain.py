"""The factor that a gauge moves."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.engine.rate_gain import RateGain
from tests.rows import each_row


def noted(most: float, *counts: tuple[int, int]) -> RateGain:
    """Return one that has noted some sums, so many times each."""
    found = RateGain(most)
    for sums, times in counts:
        for _ in range(times):
            found.note(np.array([sums, 0]))
    return found


def test_it_rises_after_the_first_updates_and_doubles_in_as_many() -> None:
    assert noted(8, (5, 16)).factor == 1
    assert noted(8, (5, 32)).factor == 2
    assert noted(8, (5, 48)).factor == 4


@each_row("most", [1.0, 3.0, 8.0])
def test_it_stays_between_1_and_the_most(most: float) -> None:
    assert most / 1.02 < noted(most, (7, 1000)).factor <= most
    assert noted(most, (-7, 1000)).factor == 1
    assert noted(most, (7, 1000), (-7, 1000)).factor == 1


def test_it_goes_by_the_mean_and_not_by_the_last() -> None:
    assert noted(8, *[(-3, 1), (5, 1)] * 100).factor > 2
    assert noted(8, *[(3, 1), (-5, 1)] * 100).factor == 1


def test_sums_of_all_tensors_may_be_larger_than_float64_counts() -> None:
    found = RateGain(8)
    for _ in range(80):
        found.note(np.array([2**62, -(2**62), 1]))
    assert found.factor > 1


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_a_server_that_is_started_again_may_allow_less(most: float) -> None:
    found = RateGain(most)
    found.restore(noted(8, (5, 1000)).state())
    assert found.factor == most


def test_it_goes_on_from_its_state() -> None:
    found, other = noted(8, (5, 25)), RateGain(8)
    other.restore(found.state())
    assert other.factor == found.factor > 1
    found.note(np.array([-1]))
    other.note(np.array([-1]))
    assert other.factor == found.factor
