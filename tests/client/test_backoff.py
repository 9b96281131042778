"""How long clients wait before they connect again, and when they give up."""

from __future__ import annotations

import pytest

import aiops
from aiops import testing
from aiops.client.backoff import FIRST, LONGEST, Attempts, check_timeout, delays, overdue, reason
from aiops.engine.events import Effect, Event, Received
from aiops.errors import ConnectionLost, DeadlineExceeded, UsageError

URL = "aiops://host:7171"


def longest(below: int) -> int:
    return below - 1


def shortest(below: int) -> int:
    return 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 2e9, float("inf"), float("nan")])
def test_a_timeout_that_nothing_can_wait_for_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="timeout must be more than 0 seconds"):
        check_timeout(seconds)


def test_pauses_double_up_to_the_longest() -> None:
    pauses = delays(shortest)
    assert [next(pauses) for _ in range(9)] == [
        *(FIRST / 2 * 2**k for k in range(7)),
        LONGEST / 2,
        LONGEST / 2,
    ]


def test_pauses_are_random_in_their_upper_half() -> None:
    low, high = next(delays(shortest)), next(delays(longest))
    assert low == FIRST / 2
    assert 0.99 * FIRST < high < FIRST


class TestAttempts:
    def test_attempts_end_when_the_next_would_come_too_late(self) -> None:
        attempts = Attempts(URL, shortest, until=1.0)
        error = ConnectionRefusedError(111, "Connection refused")
        assert attempts.pause(0.0, error) == FIRST / 2
        assert attempts.pause(0.9, error) == FIRST
        with pytest.raises(ConnectionLost) as caught:
            attempts.pause(0.95, error)
        assert str(caught.value) == (
            f"{URL} cannot be reached (Connection refused): is the server running?"
        )
        assert caught.value.__cause__ is error

    @pytest.mark.parametrize(
        ("lasted", "answers", "pauses_before"),
        [(0.0, 0, 3), (4.9, 0, 3), (5.0, 0, 0), (0.0, 1, 0)],
    )
    def test_a_connection_that_was_of_use_begins_them_anew(
        self, lasted: float, answers: int, pauses_before: int
    ) -> None:
        attempts = Attempts(URL, shortest, until=1.0)
        for _ in range(3):
            attempts.pause(0.0, OSError("gone"))
        attempts.made(1.0, answered=7)
        attempts.lost(1.0 + lasted, answered=7 + answers, until=99.0)
        assert attempts.pause(90.0, OSError("gone")) == FIRST / 2 * 2**pauses_before

    def test_more_time_can_be_given(self) -> None:
        attempts = Attempts(URL, shortest, until=1.0)
        attempts.until = 2.0
        assert attempts.pause(1.5, OSError("gone")) == FIRST / 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(32, "Broken pipe"), "Broken pipe"),
        (ConnectionLost("the server is gone"), "the server is gone"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_reason_is_what_the_error_says(error: Exception, said: str) -> None:
    assert reason(error) == said


def test_what_is_overdue_is_named() -> None:
    error = overdue(URL, "an acknowledgement", "in 5 s")
    assert isinstance(error, DeadlineExceeded)
    assert str(error).startswith(f"{URL} did not send an acknowledgement in 5 s: it may be")


@testing.virtual()
async def test_a_server_that_cuts_off_whoever_asks_is_not_besieged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with aiops.serve(policy="asgd") as server:
        handle, asked = server._handle, 0

        def refuse(event: Event) -> list[Effect]:
            nonlocal asked
            if isinstance(event, Received):
                asked += 1
                server.connections.peers[event.peer].link.fault(ConnectionLost("a bug"))
                return []
            return handle(event)

        monkeypatch.setattr(server, "_handle", refuse)
        client = await aiops.AsyncClient(server.url, timeout=60.0).connect()
        with pytest.raises(DeadlineExceeded):
            await client.stats()
        await client.close()
        assert 50 < asked < 150, "in the 360 seconds that an answer may take"
