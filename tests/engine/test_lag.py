"""The mean staleness of late."""

from __future__ import annotations

import pytest

from aiops.engine.lag import Lag


def test_at_first_it_is_the_plain_mean() -> None:
    lag = Lag()
    assert lag.mean == 0
    for staleness in (4, 0, 2):
        lag.note(staleness)
    assert lag.mean == pytest.approx(2)


def test_it_forgets() -> None:
    lag = Lag()
    for _ in range(100):
        lag.note(100)
    for _ in range(640):
        lag.note(3)
    assert lag.mean == pytest.approx(3, abs=0.01)


def test_it_goes_on_from_its_state() -> None:
    lag, other = Lag(), Lag()
    for staleness in (3, 1, 7):
        lag.note(staleness)
    other.restore(lag.state())
    lag.note(2)
    other.note(2)
    assert other.mean == lag.mean
