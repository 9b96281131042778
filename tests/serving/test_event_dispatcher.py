"""Events in, effects carried out: the order, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aiops.engine.events import Event, JournalEnded, Note, Resumed, Tick
from aiops.serving.event_dispatcher import EventDispatcher


class Given:
    """A dispatcher whose events are decided on by a test, and whose effects are noted."""

    def __init__(self, decide: Callable[[Event], Sequence[Any]] | None = None) -> None:
        self.done = list[str]()
        self.errors = list[BaseException]()
        self.dispatcher = EventDispatcher(lambda: 1.0, self.errors.append)
        self.follows: dict[str, Event | None] = {}  # by an effect's text
        self.noted: Callable[[Event], bool] | None = None
        runner: Any = SimpleNamespace(actions={Note: self.act}, at_once=100.0)
        files: Any = SimpleNamespace(note=None, exchanges=None)
        self.files = files
        self.state: Any = SimpleNamespace(kept=None)
        poll: Any = SimpleNamespace(received=False, idle=False)
        decide = decide or (lambda event: [Note(f"{event.time:g}")])
        self.dispatcher.connect(decide, runner, files, self.state, poll)
        self.post = self.dispatcher.post

    def act(self, effect: Note) -> Event | None:
        self.done.append(effect.text)
        return self.follows.pop(effect.text, None)


def test_an_event_that_follows_from_an_effect_waits_for_the_others() -> None:
    given = Given(lambda event: [Note(f"{event.time:g}a"), Note(f"{event.time:g}b")])
    given.follows["1a"] = Tick(2.0)
    given.post(Tick(1.0))
    assert given.done == ["1a", "1b", "2a", "2b"]


def test_an_event_that_an_action_posts_waits_too() -> None:
    given = Given()

    def decide(event: Event) -> list[Note]:
        if event.time == 1:
            given.post(Tick(2.0))
        return [Note(f"{event.time:g}")]

    given.dispatcher.handle = decide
    given.post(Tick(1.0))
    assert given.done == ["1", "2"]


def test_the_end_of_a_journal_comes_before_the_answers() -> None:
    def decide(event: Event) -> list[Note]:
        ended = isinstance(event, JournalEnded)
        return [Note("ended")] if ended else [Note("write"), Note("answer")]

    given = Given(decide)
    given.follows["write"] = JournalEnded(1.0, "the disk is full")
    given.post(Tick(1.0))
    assert given.done == ["write", "ended", "answer"]


def test_what_a_record_notes_is_given_to_what_decides() -> None:
    given = Given()
    given.files.note = lambda event: event.time > 1
    leased = list[bool]()
    given.dispatcher.handle = lambda event, noted: leased.append(noted) or []
    for time in (1.0, 2.0):
        given.post(Tick(time))
    assert leased == [False, True]


class TestErrors:
    def fails(self) -> Given:
        """Return one that fails on the second event, with a third that waits."""
        given = Given()

        def decide(event: Event) -> list[Note]:
            if event.time == 1:
                given.post(Tick(2.0))
                given.post(Tick(3.0))
            if event.time == 2:
                raise ValueError("a policy's")
            return [Note(f"{event.time:g}")]

        given.dispatcher.handle = decide
        return given

    def test_a_server_that_starts_fails(self) -> None:
        given = self.fails()
        with pytest.raises(ValueError, match="a policy's"):
            given.post(Tick(1.0))
        assert given.errors == []

    def test_a_server_that_serves_ends(self) -> None:
        given = self.fails()
        given.dispatcher.starting = False
        given.post(Tick(1.0))
        assert [str(error) for error in given.errors] == ["a policy's"]
        assert given.done == ["1"], "what waited is not handled"

    def test_a_server_that_is_broken_handles_nothing(self) -> None:
        given = Given()
        given.dispatcher.broken = True
        given.post(Tick(1.0))
        assert given.done == []


async def test_what_waits_is_told_of_each_change() -> None:
    given = Given()
    given.post(Tick(1.0))
    for change in (given.dispatcher.note_change, lambda: given.post(Resumed(1.0, 2))):
        given.dispatcher.changed = changed = asyncio.Event()
        change()
        assert changed.is_set()


class Way:
    """A short way that answers; not a `Steady`, so it has no record."""

    cost, peer = 10, 7

    def __init__(self, answer: bytes | None = b"answer") -> None:
        self.answer = answer

    def exchange(self, nbytes: int, now: float) -> bytes | None:
        if self.answer == b"raise":
            raise ValueError("a kernel's")
        return self.answer


class TestShortWay:
    def exchange(self, given: Given, way: Any) -> Any:
        return given.dispatcher.exchange(way, 5)

    def test_it_answers_at_once_and_the_poll_is_told(self) -> None:
        given = Given()
        assert self.exchange(given, Way()) == b"answer"
        assert given.dispatcher._busy_poll.received

    def test_not_amid_an_event(self) -> None:
        given, found = Given(), list[Any]()
        given.dispatcher.handle = lambda event: found.append(self.exchange(given, Way())) or []
        given.post(Tick(1.0))
        assert found == [None]

    def test_not_on_the_loop_if_it_takes_long(self) -> None:
        given, way = Given(), Way()
        way.cost = 101
        assert self.exchange(given, way) is None

    def test_not_on_a_server_that_is_broken(self) -> None:
        given = Given()
        given.dispatcher.broken = True
        assert self.exchange(given, Way()) is None

    def test_rows_are_not_recorded_on_it(self) -> None:
        given = Given()
        given.files.exchanges = object()
        assert self.exchange(given, Way()) is None

    def test_an_error_ends_the_server(self) -> None:
        given = Given()
        assert self.exchange(given, Way(b"raise")) == b""
        assert [str(error) for error in given.errors] == ["a kernel's"]
