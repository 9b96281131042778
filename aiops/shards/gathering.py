"""Hold pushes back until all of their portions have come to their shards.

The engine receives a push when every shard has its portion, so that a bad value on one refuses it
on all. Later messages of its client wait behind it: the messages of one connection are handled in
the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from aiops.engine.events import Received
from aiops.engine.receive import PushSink
from aiops.errors import Refused
from aiops.model.layout import Bytes, Cover
from aiops.model.parts import Part
from aiops.store.gradient import Gradient
from aiops.wire.sinks import Discard, Sink


class Nothing(Sink):
    """The sink of a push that has no bytes on the lead."""

    fault = None

    def view(self, part: int, offset: int) -> memoryview:
        """No bytes come."""
        raise AssertionError("nothing comes here")

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """No bytes come."""

    def abandoned(self) -> None:
        """Nothing is held."""


@dataclass(slots=True, eq=False)
class Coming:
    """A push whose portions are still arriving."""

    number: int
    peer: int
    sink: PushSink | Nothing | Discard  # of the lead's portion
    cover: Cover | None  # of the whole push; None: it has been refused
    missing: set[int]  # followers that have not reported their portions
    since: float
    nbytes: int  # of the followers' portions, if raw
    pieces: Sequence[Sequence[Part]]  # the parts on each shard (those of followers as if raw)
    event: Received | None = None  # once the lead has its portion
    fault: Refused | None = None

    @property
    def complete(self) -> bool:
        """True if all portions have come, or if the push was refused and the lead's has."""
        return self.event is not None and (not self.missing or self.cover is None)


Passed: TypeAlias = tuple[Received, Coming | None]
"""A message that the engine may handle now; for a push, also its portions."""


class Gathered(PushSink):
    """The sink of a push that has come to all shards.

    Parameters
    ----------
    coming
        The push.
    nothing
        The gradient of a push that has no bytes on the lead.
    forget
        Called with False to free the portions on the followers, with True to keep them there
        without counting their room.
    """

    __slots__ = ("_forget", "_nothing", "_own", "number")

    def __init__(self, coming: Coming, nothing: Gradient, forget: Callable[[bool], None]) -> None:
        assert coming.cover is not None
        own = coming.sink
        self._own = own if isinstance(own, PushSink) else None
        self.cover, self.number = coming.cover, coming.number
        self.fault = coming.fault
        if self._own is not None and self._own.fault is not None:
            self.fault = self._own.fault
        self._nothing, self._forget = nothing, forget
        self._borrowed, self._pool = False, None

    @property
    def data(self) -> Bytes:
        """The bytes of the lead's portion."""
        return self.take().data

    def take(self) -> Gradient:
        """Return the lead's portion, with the push's number, which orders name."""
        mine = self._own.take() if self._own is not None else self._nothing
        return replace(mine, number=self.number)

    def keep(self) -> Gradient:
        """Return the same, kept on all shards without counting its room there."""
        mine = self._own.keep() if self._own is not None else self._nothing
        self._forget(True)
        done = partial(self._forget, False)
        return replace(mine, number=self.number, on_drop=done, whole=self.cover)

    def free(self) -> None:
        """Put the buffers back, on all shards."""
        if self._own is not None:
            self._own.free()
        self._forget(False)


class Gathering:
    """The pushes of one lead whose portions are still arriving.

    Its methods return the messages that the engine may handle now, in order, and for each push its
    `Coming`.
    """

    def __init__(self) -> None:
        self._by_sink: dict[int, Coming] = {}  # those whose portion on the lead is still arriving
        self._by_number: dict[int, Coming] = {}
        self._queues: dict[int, deque[Passed]] = {}

    def begin(self, coming: Coming) -> None:
        """Add a push whose header has come."""
        self._by_sink[id(coming.sink)] = coming
        self._by_number[coming.number] = coming

    def received(self, event: Received) -> list[Passed]:
        """Take a message of which all bytes for the lead have come; pass it on, or queue it."""
        coming = self._by_sink.pop(id(event.sink), None) if event.sink is not None else None
        if coming is not None:
            coming.event = event
        queue = self._queues.get(event.peer)
        if queue is None and (coming is None or coming.complete):
            return [self._passed(event, coming)]
        if queue is None:
            queue = self._queues[event.peer] = deque()
        queue.append((event, coming))
        return []

    def arrived(self, number: int, shard: int, fault: Refused | None) -> list[Passed]:
        """Note that a follower has its portion of a push, with its fault if it has one."""
        coming = self._by_number.get(number)
        if coming is None:
            return []  # its connection was lost meanwhile
        coming.missing.discard(shard)
        coming.fault = coming.fault or fault
        return self._drain(coming.peer)

    def peer_of(self, number: int) -> int | None:
        """Return the connection of a push that has not been passed on, or None."""
        coming = self._by_number.get(number)
        return None if coming is None else coming.peer

    def left(self, peer: int) -> list[Coming]:
        """Remove a connection that ended; return its pushes, which will not be passed on."""
        self._queues.pop(peer, None)
        gone = [coming for coming in self._by_number.values() if coming.peer == peer]
        for coming in gone:
            self._by_number.pop(coming.number, None)
            self._by_sink.pop(id(coming.sink), None)
        return gone

    def despair(self) -> list[Passed]:
        """Wait for no more portions: a follower is lost, and the lead refuses what is passed on."""
        passed: list[Passed] = []
        for coming in list(self._by_number.values()):
            coming.missing.clear()
            passed += self._drain(coming.peer)
        return passed

    def overdue(self, now: float, patience: Callable[[int], float]) -> Sequence[Coming]:
        """Return pushes whose portions have been missing for longer than ``patience(nbytes)``."""
        return [
            coming
            for coming in self._by_number.values()
            if coming.event is not None
            and coming.missing
            and now - coming.since > patience(coming.nbytes)
        ]

    def _drain(self, peer: int) -> list[Passed]:
        passed, queue = list[Passed](), self._queues.get(peer)
        while queue and (queue[0][1] is None or queue[0][1].complete):
            passed.append(self._passed(*queue.popleft()))
        if queue is not None and not queue:
            del self._queues[peer]
        return passed

    def _passed(self, event: Received, coming: Coming | None) -> Passed:
        if coming is not None:
            self._by_number.pop(coming.number, None)
        return event, coming
