"""Numbers reach a tracker in order, and those who offer them do not wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiops.trackers import RunMetrics
from aiops.trackers import delivery as module
from aiops.trackers.delivery import WAITING, Delivery
from tests.peers import eventually


def metrics(step: int) -> RunMetrics:
    return RunMetrics(step, 0.0, {"loss": 1 / (1 + step)})


class Noted:
    """A tracker that notes what it takes; it may be held, or fail."""

    def __init__(self, fails: Callable[[int], bool] = lambda step: False) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._fails = fails

    def on_metrics(self, metrics: RunMetrics) -> None:
        assert self.goes_on.wait(30)
        if self._fails(metrics.step):
            raise OSError("the disk is full")
        self.steps.append(metrics.step)

    def close(self) -> None:
        self.closed = True


def ended(delivery: Delivery, deadline: float = 30) -> None:
    delivery.end()
    delivery.join(deadline)


def test_all_is_taken_in_order_before_it_ends() -> None:
    tracker = Noted()
    delivery = Delivery("noted", lambda: tracker)
    for step in range(100):
        delivery.offer(metrics(step))
    ended(delivery)
    assert tracker.steps == [*range(100)]
    assert tracker.closed
    delivery.offer(metrics(100))
    assert len(tracker.steps) == 100


def test_of_too_many_the_oldest_go() -> None:
    tracker = Noted()
    tracker.goes_on.clear()
    delivery = Delivery("noted", lambda: tracker)
    delivery.offer(metrics(0))
    eventually(lambda: not delivery._waiting, "it begins with the first")
    for step in range(1, WAITING + 51):
        delivery.offer(metrics(step))
    tracker.goes_on.set()
    ended(delivery)
    assert tracker.steps == [0, *range(51, WAITING + 51)]


def test_what_it_raises_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    tracker, now = Noted(lambda step: step % 2 == 0), [0.0]
    delivery = Delivery("noted", lambda: tracker, lambda: now[0])
    for step in range(9):
        delivery.offer(metrics(step))
    eventually(lambda: tracker.steps == [1, 3, 5, 7] and not delivery._waiting, "it is taken")
    now[0] = 61.0
    delivery.offer(metrics(10))
    ended(delivery)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "noted has failed, 1 times so far," in told[0]
    assert "the disk is full" in told[0]
    assert "has failed, 6 times so far," in told[1]


def test_it_is_opened_again_when_it_could_not_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN", 0.001)
    tracker, tries = Noted(), list[int]()

    def opens() -> Noted:
        tries.append(len(tries))
        if len(tries) < 3:
            raise ConnectionError("not there yet")
        return tracker

    delivery = Delivery("noted", opens)
    for step in range(5):
        delivery.offer(metrics(step))
    ended(delivery)
    assert tracker.steps == [2, 3, 4]
    assert "not there yet" in caplog.text


def test_one_that_hangs_is_left(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Noted()
    tracker.goes_on.clear()
    delivery = Delivery("noted", lambda: tracker)
    delivery.offer(metrics(0))
    delivery.offer(metrics(1))
    ended(delivery, 0.01)
    assert "noted has not taken all within 0.01 s" in caplog.text
    tracker.goes_on.set()
    delivery.join(30)
    assert tracker.closed


def test_one_that_cannot_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Noted):
        def close(self) -> Any:
            raise RuntimeError("no space")

    delivery = Delivery("stuck", Stuck)
    delivery.offer(metrics(0))
    with caplog.at_level(logging.WARNING):
        ended(delivery)
    assert "the tracker stuck could not end: RuntimeError('no space')" in caplog.text


def test_one_that_would_end_its_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(Noted):
        def on_metrics(self, metrics: RunMetrics) -> None:
            if metrics.step == 0:
                raise SystemExit(3)
            super().on_metrics(metrics)

    tracker = Leaving()
    delivery = Delivery("leaving", lambda: tracker)
    for step in range(3):
        delivery.offer(metrics(step))
    ended(delivery)
    assert tracker.steps == [1, 2]
    assert tracker.closed
    assert "SystemExit(3)" in caplog.text
