"""A wire within a process: it keeps a connection's rules and counts, and copies no payload.

A `MemoryWire` sends a `MessageInTransit`: the message itself, and its payloads where they lie. Both
ends follow the same state machine and count the same bytes as over a stream. The server uses a
gradient in the worker's memory, and a worker reads a version of the parameters in the server's
(`aiops.client.params.Leased`), for as long as it needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from aiops.client.session import Session
from aiops.common.frozen import value
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.parts import Parts
from aiops.store.snapshots import Lease
from aiops.wire.connection import Buffer, Connection, Messages, Places, SinkFor, with_sinks
from aiops.wire.messages import Message
from aiops.wire.shared_payloads import LentPayload
from aiops.wire.sinks import Sink, copy
from aiops.wire.state_machine import Side

Payloads = Sequence[Sequence[memoryview]]


@value
class MessageInTransit:
    """One message in transit, with its payloads where they lie.

    Attributes
    ----------
    message
        The message.
    nbytes
        Bytes that it would have on a stream, payloads included.
    payloads
        The views of each of its parts.
    lease
        A lease on the version that they show; the receiver releases it.
    """

    message: Message
    nbytes: int
    payloads: Payloads = ()
    lease: Lease | None = None


class MemoryWire(Connection):
    """One side of a connection within a process.

    Parameters
    ----------
    side
        ``"client"`` or ``"server"``.
    inbox, outbox
        The messages on their way to this side, and from it.
    """

    __slots__ = ("_current", "inbox", "outbox")

    _room = 0  # nothing is read ahead
    _joined = -1  # payloads are not copied

    def __init__(
        self, side: Side, inbox: deque[MessageInTransit], outbox: deque[MessageInTransit]
    ) -> None:
        super().__init__(side)
        self.inbox, self.outbox = inbox, outbox
        self._current: MessageInTransit | None = None  # the one that is pending

    def send(self, message: Message, payloads: Payloads = (), places: Places = ()) -> list[Buffer]:
        """Put a message into the outbox; return an empty list of buffers.

        Raises
        ------
        LocalProtocolError
            When this side may not send that now.
        """
        self.enqueue(message, payloads)
        return []

    def enqueue(
        self, message: Message, payloads: Payloads = (), lease: Lease | None = None
    ) -> None:
        """Put a message into the outbox, with the lease that its payloads need."""
        before = self.traffic.bytes_out
        super().send(message, payloads)
        self.outbox.append(
            MessageInTransit(message, self.traffic.bytes_out - before, payloads, lease)
        )

    def received(self, nbytes: int) -> Messages:
        """Take the next message from the inbox.

        Raises
        ------
        RemoteProtocolError
            When the peer may not send that now.
        """
        entry = self.inbox.popleft()
        message = entry.message
        self.traffic.bytes_in += nbytes
        self._follow(message)
        parts: Parts = getattr(message, "parts", ())
        payload = sum([part.nbytes for part in parts])
        self._count(message.kind, nbytes - payload, payload)
        if not parts:
            return [(message, None)]
        self._current, self.pending = entry, message
        return []

    def fill(self, sink: Sink) -> Messages:
        """Have the sink adopt the payloads of the pending message, or copy them into it."""
        entry = self._current
        assert entry is not None, "a message is pending"
        self._current = self.pending = None
        lease, payloads = entry.lease, entry.payloads
        if len(payloads) == 1 and len(payloads[0]) == 1:  # one piece: the sink may use it in place
            lent: LentPayload
            if lease is not None:
                lent = _LeasedPayload(lease)
            else:
                lent = LentPayload(np.frombuffer(payloads[0][0], np.uint8), lambda: None)
            if sink.adopt(lent):
                return [(entry.message, sink)]
        for number, pieces in enumerate(payloads):
            offset = 0
            for piece in pieces:
                copy(piece, sink, number, offset)
                offset += len(piece)
        if lease is not None:
            lease.release()
        return [(entry.message, sink)]


class MemoryLine:
    """A connection between a client and the server, by which messages are handed over.

    Parameters
    ----------
    sink_for
        Returns the sinks of what the client sends.

    Attributes
    ----------
    server
        The server's end.
    """

    server: Connection

    def __init__(self, sink_for: SinkFor) -> None:
        self._up: deque[MessageInTransit] = deque()
        self._down: deque[MessageInTransit] = deque()
        self.sink_for = sink_for
        self.server = self._wire = MemoryWire("server", self._up, self._down)

    def client(self) -> Connection:
        """Return the client's end."""
        return MemoryWire("client", self._down, self._up)

    def send(self, buffers: list[Buffer]) -> Iterator[tuple[Message, Sink | None]]:
        """Yield the messages that the client has sent, as the server receives them.

        ``buffers``: the bytes of the client's that are to be sent, if it sends any.
        """
        while self._up:
            received = self.server.received(self._up[0].nbytes)
            yield from with_sinks(self.server, received, self.sink_for)

    def answer(
        self, session: Session, message: Message, payloads: Payloads, lease: Lease | None
    ) -> None:
        """Have the client receive a message; ``lease`` is released when it is not needed."""
        self._wire.enqueue(message, payloads, lease)
        session.received(self._down[0].nbytes)


class _LeasedPayload(LentPayload):
    """A whole version of the parameters, in the server's memory."""

    __slots__ = ("_arena",)

    def __init__(self, lease: Lease) -> None:
        self._arena = lease.version.arena
        super().__init__(self._arena.data, lease.release)

    def arena(self, layout: Layout) -> Arena:
        """Return the server's arena, so that readers share its views too."""
        return self._arena
