"""The queue of spans: bounded, it never waits, and never raises."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from aiops.tracing import delivery
from aiops.tracing.delivery import SpanQueue
from aiops.tracing.spans import Span
from tests.support import PATIENCE


def span(number: int) -> Span:
    return Span("aiops.step", 1, number, 0, number, number + 1)


class Exporter:
    """Keeps what it is given; ``fails``: the exports that do."""

    def __init__(self, fails: int = 0) -> None:
        self.ids = list[int]()
        self.most = 0
        self.fails, self.why, self.closed = fails, "", False
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def export(self, spans: Sequence[Span]) -> str:
        self.asked.set()
        assert self.goes_on.wait(PATIENCE)
        self.most = max(self.most, len(spans))
        if self.fails:
            self.fails -= 1
            raise OSError("no route")
        self.ids += [each.id for each in spans]
        return self.why

    def close(self) -> None:
        self.closed = True
        self.goes_on.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_EVERY", 0.001)


def test_all_that_is_offered_is_exported_in_order() -> None:
    exporter = Exporter()
    queue = SpanQueue(lambda: exporter)
    for number in range(3000):
        queue.offer([span(number)])
    queue.close(PATIENCE)
    assert exporter.ids == list(range(3000))
    assert exporter.most <= delivery.AT_ONCE
    assert exporter.closed
    queue.offer([span(0)])
    queue.close(PATIENCE)
    assert len(exporter.ids) == 3000, "it is closed"


def test_without_spans_there_is_no_thread() -> None:
    def opens() -> Exporter:
        raise AssertionError("it is opened")

    before = threading.active_count()
    queue = SpanQueue(opens)
    assert threading.active_count() == before
    queue.close(PATIENCE)


def test_of_more_than_may_wait_the_later_ones_are_lost() -> None:
    exporter = Exporter()
    exporter.goes_on.clear()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(-1)])
    assert exporter.asked.wait(PATIENCE)
    for number in range(2 * delivery.WAITING):
        queue.offer([span(number)])  # and never waits
    exporter.goes_on.set()
    queue.close(PATIENCE)
    assert exporter.ids == list(range(-1, delivery.WAITING))


def test_what_fails_is_logged_once_a_minute_and_later_spans_are_exported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter, now = Exporter(fails=2), 100.0
    queue = SpanQueue(lambda: exporter, lambda: now)
    for number in range(3):
        exporter.asked.clear()
        queue.offer([span(number)])
        assert exporter.asked.wait(PATIENCE)
    queue.close(PATIENCE)
    assert exporter.ids == [2]
    assert caplog.text.count("traces are lost") == 1
    assert "1 spans so far, and the run goes on: OSError('no route')" in caplog.text


def test_an_exporter_that_hangs_is_left(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    exporter.goes_on.clear()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    assert exporter.asked.wait(PATIENCE)
    queue.offer([span(1), span(2)])
    queue.close(0.01)
    assert "within 0.01 s of the end: 2 spans are lost" in caplog.text
    assert exporter.closed, "which ends what it hangs in"


def test_the_reason_of_an_exporter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    exporter.why = "404: no such path"
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    queue.close(PATIENCE)
    assert "1 spans so far, and the run goes on: 404: no such path" in caplog.text


def test_an_exporter_that_cannot_be_opened_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter, opened = Exporter(), list[threading.Event]()

    def opens() -> Exporter:
        opened.append(threading.Event())
        if len(opened) == 1:
            first.set()
            raise RuntimeError("not yet")
        return exporter

    first = threading.Event()
    queue = SpanQueue(opens)
    queue.offer([span(0)])
    assert first.wait(PATIENCE)
    queue.offer([span(1)])
    queue.close(PATIENCE)
    assert 1 in exporter.ids
    assert "not yet" in caplog.text
