"""Updates per second, lately."""

from __future__ import annotations

import pytest

from aiops.engine.pace import Pace


def test_there_is_none_before_the_first_update() -> None:
    assert Pace().rate(5.0, 0) == 0


def test_it_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    for second in range(100):
        pace.note(second, 10 * second)
    assert pace.rate(100, 1000) == pytest.approx(10)
    for second in range(100, 112):
        pace.note(second, 1000)
    assert pace.rate(112, 1000) == 0


def test_a_version_is_noted_once_a_second() -> None:
    pace = Pace()
    for tenth in range(1000):
        pace.note(tenth / 10, tenth)
    assert pace.rate(100, 1000) == pytest.approx(10)
    assert len(pace.state()[1]) == 12


def test_it_goes_on_from_its_state() -> None:
    pace, other = Pace(), Pace()
    for second in range(20):
        pace.note(second, second)
    other.restore(pace.state())
    assert (other.rate(30, 25), other.due) == (pace.rate(30, 25), pace.due)
