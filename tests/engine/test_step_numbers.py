"""Learning rates and scalars by staleness, position and tensor."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.algorithms.asgd import ASGD
from aiops.engine.step_numbers import StepNumbers
from aiops.errors import UsageError
from aiops.model.arena import Arena
from aiops.model.layout import Array, Cover, Ints, Layout
from aiops.store.snapshots import Version

LAYOUT = Layout.of({"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(4)})
ADAM = {"optimizer": "adam"}


def numbers(policy: str, **settings: Any) -> StepNumbers:
    return StepNumbers(find(policy).make(settings), None, LAYOUT)


def cover(*tensors: int) -> Cover:
    """Return the cover of a push of these tensors."""
    whole = len(tensors) == len(LAYOUT.tensors)
    chosen = LAYOUT.all if whole else np.array(tensors)
    return Cover(chosen, np.zeros(len(tensors), np.int64), whole, 0, None)


def version(levels: list[int]) -> Version:
    """Return a version whose tensors have had these numbers of updates."""
    level = levels[0] if len(set(levels)) == 1 else None
    return Version(max(levels), Arena(LAYOUT), np.array(levels), level)


def equal(found: Array, *expected: float) -> None:
    np.testing.assert_array_equal(found, expected)


class TestRates:
    def test_a_constant_rate_is_there_from_the_start(self) -> None:
        found = numbers("asgd", lr=0.5)
        assert not found.scheduled
        equal(found.even[7][1], 0.5, 0.5, 0.5)

    def test_they_are_modulated_by_staleness(self) -> None:
        scales, steps = numbers("sasgd", lr=0.5).even[4]
        equal(scales, 0.25, 0.25, 0.25)
        equal(steps, 0.125, 0.125, 0.125)

    def test_each_tensor_has_its_factor(self) -> None:
        found = numbers("asgd", lr=0.5, per_tensor="lr=0.25@b")
        equal(found.of(cover(0, 1, 2), 0, None)[1], 0.5, 0.25, 0.5)
        equal(found.of(cover(1, 2), 0, None)[1], 0.25, 0.5)
        equal(found.collected(np.array([1]), np.array([0.5])), 0.125)

    def test_tensors_may_differ_in_staleness(self) -> None:
        stale: Ints = np.array([4, 2])
        scales, steps = numbers("sasgd", lr=0.5, per_tensor="lr=1@c").of(cover(0, 2), 4, stale)
        equal(scales, 0.25, 0.5)
        equal(steps, 0.125, 0.5)

    def test_a_sum_of_weighted_gradients_is_modulated_already(self) -> None:
        equal(numbers("sasgd", lr=0.5).collected(LAYOUT.all, None), 0.5, 0.5, 0.5)

    def test_what_was_computed_at_another_position_does_not_count(self) -> None:
        found = numbers("asgd", lr=1.0, schedule="linear:10")
        assert found.scheduled
        for position in (0, 5, 5, 9, 0):
            found.move_to(position)
            assert found.even[3][1][0] == pytest.approx(1 - position / 10)

    def test_a_rate_is_computed_once(self) -> None:
        found = numbers("sasgd")
        assert found.even[2] is found.even[2]
        found.move_to(17)
        assert len(found.even) == 1

    def test_those_that_are_kept_have_a_bound(self) -> None:
        found = numbers("sasgd", lr=1.0)
        for staleness in range(1, 3000):
            assert found.even[staleness][1][0] == 1 / staleness
            assert len(found.even) <= 1024


class TestModulationsThatFail:
    """A staleness that was not tried before the run: the server ends, and no update is made."""

    @pytest.mark.parametrize("value", [math.nan, -1.0, None, "raises"])
    def test_no_step_is_made_of_what_is_no_number(self, value: Any) -> None:
        class Mine(ASGD):
            name = "mine"

            def modulation(self, staleness: int) -> float:
                if value == "raises":
                    raise KeyError(staleness)
                return cast("float", value)

        found = StepNumbers(Mine(), None, LAYOUT)
        stale: Ints = np.array([5, 0, 0])
        words = "mine: the modulation for a staleness of 5 (is|fails with KeyError)"
        with pytest.raises(UsageError, match=words):
            _ = found.even[5]
        with pytest.raises(UsageError, match=words):
            found.of(cover(0, 1, 2), 5, stale)
        assert not found.even


class TestScalars:
    def test_tensors_of_as_many_updates_share_a_row_per_update(self) -> None:
        found = numbers("asgd", **ADAM)
        scalars = found.scalars(version([4, 4, 4]), LAYOUT.all)
        assert len(scalars) == 3
        assert (scalars == scalars[0]).all()
        assert found.scalars(version([4, 4, 4]), LAYOUT.all) is scalars
        assert not np.array_equal(found.scalars(version([5, 5, 5]), LAYOUT.all), scalars)

    def test_each_tensor_goes_by_its_own_updates(self) -> None:
        found = numbers("asgd", **ADAM)
        mixed = found.scalars(version([4, 9, 4]), LAYOUT.all)
        equal(mixed[0], *found.scalars(version([4, 4, 4]), LAYOUT.all)[0])
        equal(mixed[1], *found.scalars(version([9, 9, 9]), LAYOUT.all)[1])
        equal(mixed[2], *mixed[0])
        np.testing.assert_array_equal(found.scalars(version([4, 9, 4]), np.array([1])), mixed[1:2])

    def test_they_go_by_the_staleness_of_late(self) -> None:
        found = numbers("schedule-free")
        before = found.scalars(version([4, 4, 4]), LAYOUT.all)
        for _ in range(64):
            found.recent_staleness.note(8)
        assert not np.array_equal(found.scalars(version([4, 4, 4]), LAYOUT.all), before)
