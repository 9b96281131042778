"""Messages handed over within a process: all of a wire's rules and counts, and none of its copies.

What a `HandedWire` sends is a `Parcel`: the message itself, and its payloads where they lie. Both
ends follow the same table of what may be said when, and count the same bytes, as if a stream had
carried them. A gradient is used where the worker computed it, and a worker reads a version of the
parameters where the server keeps it (`Leased`), for as long as it needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from aiops.common.frozen import value
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.parts import Parts
from aiops.store.snapshots import Lease
from aiops.wire.connection import Buffer, Connection, Places, SinkFor
from aiops.wire.messages import Message
from aiops.wire.shared_payloads import LentPayload
from aiops.wire.sinks import Sink, copy
from aiops.wire.state_machine import Side

Payloads = Sequence[Sequence[memoryview]]


@value
class Parcel:
    """One message on its way.

    Attributes
    ----------
    message
        What is said.
    nbytes
        How many bytes it has on a stream, payloads included.
    payloads
        The views of each of its parts.
    lease
        A hold on the version that they show, the receiver's from here on.
    """

    message: Message
    nbytes: int
    payloads: Payloads = ()
    lease: Lease | None = None


class HandedWire(Connection):
    """One side of a connection within a process.

    What is sent lies in ``outbox``. To have a parcel arrive, put it into ``inbox`` and call
    `received` with its bytes.

    Parameters
    ----------
    side
        ``"client"`` or ``"server"``: which one this is.
    place
        Asked for a sink once per message that has payloads.
    """

    __slots__ = ("inbox", "outbox")

    _room = 0  # nothing is read ahead

    def __init__(self, side: Side, place: SinkFor) -> None:
        super().__init__(side, place)
        self.inbox: deque[Parcel] = deque()
        self.outbox: deque[Parcel] = deque()

    def send(self, message: Message, payloads: Payloads = (), places: Places = ()) -> list[Buffer]:
        """Put a message into the outbox; there is nothing else to be sent.

        Raises
        ------
        LocalProtocolError
            When this side may not say that now.
        """
        self.hand(message, payloads)
        return []

    def hand(self, message: Message, payloads: Payloads = (), lease: Lease | None = None) -> None:
        """Put a message into the outbox, with a hold on what its payloads show."""
        before = self.traffic.bytes_out
        self._say(message)
        self.outbox.append(Parcel(message, self.traffic.bytes_out - before, payloads, lease))

    def received(self, nbytes: int) -> list[tuple[Message, Sink | None]]:
        """Take the next parcel.

        Raises
        ------
        RemoteProtocolError
            When the peer may not say that now.
        """
        parcel = self.inbox.popleft()
        message = parcel.message
        assert nbytes == parcel.nbytes
        self.traffic.bytes_in += nbytes
        self._hear(message)
        parts: Parts = getattr(message, "parts", ())
        payload = 0
        for part in parts:
            payload += part.nbytes
        self._count(message.kind, nbytes - payload, payload)
        return [(message, self._taken(parcel) if parts else None)]

    def _taken(self, parcel: Parcel) -> Sink:
        sink = self.place(parcel.message)
        assert sink is not None, "nobody else has a buffer in memory"
        if self._adopted(sink, parcel):
            return sink
        for number, pieces in enumerate(parcel.payloads):
            offset = 0
            for piece in pieces:
                copy(piece, sink, number, offset)
                offset += len(piece)
        if parcel.lease is not None:
            parcel.lease.release()
        return sink

    @staticmethod
    def _adopted(sink: Sink, parcel: Parcel) -> bool:
        """Offer the payloads as they lie; return whether they are taken."""
        lease, payloads = parcel.lease, parcel.payloads
        if len(payloads) > 1 or len(payloads[0]) > 1:
            return False
        if lease is not None:
            return sink.adopt(_Leased(lease))
        return sink.adopt(LentPayload(np.frombuffer(payloads[0][0], np.uint8), lambda: None))


class _Leased(LentPayload):
    """A whole version, as the server has it."""

    __slots__ = ("_arena",)

    def __init__(self, lease: Lease) -> None:
        self._arena = lease.version.arena
        super().__init__(self._arena.data, lease.release)

    def arena(self, layout: Layout) -> Arena:
        """Return the server's: whoever reads it shares its views too."""
        return self._arena
