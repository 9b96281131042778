"""To which server clients connect, how long they wait before it, and when they give up."""

from __future__ import annotations

import pytest

import aiops
from aiops import testing
from aiops.client import Client
from aiops.client.backoff import (
    ATTEMPT,
    FIRST,
    LONGEST,
    LONGEST_WELCOME,
    Attempts,
    Repetitions,
    check_timeout,
    delays,
    overdue,
    reason,
)
from aiops.common.urls import parse_all
from aiops.engine.events import Effect, Event, Received
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    DeadlineExceeded,
    Standby,
    Unavailable,
    UsageError,
)
from aiops.serving.server import Server
from aiops.wire.data_messages import TakeTask
from tests.rows import each_row
from tests.support import ServerThread

URL = "aiops://host:7171"
ASKED = TakeTask(0, "digits", 100, 0, 1, 0, 1, 10, True, "", (), ())
REFUSED = ConnectionRefusedError(111, "Connection refused")
FULL = Unavailable(f"{URL}: the server has its 2 connections already", limit=2)


def attempts_at(url: str = URL, until: float = 1.0) -> Attempts:
    return Attempts(parse_all(url), shortest, until)


def longest(below: int) -> int:
    return below - 1


def shortest(below: int) -> int:
    return 0


@each_row("seconds", [0.0, -1.0, 2e9, float("inf"), float("nan")])
def test_a_timeout_that_nothing_can_wait_for_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="timeout must be more than 0 seconds"):
        check_timeout(seconds)


def test_pauses_double_up_to_the_longest() -> None:
    pauses = delays(shortest)
    assert [next(pauses) for _ in range(7)] == [
        *(FIRST / 2 * 2**k for k in range(5)),
        LONGEST / 2,
        LONGEST / 2,
    ]


def test_pauses_are_random_in_their_upper_half() -> None:
    low, high = next(delays(shortest)), next(delays(longest))
    assert low == FIRST / 2
    assert 0.99 * FIRST < high < FIRST


class TestAttempts:
    def test_a_wait_is_told_once_and_again_after_a_connection(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        attempts = attempts_at(until=60.0)
        for now in (10.0, 10.5, 11.4):
            attempts.pause(now, REFUSED)
        assert not caplog.records, "it may be a short interruption"
        for now in (11.5, 13.0, 20.0):
            attempts.pause(now, REFUSED)
        told = f"{URL} cannot be reached (Connection refused): trying again for up to 48 s"
        assert [record.getMessage() for record in caplog.records] == [told]
        attempts.restart(100.0)
        attempts.pause(40.0, REFUSED)
        assert len(caplog.records) == 1
        attempts.pause(42.0, REFUSED)
        assert caplog.records[1].getMessage().endswith("for up to 58 s")

    def test_attempts_end_when_the_next_would_come_too_late(self) -> None:
        attempts = attempts_at()
        assert attempts.pause(0.0, REFUSED) == FIRST / 2
        assert attempts.pause(0.9, REFUSED) == FIRST
        with pytest.raises(ConnectionLost) as caught:
            attempts.pause(0.95, REFUSED)
        assert str(caught.value) == (
            f"{URL} cannot be reached (Connection refused): is the server running?"
        )
        assert caught.value.__cause__ is REFUSED

    @each_row(
        ("lasted", "answers", "pauses_before"),
        [(0.0, 0, 3), (0.9, 0, 3), (1.0, 0, 0), (0.0, 1, 0)],
    )
    def test_a_connection_that_was_of_use_begins_them_anew(
        self, lasted: float, answers: int, pauses_before: int
    ) -> None:
        attempts = attempts_at()
        for _ in range(3):
            attempts.pause(0.0, OSError("gone"))
        attempts.made(1.0, answered=7)
        attempts.lost(1.0 + lasted, 7 + answers, 99.0, OSError("gone"))
        assert attempts.pause(90.0, OSError("gone")) == FIRST / 2 * 2**pauses_before

    def test_connections_without_an_answer_give_no_more_time(self) -> None:
        attempts = attempts_at(until=10.0)
        for number in range(1, 4):
            attempts.made(float(number), answered=7)
            assert attempts.lost(number + 0.1, 7, 99.0, OSError("gone"), attempts.until) == 10.0
        with pytest.raises(ConnectionLost, match=r"took 3 connections, .* \(gone\)"):
            attempts.pause(10.0, OSError("gone"))
        attempts.made(4.0, answered=7)
        assert attempts.lost(4.1, 8, 99.0, OSError("gone"), attempts.until) == 99.0

    def test_more_time_can_be_given(self) -> None:
        attempts = attempts_at()
        attempts.until = 2.0
        assert attempts.pause(1.5, OSError("gone")) == FIRST / 2

    def test_a_restored_network_is_noticed_within_two_seconds(self) -> None:
        """The kernel asks again after 1 s; then comes the pause, then the next attempt."""
        longest_pause = max(next(delays(longest)), LONGEST)
        assert (ATTEMPT - 1.0) + longest_pause < 2

    def test_the_reason_of_a_server_that_refused_is_raised(self) -> None:
        attempts = attempts_at()
        attempts.pause(0.0, FULL)
        with pytest.raises(Unavailable) as caught:
            attempts.pause(1.0, FULL)
        assert caught.value is FULL

    def test_a_server_that_refused_and_went_away(self) -> None:
        attempts = attempts_at()
        attempts.pause(0.0, FULL)
        with pytest.raises(Unavailable) as caught:
            attempts.pause(1.0, REFUSED)
        assert str(caught.value) == (
            f"{URL}: the server has its 2 connections already; since then it cannot be reached"
            " (Connection refused)"
        )
        assert caught.value.details == {"limit": 2}

    def test_a_server_that_has_welcomed_this_client_since_refuses_no_more(self) -> None:
        attempts = attempts_at()
        attempts.pause(0.0, FULL)
        attempts.made(0.5, answered=0)
        attempts.lost(0.6, 0, 1.0, REFUSED)
        with pytest.raises(ConnectionLost, match="is the server running"):
            attempts.pause(1.0, REFUSED)

    def test_an_attempt_that_the_time_out_cuts_short_hides_no_reason(self) -> None:
        attempts, late = attempts_at(until=0.5), DeadlineExceeded("no welcome in time")
        attempts.pause(0.1, ConnectionLost("it speaks no TLS"))
        with pytest.raises(ConnectionLost, match="speaks no TLS"):
            attempts.pause(0.5, late)
        attempts.until = 10 * ATTEMPT
        began = 2.0 + attempts.pause(2.0, ConnectionLost("it speaks no TLS"))
        with pytest.raises(DeadlineExceeded, match="no welcome"):
            attempts.pause(began + 10 * ATTEMPT, late)

    def test_a_welcome_that_is_late_is_given_more_time_up_to_a_limit(self) -> None:
        attempts, late = attempts_at(until=99.0), overdue(URL, "its welcome", "in time")
        given = []
        for _ in range(4):
            given.append(attempts.patience)
            attempts.pause(0.0, late)
        assert given == [ATTEMPT, 2 * ATTEMPT, LONGEST_WELCOME, LONGEST_WELCOME]
        attempts.pause(0.0, REFUSED)
        assert attempts.patience == ATTEMPT, "it is another server, or starts again"
        attempts.pause(0.0, late)
        attempts.made(0.0, answered=0)
        assert attempts.patience == ATTEMPT
        with pytest.raises(DeadlineExceeded, match="did not send its welcome in time"):
            attempts.pause(99.0, late)


class TestAlternatives:
    """The order in which the servers of a URL are tried."""

    def tried(self, attempts: Attempts, *errors: AiopsError | OSError) -> list[str]:
        """Return the hosts that are tried, and "-" for each pause."""
        found = [attempts.server.host]
        for error in errors:
            if attempts.pause(0.0, error):
                found.append("-")
            found.append(attempts.server.host)
        return found

    def test_in_turn_with_a_pause_after_each_round(self) -> None:
        attempts = attempts_at("aiops://a,b,c")
        assert attempts.several
        order = self.tried(attempts, REFUSED, FULL, REFUSED, REFUSED)
        assert order == ["a", "b", "c", "-", "a", "b"]

    def test_the_last_that_welcomed_is_the_first(self) -> None:
        attempts = attempts_at("aiops://a,b,c")
        self.tried(attempts, REFUSED)
        attempts.made(0.0, answered=0)
        attempts.lost(1.0, 1, 9.0, ConnectionLost("cut"))
        order = self.tried(attempts, ConnectionLost("cut"), REFUSED, REFUSED, REFUSED)
        assert order == ["b", "-", "b", "c", "a", "-", "b"]

    def test_one_that_shuts_down_is_left_at_once(self) -> None:
        attempts = attempts_at("aiops://a,b")
        attempts.made(0.0, answered=0)
        attempts.lost(1.0, 5, 9.0, FULL)
        assert self.tried(attempts, FULL, REFUSED) == ["a", "b", "-", "a"]

    def test_two_that_each_answer_and_then_name_the_other_are_not_asked_without_a_pause(
        self,
    ) -> None:
        attempts, pauses = attempts_at("aiops://a,b", until=99.0), []
        for time in range(6):
            attempts.made(time, answered=time)
            away = Standby(f"{URL}: this server is a standby")
            attempts.lost(time, time + 1, 99.0, away)
            pauses.append(attempts.pause(time, away))
        assert pauses == [0.0, FIRST / 2, 0.0, FIRST, 0.0, 2 * FIRST]

    def test_one_that_ends_each_connection_is_left_too(self) -> None:
        attempts = attempts_at("aiops://a,b")
        attempts.made(0.0, answered=0)
        attempts.lost(0.1, 0, 9.0, ConnectionLost("a bug"))
        assert self.tried(attempts, ConnectionLost("a bug")) == ["a", "b"]

    def test_the_error_names_all(self) -> None:
        with pytest.raises(ConnectionLost, match=r"aiops://a:7171,b:7171 cannot be reached"):
            attempts_at("aiops://a,b").pause(1.0, REFUSED)

    def test_each_has_its_own_patience(self) -> None:
        attempts = attempts_at("aiops://a,b", until=99.0)
        attempts.pause(0.0, overdue(URL, "its welcome", "in time"))
        assert (attempts.server.host, attempts.patience) == ("b", ATTEMPT)
        attempts.pause(0.0, REFUSED)
        assert (attempts.server.host, attempts.patience) == ("a", 2 * ATTEMPT)


class TestRepetitions:
    def test_pauses_grow_until_the_time_is_up(self) -> None:
        repetitions, now = Repetitions(shortest), 10.0
        for count in range(9):
            pause = repetitions.pause(now, FULL, timeout=3.0)
            assert pause == min(FIRST * 2**count, LONGEST) / 2
            now += pause
        with pytest.raises(Unavailable) as caught:
            repetitions.pause(now, FULL, timeout=3.0)
        assert caught.value is FULL

    def test_a_later_refusal_has_time_of_its_own(self) -> None:
        repetitions = Repetitions(shortest)
        for now in (0.0, 100.0, 200.0):
            assert repetitions.pause(now, FULL, timeout=3.0) == FIRST / 2
        with pytest.raises(Unavailable):
            Repetitions(shortest).pause(0.0, FULL, timeout=FIRST / 4)


@each_row(
    ("error", "said"),
    [
        (OSError(32, "Broken pipe"), "Broken pipe"),
        (ConnectionLost("the server is gone"), "the server is gone"),
        (TimeoutError(), "no answer in time"),
        (EOFError(), "EOFError"),
    ],
)
def test_the_reason_is_what_the_error_says(error: Exception, said: str) -> None:
    assert reason(error) == said


def test_what_is_overdue_is_named() -> None:
    error = overdue(URL, "an acknowledgement", "in 5 s")
    assert isinstance(error, DeadlineExceeded)
    assert str(error).startswith(f"{URL} did not send an acknowledgement in 5 s: it may be")


class TestAServerThatCutsOffWhoeverAsks:
    """A request that it cannot read, say, is not sent for ever: nor would a task come for ever."""

    MATCH = (
        r"took \d+ connections, and none brought an answer \(.* closed the connection\): the ser"
    )

    @staticmethod
    def cuts_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Have it do so; return the peers that asked."""
        handle, asked = server._dispatcher.handle, list[int]()

        def refuse(event: Event) -> list[Effect]:
            if isinstance(event, Received):
                asked.append(event.peer)
                server.connections.peers[event.peer].link.fault(ConnectionLost("a bug"))
                return []
            return handle(event)

        monkeypatch.setattr(server._dispatcher, "handle", refuse)
        return asked

    @testing.virtual()
    async def test_it_is_not_besieged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with aiops.serve(policy="asgd") as server:
            asked = self.cuts_off(server, monkeypatch)
            client = await aiops.AsyncClient(server.url, timeout=60.0).connect()
            with pytest.raises(ConnectionLost, match=self.MATCH):
                await client.take_task(ASKED)
            await client.close()
            assert 50 < len(asked) < 100, "in the 60 seconds that connecting again may take"

    def test_a_blocking_client_gives_up_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with ServerThread(policy="asgd") as server, Client(server.url, timeout=0.7) as client:
            asked = server.call(lambda s: self.cuts_off(s, monkeypatch))
            with pytest.raises(ConnectionLost, match=self.MATCH):
                client.take_task(ASKED)
            assert 2 < len(asked) < 20
