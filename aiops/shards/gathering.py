"""Announce pushes to the followers, and hold them back until all of their portions have come.

The engine receives a push when every shard has its portion, so that a bad value on one refuses it
on all. Later messages of its client wait behind it: the messages of one connection are handled in
the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from aiops.common.generations import ordinal
from aiops.engine.admission import Admission
from aiops.engine.events import Order, Received
from aiops.engine.receive import PushSink
from aiops.errors import Refused
from aiops.model.arena import aligned
from aiops.model.layout import Cover
from aiops.model.parts import Part
from aiops.model.placement import Placement, empty_cover, ranges_of
from aiops.store.gradient import Gradient
from aiops.wire.messages import Push
from aiops.wire.server_messages import ExpectPush, FinishPush
from aiops.wire.sinks import Discard, Sink

_GENERATIONS = 1 << 21
"""Starts of which the numbers of pushes differ: the wire's integers have 53 bits."""


class SpreadPush(PushSink):
    """The sink of a push whose portions come to several shards; it receives the lead's.

    Parameters
    ----------
    number
        The number by which orders name the push.
    peer
        The connection that it comes on.
    header, message
        Its header as it came, and with the parts of followers as if they were raw.
    own
        The sink of the lead's portion.
    cover
        The tensors of the whole push.
    missing
        Followers that have not reported their portions, and the bytes of these, if raw.
    since
        The time at which its header came.
    finish
        Called with the order that frees the portions on the followers, or keeps them there without
        counting their room.

    Attributes
    ----------
    arrived
        True once the lead has its portion.
    """

    __slots__ = (
        *("_finish", "_own", "arrived", "header", "message", "missing", "nbytes", "number"),
        *("peer", "since"),
    )

    def __init__(
        self,
        number: int,
        peer: int,
        header: Push,
        message: Push,
        own: PushSink,
        cover: Cover,
        missing: dict[int, int],
        since: float,
        finish: Callable[[FinishPush], None],
    ) -> None:
        self.number, self.peer, self.since = number, peer, since
        self.header, self.message, self.buffer = header, message, own.buffer
        self.missing, self.nbytes = set(missing), sum(missing.values())
        self.cover, self.fault, self.arrived = cover, None, False
        self._own, self._finish = own, finish

    def view(self, part: int, offset: int) -> memoryview:
        """Return the rest of the buffer of the lead's portion from there."""
        return self._own.view(part, offset)

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Survey the lead's portion."""
        self._own.filled(part, offset, nbytes)

    @property
    def largest(self) -> float:
        """The largest magnitude in the lead's portion, or a bound."""
        return self._own.largest

    def has_arrived(self) -> None:
        """Note that the lead has its portion."""
        self.arrived, self.fault = True, self._own.fault or self.fault

    def take(self) -> Gradient:
        """Return the lead's portion, with the push's number, which orders name."""
        return replace(self._own.take(), number=self.number)

    def keep(self) -> Gradient:
        """Return the same, kept on all shards without counting its room there."""
        mine = self._own.keep()
        self._finish(FinishPush(self.number, True))
        done = partial(self._finish, FinishPush(self.number, False))
        return replace(mine, number=self.number, on_drop=done, whole=self.cover)

    def free(self) -> None:
        """Put the buffers back, on all shards."""
        self._own.free()
        self._finish(FinishPush(self.number, False))

    def pin(self) -> bool:
        """Have the lead's portion stay until `unpin`; False: it may not."""
        return self._own.pin()

    def unpin(self) -> None:
        """Put the lead's buffer back if it was freed meanwhile."""
        self._own.unpin()

    def abandoned(self) -> None:
        """Put the lead's buffer back; the others follow when the connection's end is handled."""
        self._own.free()


class Gathering:
    """The pushes of one lead whose portions are still arriving.

    Parameters
    ----------
    placement
        The model's.
    admission
        Makes the sinks of the lead's portions.

    Attributes
    ----------
    finished
        Orders to free portions on the followers. The engine frees a push by a call of its sink,
        which returns no effects; the lead sends these after each event.
    known
        The numbers of the pushes whose portions followers are to have; True: only their gradients
        are kept, and their room is free.
    """

    def __init__(self, placement: Placement, admission: Admission) -> None:
        self._placement, self._admission = placement, admission
        self._numbers = count(1)
        self.known: dict[int, bool] = {}
        self._spread_to: dict[int, frozenset[int]] = {}  # the followers with portions of those
        self._largest: dict[int, dict[int, float]] = {}  # of those, by shard
        self._pushes: dict[int, SpreadPush] = {}  # by number, until they are passed on
        self._queues: dict[int, deque[Received]] = {}  # by connection
        self.finished: list[FinishPush] = []

    # ------------------------------------------------------------ headers

    def sink_for(
        self, peer: int, client: tuple[str, int], message: Push, now: float
    ) -> tuple[Sink | None, list[Order]]:
        """Return the sink of a push, and the orders that announce it; None: no room now."""
        try:
            pieces, cover = self._divided(message)
        except Refused as fault:
            return self.refuse(client, message, fault)
        own = self._own_sink(message, pieces[0])
        if isinstance(own, Discard):
            return self.refuse(client, message, own.fault)
        if not isinstance(own, PushSink):
            return None, []
        # Announced only with room on the lead: so all shards grant room in one order, and two
        # pushes cannot wait for each other.
        push = self._spread(next(self._numbers), peer, message, own, pieces, cover, now)
        self._pushes[push.number] = push
        return push, [
            Order(shard, ExpectPush(push.number, *client, message.id, ranges_of(pieces[shard])))
            for shard in push.missing
        ]

    def again(self, number: int, peer: int, message: Push, now: float) -> SpreadPush:
        """Return the sink of a push that came before, to be filled from a journal.

        Parameters
        ----------
        number, peer
            Its own, and that of the connection on which it came.
        message
            Its header as it came.
        now
            When it was passed on.
        """
        pieces, cover = self._divided(message)
        own = self._own_sink(message, pieces[0])
        assert isinstance(own, PushSink), "the journal has a payload that has no room here"
        push = self._spread(number, peer, message, own, pieces, cover, now)
        push.missing.clear()
        push.arrived = True
        return push

    def keeps(self, gradient: Gradient) -> None:
        """Have a gradient of a snapshot, of which the followers keep their portions."""
        self.known[gradient.number] = True
        gradient.on_drop = partial(self._note_finished, FinishPush(gradient.number, False))

    def _divided(self, message: Push) -> tuple[list[list[Part]], Cover]:
        pieces = self._placement.announced_pieces(message.parts)
        return pieces, self._placement.cover(pieces)

    def _own_sink(self, message: Push, parts: Sequence[Part]) -> Sink | None:
        """Return the sink of the lead's portion; None: no room now."""
        if parts:
            return self._admission.sink_for(replace(message, parts=tuple(parts)))
        return PushSink(aligned(0), [], self._placement.layouts[0], empty_cover(), None, ())

    def _spread(
        self,
        number: int,
        peer: int,
        message: Push,
        own: PushSink,
        pieces: Sequence[Sequence[Part]],
        cover: Cover,
        now: float,
    ) -> SpreadPush:
        missing = {
            shard: sum(part.nbytes for part in theirs)
            for shard, theirs in enumerate(pieces[1:], 1)
            if theirs
        }
        whole = replace(message, parts=tuple(part for theirs in pieces for part in theirs))
        self.known[number], self._spread_to[number] = False, frozenset(missing)
        return SpreadPush(
            number, peer, message, whole, own, cover, missing, now, self._note_finished
        )

    def _note_finished(self, message: FinishPush) -> None:
        if message.keep:
            self.known[message.id] = True
        elif self.known.pop(message.id, None) is None:
            return  # a sink may be freed twice
        else:
            self._spread_to.pop(message.id, None)
            self._largest.pop(message.id, None)
        self.finished.append(message)

    def largest(self, number: int) -> Mapping[int, float]:
        """Return the largest magnitude in each portion of a push, by shard, where it is known."""
        return self._largest.get(number, {})

    def portions(self, number: int) -> frozenset[int]:
        """Return the followers that have portions of a push."""
        return self._spread_to.get(number, frozenset())

    def lacks(self, shard: int, portions: Container[int]) -> bool:
        """Return whether a follower lacks its portion of a push that the engine has."""
        return any(
            shard in self._spread_to.get(number, ()) and number not in portions
            for number in self.known
            if number not in self._pushes
        )

    def begin_numbers(self, generation: int) -> None:
        """Give pushes other numbers from here on than any earlier start of the server has."""
        self._numbers = count((ordinal(generation) % _GENERATIONS << 32) + 1)

    def refuse(
        self, client: tuple[str, int], message: Push, fault: Exception | None
    ) -> tuple[Discard, list[Order]]:
        """Return the sink and the orders that discard a push on all shards."""
        if all(part.nbytes for part in message.parts):  # all of it comes here
            return Discard(fault), []
        expected = ExpectPush(next(self._numbers), *client, message.id, ())
        return Discard(fault), [Order(shard, expected) for shard in self._placement.used[1:]]

    # ------------------------------------------------------------ messages that may be handled now

    def received(self, event: Received) -> list[Received]:
        """Take a message of which all bytes for the lead have come; return those to handle now."""
        if isinstance(event.sink, SpreadPush):
            event.sink.has_arrived()
            self._largest.setdefault(event.sink.number, {})[0] = event.sink.largest
            event = replace(event, message=event.sink.message)
        self._queues.setdefault(event.peer, deque()).append(event)
        return self._pass_on(event.peer)

    def awaits(self, number: int, shard: int) -> bool:
        """Return whether a follower's portion of a push is missing."""
        push = self._pushes.get(number)
        return push is not None and shard in push.missing

    def arrived(
        self, number: int, shard: int, fault: Refused | None, largest: float
    ) -> list[Received]:
        """Note that a follower has its portion of a push, with its fault if it has one.

        ``largest``: the largest magnitude in it.
        """
        push = self._pushes.get(number)
        if push is None:
            return []  # its connection was lost meanwhile
        push.missing.discard(shard)
        self._largest.setdefault(number, {})[shard] = largest
        push.fault = push.fault or fault
        return self._pass_on(push.peer)

    def give_up(self) -> list[Received]:
        """Wait for no more portions: a follower is lost, and the lead refuses what is passed on."""
        for push in self._pushes.values():
            push.missing.clear()
        return [event for peer in list(self._queues) for event in self._pass_on(peer)]

    def _pass_on(self, peer: int) -> list[Received]:
        """Return the messages of a connection up to its first push with missing portions."""
        passed, queue = list[Received](), self._queues.get(peer, deque())
        while queue:
            sink = queue[0].sink
            if isinstance(sink, SpreadPush):
                if sink.missing:
                    return passed
                del self._pushes[sink.number]
            passed.append(queue.popleft())
        self._queues.pop(peer, None)
        return passed

    # ------------------------------------------------------------ connections

    def left(self, peer: int) -> None:
        """Free the pushes and messages of a connection that ended: they will not be passed on."""
        for event in self._queues.pop(peer, ()):
            if event.sink is not None:
                event.sink.abandoned()
        for push in [push for push in self._pushes.values() if push.peer == peer]:
            del self._pushes[push.number]
            push.free()

    def peer_of(self, number: int) -> int | None:
        """Return the connection of a push that has not been passed on, or None."""
        push = self._pushes.get(number)
        return None if push is None else push.peer

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[SpreadPush]:
        """Return pushes whose portions have been missing for longer than ``patience(nbytes)``."""
        return [
            push
            for push in self._pushes.values()
            if push.arrived and push.missing and now - push.since > patience(push.nbytes)
        ]
