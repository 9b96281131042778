"""Hand one event after the other to what decides, and have the effects carried out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeAlias

from aiops.compiled.loading import core
from aiops.durable.commit_gate import CommitGate
from aiops.durable.recorder import Recorder
from aiops.engine.events import Effect, Event, JournalEnded
from aiops.engine.steady import ExchangeRecord, Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.net.busy_poll import BusyPoll
from aiops.serving.effects import EffectRunner
from aiops.serving.persistence import Persistence
from aiops.serving.run_state import RunState
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.kept_state import KeptState
from aiops.serving.state.running_journal import RunningJournal
from aiops.state.frames import FixedFrames

ShortWay: TypeAlias = Callable[[int], bytes | memoryview | None]
"""Answers what has come on a connection, given the number of bytes: `EventDispatcher.exchange`."""


class EventDispatcher:
    """The events of one server.

    Parameters
    ----------
    now
        The server's clock.
    failed
        Called with an error of what decides, or of an action: the state may be inconsistent.

    Attributes
    ----------
    handle
        Decides about an event, given also what the record has noted of it if there is a record.
    broken
        Whether no event is handled any more: the parameters cannot be trusted, or are another
        server's to change.
    starting
        Whether the server is not there yet: errors are raised.
    changed
        Set when an event was handled or a connection ended; None: nothing waits for it.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "_handling", "broken")

    handle: Callable[..., Sequence[Effect]]

    def __init__(self, now: Callable[[], float], failed: Callable[[BaseException], None]) -> None:
        self._now, self._failed = now, failed
        self.broken, self.starting = False, True
        self.changed: asyncio.Event | None = None
        self._events: deque[Event] = deque()
        self._handling = False

    def connect(
        self,
        handle: Callable[[Event], Sequence[Effect]],
        runner: EffectRunner,
        persistence: Persistence | None,
        run_state: RunState,
        busy_poll: BusyPoll,
    ) -> None:
        """Give it what decides about events and what carries out effects, before the first event.

        It cannot be made with them: they are made with its `post`.
        """
        self.handle, self._runner = handle, runner
        self._persistence, self._run_state, self._busy_poll = persistence, run_state, busy_poll

    def post(self, event: Event) -> None:
        """Have the engine handle an event, and carry out its effects.

        Effects may post further events at once (an update done on the event loop, a buffer that
        came back and let a waiting peer go on). They queue behind this one.
        """
        if self.broken:
            return
        self._events.append(event)
        if self._handling:
            return
        actions = self._runner.actions
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                files = self._persistence
                if files is None or files.note is None:
                    effects = self.handle(event)
                else:  # there is one server, so `handle` is its engine's
                    effects = self.handle(event, files.note(event))
                for effect in effects:
                    happened = actions[type(effect)](effect)
                    if isinstance(happened, JournalEnded):  # before the answers to this event
                        for other in self.handle(happened):
                            actions[type(other)](other)
                    elif happened is not None:
                        self._events.append(happened)
        except Exception as error:  # a policy's, say: clients would repeat the push that raises it
            if self.starting:
                raise
            self._events.clear()
            self._failed(error)
        finally:
            self._handling = False
        if self.changed is not None:
            self.changed.set()

    def note_change(self) -> None:
        """Let what waits look again: a connection is gone."""
        if self.changed is not None:
            self.changed.set()

    def short_way(self, way: Steady | SteadyRows) -> ShortWay:
        """Return what calls `exchange` with a connection's way, or does the same in one call."""
        exchange = partial(self.exchange, way)
        compiled, library = (way.compiled, core()) if isinstance(way, Steady) else (None, None)
        if compiled is None or library is None:
            return exchange
        _learn(library)
        compiled.connect(
            SimpleNamespace(
                dispatcher=self,
                runner=self._runner,
                run_state=self._run_state,
                persistence=self._persistence,
                busy_poll=self._busy_poll,
                clock=self._now,
                exchange=exchange,
                failed=self._failed,
            )
        )
        return compiled.answer

    def exchange(self, way: Steady | SteadyRows, nbytes: int) -> bytes | memoryview | None:
        """Answer a steady exchange or a message about rows; None: it goes the general way."""
        files, state = self._persistence, self._run_state.kept
        if self._handling or self.broken or way.cost > self._runner.at_once:
            return None
        if state is not None:
            record: ExchangeRecord | None = state.record
        else:
            record = files.exchanges if files is not None else None
        answer: bytes | memoryview | None
        try:
            if isinstance(way, Steady):
                answer = way.exchange(nbytes, self._now(), record)
            elif state is not None or record is not None:  # rows have no row of a record of theirs
                return None
            else:
                answer = way.exchange(nbytes, self._now())
        except Exception as error:
            self._failed(error)
            return b""
        if answer:
            busy_poll = self._busy_poll
            busy_poll.received = True
            if busy_poll.idle:
                busy_poll.begin()
            if state is not None and state.recorder.hold(way.peer, bytes(answer)):
                return b""
        return answer


@cache
def _learn(library: Any) -> None:
    """Have compiled code find the fields that it reads of a server."""
    classes = (
        *(BusyPoll, CommitGate, EffectRunner, EventDispatcher, FixedFrames, JournalWriter),
        *(KeptState, Persistence, Recorder, RunningJournal, RunState),
    )
    library.learn_fields({each.__name__: each for each in classes})
