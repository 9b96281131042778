"""Memory for the portions of pushes on a follower, given in the lead's order.

The lead says which push is to be expected next. If each server gave room to whatever came first,
two pushes could each hold the room on one that the other waits for on another, for ever; in the
lead's order the first of all that are under way always has room everywhere. A portion is known by
its client, the epoch of its connections, and the id of its request: the same push that is sent
again on later connections is another one, with room of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aiops.engine.admission import Admission
from aiops.engine.receive import PushSink
from aiops.errors import BadPush, Refused
from aiops.model.parts import Ranges
from aiops.model.placement import moved, ranges_of
from aiops.store.gradient import Gradient
from aiops.wire.messages import ExpectPush, Push, ShardParts
from aiops.wire.sinks import Discard, Sink

_MOST = 4096
"""Portions that may be expected of one client's connection before it has sent any of them."""


@dataclass(slots=True, eq=False)
class ExpectedPortion:
    """One portion, from being expected until it is forgotten."""

    number: int
    key: tuple[str, int, int]  # client, epoch, id of its request
    ranges: Ranges
    reserved: int = 0  # bytes counted for it, until it begins to come
    granted: bool = False
    sink: Sink | None = None
    gradient: Gradient | None = None  # once all of it is there
    fault: Refused | None = None


class ShardBuffers:
    """One follower's rooms.

    Parameters
    ----------
    intake
        Places what comes; its pool bounds it.
    """

    def __init__(self, intake: Admission) -> None:
        self._intake = intake
        intake.pool.given = self._grant
        self._begin = 0  # the first byte of the arena that is held here
        self._by_number: dict[int, ExpectedPortion] = {}
        self._by_key: dict[tuple[str, int, int], ExpectedPortion] = {}
        self._line: deque[ExpectedPortion] = deque()  # without room yet
        self._waiting: list[Callable[[], bool]] = []  # connections whose next portion has no room
        self._discards: dict[tuple[str, int], int] = {}  # by connection: expected to be thrown away

    def begin(self, first: int) -> None:
        """Hear that the model is there, and at which byte of the arena it begins here."""
        self._begin = first
        self._grant()

    # ------------------------------------------------------------ the lead's orders

    def expect(self, order: ExpectPush) -> None:
        """Expect a portion, whose room comes after that of all expected before.

        Raises
        ------
        ValueError
            When a push of that number is expected already, or too many are to be thrown away.
        """
        key = order.client, order.epoch, order.request
        if order.id in self._by_number or key in self._by_key:
            raise ValueError(f"push {order.id} is expected twice")
        room = ExpectedPortion(order.id, key, order.ranges)
        if not order.ranges:
            count = self._discards[key[:2]] = self._discards.get(key[:2], 0) + 1
            if count > _MOST:
                raise ValueError(f"{count} portions of one client are to be thrown away")
            self._by_key[key] = room
        else:
            self._by_number[order.id] = self._by_key[key] = room
            self._line.append(room)
        self._grant()

    def forget(self, number: int, *, keep: bool = False) -> None:
        """Let a push go, whether it has come or not; ``keep``: only the room that it takes."""
        room = self._by_number.get(number)
        if room is None:
            return
        sink = room.sink
        if keep:
            if room.gradient is not None and isinstance(sink, PushSink):
                data = sink.keep().data
                room.gradient = Gradient(data, room.gradient.cover, room.gradient.parts)
                room.sink = None
            self._grant()
            return
        del self._by_number[number]
        if room in self._line:
            self._line.remove(room)
        self._release(room)
        if room.gradient is None:
            room.ranges = ()  # what still comes of it is thrown away
        elif isinstance(sink, PushSink):
            sink.free()
        self._grant()

    def gradient(self, number: int) -> Gradient:
        """Return what has come of a push.

        Raises
        ------
        ValueError
            When not all of it has.
        """
        room = self._by_number.get(number)
        if room is None or room.gradient is None:
            raise ValueError(f"push {number} is to be used, but has not arrived")
        return room.gradient

    # ------------------------------------------------------------ what clients send

    def place(self, client: str, epoch: int, message: ShardParts) -> Sink | None:
        """Return where a portion goes; None: it is not expected yet, or not its turn."""
        room = self._by_key.get((client, epoch, message.id))
        if room is None or not (room.granted or not room.ranges):
            return None
        if not room.ranges:  # not to be used, or forgotten meanwhile
            return Discard()
        self._release(room)
        try:
            sink = self._placed(room, message)
        except Refused as fault:
            sink = Discard(fault)
        room.sink = sink
        self._grant()
        return sink

    def arrived(self, client: str, epoch: int, message: ShardParts) -> ExpectedPortion | None:
        """Take a whole portion; return what the lead is to hear of, or None if nobody waits."""
        room = self._by_key.pop((client, epoch, message.id), None)
        if room is None:
            return None
        self._forget_discards(client, epoch, message.id)
        sink = room.sink
        if room.number not in self._by_number:  # forgotten while it came
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
        """A client's connection is gone; return the pushes of which a portion will not come."""
        missing = []
        for key in [key for key in self._by_key if key[:2] == (client, epoch)]:
            room = self._by_key.pop(key)
            if room in self._line:
                self._line.remove(room)
            self._release(room)
            room.sink = None  # its connection has let it go
            if self._by_number.get(room.number) is room:
                missing.append(room.number)
        self._discards.pop((client, epoch), None)
        self._grant()
        return missing

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it says whether there was."""
        self._waiting.append(again)

    # ------------------------------------------------------------ inside

    def _placed(self, room: ExpectedPortion, message: ShardParts) -> Sink:
        if ranges_of(message.parts) != room.ranges:
            raise BadPush("a portion of the push has other parts than its header said")
        parts = moved(message.parts, -self._begin)
        sink = self._intake.place(Push(message.id, 0, False, -1, parts))
        assert sink is not None, "the room was reserved"
        return sink

    def _grant(self) -> None:
        """Give room to those in line, first come first served; let those who wait for it go on."""
        pool = self._intake.pool
        given = False
        while self._line and self._intake.layout is not None:
            room = self._line[0]
            size = sum(stop - start for start, stop, _version in room.ranges)
            if not pool.reserve(size):
                break
            room.reserved, room.granted, given = size, True, True
            self._line.popleft()
        pool.lacking = len(self._line)
        if self._waiting and (given or self._by_key):
            waiting, self._waiting = self._waiting, []
            self._waiting = [again for again in waiting if not again()] + self._waiting

    def _release(self, room: ExpectedPortion) -> None:
        """Count no longer what was reserved."""
        if room.reserved:
            self._intake.pool.unreserve(room.reserved)
            room.reserved = 0

    def _forget_discards(self, client: str, epoch: int, upto: int) -> None:
        """Portions come in the order of their requests: what was to come before will not."""
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
