"""Grant room for the portions of pushes on a follower, in the lead's order.

The lead announces each push. If each shard granted room to the portion that arrives first, two
pushes could each hold the room on one shard that the other waits for on another, for ever. In the
lead's order the oldest push under way always has room on all shards. A portion is identified by its
client, the epoch of its connections, and the id of its request: a push that is repeated on later
connections is another portion, with room of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aiops.engine.admission import Admission
from aiops.engine.receive import PushSink
from aiops.errors import BadPush, Refused
from aiops.model.layout import Layout
from aiops.model.parts import Parts, Ranges
from aiops.model.placement import moved, ranges_of
from aiops.store.gradient import Gradient
from aiops.wire.messages import Push
from aiops.wire.server_messages import ExpectPush, ShardParts
from aiops.wire.sinks import Discard, Sink

_MOST = 4096
"""The most portions to be discarded that one client's connection may have outstanding."""


@dataclass(slots=True, eq=False)
class ExpectedPortion:
    """One portion, from its announcement until it is freed."""

    number: int
    key: tuple[str, int, int]  # client, epoch, id of its request
    ranges: Ranges
    reserved: int = 0  # bytes counted for it, until its header comes
    granted: bool = False
    sink: Sink | None = None
    gradient: Gradient | None = None  # once all of it is there
    fault: Refused | None = None
    parts: Parts = ()  # its own, once they are known
    row: int = 0  # of the journal, if that has it
    kept: bool = False  # its gradient alone, whose room is free

    @property
    def largest(self) -> float:
        """The largest magnitude in it, or a bound, once all of it is there and has no fault."""
        if self.fault is not None or not isinstance(self.sink, PushSink):
            return 0.0
        return self.sink.largest


class ShardBuffers:
    """The portions of one follower, and the room that they take.

    Parameters
    ----------
    admission
        It makes the sinks; its pool bounds the bytes.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        admission.pool.given = self._grant
        self._begin = 0  # the first byte of the arena that is held here
        self._by_number: dict[int, ExpectedPortion] = {}
        self._by_key: dict[tuple[str, int, int], ExpectedPortion] = {}
        self._line: deque[ExpectedPortion] = deque()  # no room granted yet
        self._waiting: list[Callable[[], bool]] = []  # connections whose next portion has no room
        self._discards: dict[tuple[str, int], int] = {}  # by connection: portions to be discarded

    def begin(self, layout: Layout) -> None:
        """Begin to grant room: the model has come, and this is the part that is held here."""
        self._admission.defined(layout)
        self._begin = layout.begin
        self._grant()

    # ------------------------------------------------------------ the lead's orders

    def expect(self, order: ExpectPush) -> str:
        """Expect a portion; it gets room after all that were expected before it.

        Returns
        -------
        str
            How the client broke the rules, so that it is not expected; else empty.

        Raises
        ------
        ValueError
            When the lead broke them: a push of this number is expected already.
        """
        key = order.client, order.epoch, order.request
        if order.id in self._by_number:
            raise ValueError(f"push {order.id} is expected twice")
        if key in self._by_key:
            return f"it gave two pushes the id {order.request}"
        room = ExpectedPortion(order.id, key, order.ranges)
        if not room.ranges:
            count = self._discards.get(key[:2], 0) + 1
            if count > _MOST:
                return f"{count} portions of its pushes, which were refused, have not come"
            self._discards[key[:2]] = count
            self._by_key[key] = room
        else:
            self._by_number[order.id] = self._by_key[key] = room
            self._line.append(room)
        self._grant()
        return ""

    def forget(self, number: int, *, keep: bool = False) -> None:
        """Free a portion, complete or not; ``keep``: free only its room, and keep its bytes."""
        room = self._by_number.get(number)
        if room is None:
            return
        sink = room.sink
        if keep:
            if room.gradient is not None and isinstance(sink, PushSink):
                data = sink.keep().data
                room.gradient = Gradient(data, room.gradient.cover, room.gradient.parts)
                room.sink, room.kept = None, True
            self._grant()
            return
        del self._by_number[number]
        if room in self._line:
            self._line.remove(room)
        self._release(room)
        if room.gradient is None:
            room.ranges = ()  # `sink_for` discards the rest of it
        elif isinstance(sink, PushSink):
            sink.free()
        self._grant()

    def gradient(self, number: int) -> Gradient:
        """Return the gradient in a portion.

        Raises
        ------
        ValueError
            When it is not complete.
        """
        room = self._by_number.get(number)
        if room is None or room.gradient is None:
            raise ValueError(f"push {number} is to be used, but has not arrived")
        return room.gradient

    def largest(self, number: int) -> float | None:
        """Return the largest magnitude in a complete portion; None: only a bound is known."""
        room = self._by_number[number]
        coded = room.gradient is None or room.gradient.parts or room.kept
        return None if coded else room.largest

    # ------------------------------------------------------------ a lead that comes back

    @property
    def complete(self) -> list[int]:
        """The numbers of the pushes whose portions are here."""
        return sorted(n for n, room in self._by_number.items() if room.gradient is not None)

    def forget_incomplete(self) -> None:
        """Forget what is expected: the lead is lost, and with it the connections of its clients."""
        self._by_key.clear()
        self._discards.clear()
        for number in [n for n, room in self._by_number.items() if room.gradient is None]:
            self.forget(number)

    def awaited(self, client: str, epoch: int, message: ShardParts) -> ExpectedPortion | None:
        """Return the portion that a message completes, if it can be used and is waited for."""
        room = self._by_key.get((client, epoch, message.id))
        if room is None or room.number not in self._by_number:
            return None
        return room if isinstance(room.sink, PushSink) and room.sink.fault is None else None

    @property
    def usable(self) -> list[ExpectedPortion]:
        """The portions that are complete, and have no fault."""
        return [
            room
            for _number, room in sorted(self._by_number.items())
            if room.gradient is not None and room.fault is None
        ]

    def restore(self, number: int, parts: Parts, payload: memoryview, row: int = 0) -> None:
        """Have a complete portion again, from a row of a journal, or from a snapshot.

        Raises
        ------
        ValueError
            When it is no portion of this model.
        """
        mine = moved(parts, -self._begin)
        sink = self._admission.sink_for(Push(number, 0, False, -1, mine))
        if not isinstance(sink, PushSink):
            raise ValueError(f"push {number} is of another model")
        sink.view(0, 0)[:] = payload
        sink.filled(0, 0, len(payload))
        room = ExpectedPortion(number, ("", 0, number), ranges_of(parts), granted=True, sink=sink)
        room.gradient, room.parts, room.row = sink.take(), parts, row
        self._by_number[number] = room

    # ------------------------------------------------------------ portions

    def sink_for(self, client: str, epoch: int, message: ShardParts) -> Sink | None:
        """Return the sink of a portion; None: it is not expected yet, or has no room yet."""
        room = self._by_key.get((client, epoch, message.id))
        if room is None or not (room.granted or not room.ranges):
            return None
        if not room.ranges:  # refused, or freed meanwhile
            return Discard()
        self._release(room)
        if ranges_of(message.parts) != room.ranges:
            sink: Sink | None = Discard(
                BadPush("a portion of the push has other parts than its header said")
            )
        else:
            parts = moved(message.parts, -self._begin)
            sink = self._admission.sink_for(Push(message.id, 0, False, -1, parts))
        room.sink, room.parts = sink, message.parts
        self._grant()
        return sink

    def arrived(self, client: str, epoch: int, message: ShardParts) -> ExpectedPortion | None:
        """Take a complete portion; return it if the lead waits for it, else None."""
        room = self._by_key.pop((client, epoch, message.id), None)
        if room is None:
            return None
        self._forget_discards(client, epoch, message.id)
        sink = room.sink
        if room.number not in self._by_number:  # freed while it came
            if isinstance(sink, PushSink):
                sink.free()
                self._grant()
            return None
        if isinstance(sink, PushSink):
            room.fault, room.gradient = sink.fault, sink.take()
        else:
            fault = sink.fault if isinstance(sink, Discard) else None
            room.fault = fault if isinstance(fault, Refused) else BadPush("a portion was empty")
        return room

    def left(self, client: str, epoch: int) -> list[int]:
        """Remove a connection that ended; return the pushes whose portions will not come."""
        missing = []
        for key in [key for key in self._by_key if key[:2] == (client, epoch)]:
            room = self._by_key.pop(key)
            if room in self._line:
                self._line.remove(room)
            self._release(room)
            room.sink = None  # the connection has freed it by `abandoned`
            if self._by_number.get(room.number) is room:
                missing.append(room.number)
        self._discards.pop((client, epoch), None)
        self._grant()
        return missing

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it returns whether there was."""
        self._waiting.append(again)

    # ------------------------------------------------------------ inside

    def _grant(self) -> None:
        """Grant room, first come first served, and let the connections that wait for it go on."""
        pool = self._admission.pool
        given = False
        while self._line and self._admission.layout is not None:
            room = self._line[0]
            size = sum(stop - start for start, stop, _version in room.ranges)
            if not pool.reserve(size):
                break
            room.reserved, room.granted, given = size, True, True
            self._line.popleft()
        pool.waiting_for_shards = len(self._line)
        if self._waiting and (given or self._by_key):
            waiting, self._waiting = self._waiting, []
            self._waiting = [again for again in waiting if not again()] + self._waiting

    def _release(self, room: ExpectedPortion) -> None:
        """Undo the reservation of a portion."""
        if room.reserved:
            self._admission.pool.unreserve(room.reserved)
            room.reserved = 0

    def _forget_discards(self, client: str, epoch: int, upto: int) -> None:
        """Drop earlier discards: portions come in the order of their requests, so they will not."""
        count = self._discards.get((client, epoch))
        if not count:
            return
        old = [
            key
            for key, room in self._by_key.items()
            if key[:2] == (client, epoch) and key[2] < upto and not room.ranges
        ]
        for key in old:
            del self._by_key[key]
        self._discards[client, epoch] = max(0, count - len(old))
