"""The spans of averages: of each round one trace, with those of all of its workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiops.client import ModelAverager
from aiops.client.averager_facade import LEAVE_TIMEOUT
from aiops.client.rounds import Rounds
from aiops.client.traced_rounds import TracedRounds
from aiops.errors import ConnectionLost
from aiops.tracing.delivery import SpanQueue
from aiops.tracing.spans import Span
from tests.client.test_averager import average, joined, meeting_point
from tests.support import PATIENCE
from tests.tracing.collected import Collected, collecting


@pytest.fixture
def collected() -> Iterator[Collected]:
    with collecting() as found:
        yield found


def models(count: int) -> list[dict[str, Any]]:
    return [{"w": np.full(100, value, np.float32)} for value in range(count)]


def rounds_of(collected: Collected) -> dict[object, list[Span]]:
    found: dict[object, list[Span]] = {}
    for span in collected.spans("aiops.average"):
        found.setdefault(span.attributes["aiops.round"], []).append(span)
    return found


def test_a_round_is_one_trace_of_all_of_its_workers(collected: Collected) -> None:
    with meeting_point() as server, contextlib.ExitStack() as stack:
        averagers = [stack.enter_context(one) for one in joined(server, *models(3))]
        assert average(*averagers) == [3, 3, 3]
    last = rounds_of(collected)[averagers[0].stats.rounds]
    assert len({span.trace for span in last}) == 1
    assert len({span.id for span in last}) == 3
    for whole in last:
        assert whole.parent == 0
        assert not whole.error
        assert whole.attributes["aiops.workers"] == 3
        parts = [span for span in collected.spans() if span.parent == whole.id]
        assert [part.name for part in parts] == ["aiops.meet", "aiops.ring"]
        assert [part.begin for part in parts] == [whole.begin, parts[0].end]
        assert parts[1].end == whole.end
    traces = {span.trace for spans in rounds_of(collected).values() for span in spans}
    assert len(traces) == len(rounds_of(collected)), "each round has a trace of its own"


def test_a_round_alone_has_none(collected: Collected) -> None:
    with meeting_point() as server, ModelAverager(server.url, models(1)[0]) as averager:
        assert averager.average() == 1
    assert not collected.spans()


def test_a_round_that_is_given_up(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting_point() as server, contextlib.ExitStack() as stack:
        averagers = [stack.enter_context(one) for one in joined(server, *models(2))]

        async def fail(*_given: object) -> None:
            raise ConnectionLost("it died")

        monkeypatch.setattr(Rounds, "_average", fail)
        assert average(*averagers) == [0, 0]
        assert averagers[0].stats.failed == 1
    failed = [span for span in collected.spans("aiops.average") if span.error]
    assert [span.error for span in failed] == ["ConnectionLost: it died"] * 2


def test_what_fails_in_tracing_fails_no_average(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_given: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("aiops.client.traced_rounds.trace_of_round", fail)
    with meeting_point() as server, contextlib.ExitStack() as stack:
        averagers = [stack.enter_context(one) for one in joined(server, *models(2))]
        assert average(*averagers) == [2, 2]
    assert not collected.spans()
    assert "an exchange could not be traced" in caplog.text


def test_without_traces_rounds_are_plain() -> None:
    with meeting_point() as server, ModelAverager(server.url, models(1)[0]) as averager:
        loop = averager._core.loop
        assert loop is not None
        assert type(loop.rounds) is Rounds


def test_the_end_takes_less_than_two_seconds_beside_a_collector_that_hangs(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round under way has a second before; and a goodbye takes what the network takes."""
    hangs, waits = threading.Event(), list[float]()
    wait_closed = SpanQueue.wait_closed

    async def waiting(queue: SpanQueue, deadline: float) -> None:
        waits.append(deadline)
        await wait_closed(queue, deadline / 10)

    monkeypatch.setattr(SpanQueue, "wait_closed", waiting)
    monkeypatch.setattr(Collected, "export", lambda self, spans: str(hangs.wait(PATIENCE)))
    monkeypatch.setattr(Collected, "close", lambda self: hangs.set())
    with meeting_point() as server, contextlib.ExitStack() as stack:
        averagers = [stack.enter_context(one) for one in joined(server, *models(2))]
        assert average(*averagers) == [2, 2]
        loop = averagers[0]._core.loop
        assert loop is not None
        assert type(loop.rounds) is TracedRounds
    assert hangs.is_set(), "it was broken off"
    [waited] = waits  # the last of the process's
    assert LEAVE_TIMEOUT + waited <= 1.6
