"""The queue of spans: bounded, it never waits, and never raises."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

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
        self.goes_on.set()  # as the SDK's, which breaks off its repetitions


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


def test_without_spans_there_is_no_thread() -> None:
    def opens() -> Exporter:
        raise AssertionError("it is opened")

    before = threading.active_count()
    queue = SpanQueue(opens)
    assert threading.active_count() == before
    queue.close(PATIENCE)


def test_of_more_than_may_wait_the_later_ones_are_lost(caplog: pytest.LogCaptureFixture) -> None:
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
    assert caplog.text.count("traces are lost") == 1
    assert f"{delivery.WAITING} spans so far" in caplog.text
    assert "they come faster than the collector takes them" in caplog.text


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
    assert "1 spans so far, and the run goes on: OSError('no route')" in caplog.text
    assert caplog.text.count("traces are lost") == 2, "the other is told at the end"
    assert "2 spans so far" in caplog.text


def test_an_exporter_that_hangs_is_left(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    exporter.goes_on.clear()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    assert exporter.asked.wait(PATIENCE)
    queue.offer([span(1), span(2)])
    queue.close(0.01)
    assert "within 0.01 s of the end: 2 spans are lost" in caplog.text
    assert exporter.closed, "or its thread would go on"
    assert queue._over.wait(PATIENCE)
    assert exporter.ids == [0]


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


def test_many_spans_do_not_wait_for_the_thread_s_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_EVERY", 10 * PATIENCE)
    exporter = Exporter()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(number) for number in range(delivery.AT_ONCE)])
    assert exporter.asked.wait(PATIENCE)
    queue.close(PATIENCE)


def test_without_a_thread_spans_are_lost_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    exporter = Exporter()
    queue = SpanQueue(lambda: exporter)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for number in range(5):
            queue.offer([span(number)])
    assert caplog.text.count("traces are lost") == 1, "once a minute"
    queue.offer([span(5)])  # there can be one again
    queue.close(PATIENCE)
    assert exporter.ids == [5]
    assert "5 spans so far, and the run goes on: there can be no thread" in caplog.text


def test_what_comes_after_the_end_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    queue = SpanQueue(lambda: exporter)
    queue.close(PATIENCE)
    for number in range(3):
        queue.offer([span(number)])
    assert not queue._waiting
    assert not exporter.ids
    assert "1 spans so far, and the run goes on: they came after the end" in caplog.text
    queue.close(PATIENCE)
    assert "3 spans so far" in caplog.text


def test_those_of_one_role_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_QUEUES", {})
    exporter = Exporter()
    queues = [delivery.shared("worker", "", lambda: exporter) for _ in range(4)]
    assert len({id(queue) for queue in queues}) == 1
    assert delivery.shared("server", "", lambda: exporter) is not queues[0]
    for queue in queues:
        queue.offer([span(1)])
    assert [queue.leave() for queue in queues] == [False, False, False, True]
    queues[0].close(PATIENCE)
    assert exporter.ids == [1] * 4
    assert delivery.shared("worker", "", lambda: exporter) is not queues[0], "that has ended"


def test_a_fork_has_a_queue_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_QUEUES", {})
    queue = delivery.shared("worker", "", Exporter)
    queue.forked()  # as in a child
    assert delivery.shared("worker", "", Exporter) is not queue


async def test_an_event_loop_does_not_wait_for_its_executor() -> None:
    """A user's one may be full."""
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, release.wait, PATIENCE)
    exporter = Exporter()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    began = time.monotonic()
    await queue.wait_closed(PATIENCE / 2)
    assert time.monotonic() < began + PATIENCE / 2
    assert exporter.ids == [0]
    assert exporter.closed
    release.set()
    await busy


async def test_a_wait_that_is_cancelled_ends_the_thread_all_the_same() -> None:
    exporter = Exporter()
    exporter.goes_on.clear()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    waiting = asyncio.create_task(queue.wait_closed(PATIENCE))
    assert await asyncio.to_thread(exporter.asked.wait, PATIENCE)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(queue._over.wait, PATIENCE)
    assert exporter.closed


async def test_a_wait_of_an_event_loop_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    exporter.goes_on.clear()
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    assert await asyncio.to_thread(exporter.asked.wait, PATIENCE)
    await queue.wait_closed(0.01)
    assert "within 0.01 s of the end" in caplog.text
    assert await asyncio.to_thread(queue._over.wait, PATIENCE)


def test_the_reason_of_an_exporter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    exporter.why = "404: no such path"
    queue = SpanQueue(lambda: exporter)
    queue.offer([span(0)])
    queue.close(PATIENCE)
    assert "1 spans so far, and the run goes on: 404: no such path" in caplog.text
