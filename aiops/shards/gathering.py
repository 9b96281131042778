"""Pushes that are on their way to several shards: each is held back until all of it is there.

The engine hears of a push when every shard has its portion, so that a bad value anywhere refuses it
everywhere. Whatever else its client says meanwhile waits behind it: what comes by one connection is
heard in the order in which it was said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from aiops.engine.events import Received
from aiops.engine.receive import PushSink
from aiops.errors import Refused
from aiops.model.layout import Bytes, Cover
from aiops.model.parts import Part
from aiops.store.gradient import Gradient
from aiops.wire.sinks import Discard, Sink


class Nothing(Sink):
    """The sink of a push of which nothing lies here."""

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
    """One push that is on its way."""

    number: int
    peer: int
    sink: PushSink | Nothing | Discard  # of the portion that is the lead's
    cover: Cover | None  # of the whole push; None: it is refused already
    missing: set[int]  # followers that have not said that their portions are there
    since: float
    nbytes: int  # of the followers' portions, if raw
    pieces: Sequence[Sequence[Part]]  # what lies on each shard (elsewhere as if raw)
    event: Received | None = None  # once the lead has its portion
    fault: Refused | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self.event is not None and (not self.missing or self.cover is None)


class Gathered(PushSink):
    """The sink of a push that is there on all shards.

    Parameters
    ----------
    coming
        The push.
    nothing
        The cover of what is held here if that is none of it.
    forget
        Called when its portions are done with; or (True) are to be kept, and their room is not.
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
        """What of it is held here."""
        return self.take().data

    def take(self) -> Gradient:
        """Return what of it is held here."""
        mine = self._own.take() if self._own is not None else self._nothing
        return replace(mine, number=self.number)

    def keep(self) -> Gradient:
        """Return the same; it stays, and takes no room on any shard from here on."""
        mine = self._own.keep() if self._own is not None else self._nothing
        self._forget(True)
        done = partial(self._forget, False)
        return replace(mine, number=self.number, let_go=done, whole=self.cover)

    def free(self) -> None:
        """Put the buffers back, on all shards."""
        if self._own is not None:
            self._own.free()
        self._forget(False)


class Gathering:
    """All pushes of one lead that are on their way.

    Parameters
    ----------
    ready
        Told what the engine is to hear, in order; with the push that it is, if it is one.
    """

    def __init__(self, ready: Callable[[Received, Coming | None], None]) -> None:
        self._ready = ready
        self._by_sink: dict[int, Coming] = {}  # those of which the lead's portion is coming
        self._by_number: dict[int, Coming] = {}
        self._queues: dict[int, deque[tuple[Received, Coming | None]]] = {}

    def begin(self, coming: Coming) -> None:
        """A push begins to come."""
        self._by_sink[id(coming.sink)] = coming
        self._by_number[coming.number] = coming

    def received(self, event: Received) -> None:
        """A message is there as a whole, as far as it comes to the lead."""
        coming = self._by_sink.pop(id(event.sink), None) if event.sink is not None else None
        if coming is not None:
            coming.event = event
        queue = self._queues.get(event.peer)
        if queue is None and (coming is None or coming.complete):
            self._pass(event, coming)
            return
        if queue is None:
            queue = self._queues[event.peer] = deque()
        queue.append((event, coming))

    def arrived(self, number: int, shard: int, fault: Refused | None) -> None:
        """A follower has its portion of a push."""
        coming = self._by_number.get(number)
        if coming is None:
            return  # it has been forgotten meanwhile
        coming.missing.discard(shard)
        coming.fault = coming.fault or fault
        self._drain(coming.peer)

    def peer_of(self, number: int) -> int | None:
        """Return by which connection a push comes that has not been heard yet."""
        coming = self._by_number.get(number)
        return None if coming is None else coming.peer

    def left(self, peer: int) -> list[Coming]:
        """A client's connection is gone; return its pushes that will not be heard of."""
        self._queues.pop(peer, None)
        gone = [coming for coming in self._by_number.values() if coming.peer == peer]
        for coming in gone:
            self._by_number.pop(coming.number, None)
            self._by_sink.pop(id(coming.sink), None)
        return gone

    def despair(self) -> None:
        """Wait for no portion any more: a follower is gone, and whoever hears a push refuses it."""
        for coming in list(self._by_number.values()):
            coming.missing.clear()
            self._drain(coming.peer)

    def overdue(self, now: float, patience: Callable[[int], float]) -> Sequence[Coming]:
        """Return pushes whose portions have been missing for longer than ``patience(nbytes)``."""
        return [
            coming
            for coming in self._by_number.values()
            if coming.event is not None
            and coming.missing
            and now - coming.since > patience(coming.nbytes)
        ]

    def _drain(self, peer: int) -> None:
        queue = self._queues.get(peer)
        while queue and (queue[0][1] is None or queue[0][1].complete):
            self._pass(*queue.popleft())
        if queue is not None and not queue and self._queues.get(peer) is queue:
            del self._queues[peer]

    def _pass(self, event: Received, coming: Coming | None) -> None:
        if coming is not None:
            self._by_number.pop(coming.number, None)
        self._ready(event, coming)
