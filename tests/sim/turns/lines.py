"""A connection of simulated clients over which bytes cross, as they do between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from aiops.client.session import Session, stream
from aiops.sim.turns.memory_wire import MemoryLine, Payloads
from aiops.store.snapshots import Lease
from aiops.wire.connection import Buffer, Connection, Messages, SinkFor, with_sinks
from aiops.wire.messages import Message
from aiops.wire.sinks import Sink


class ByteLine(MemoryLine):
    """Sends every message as bytes.

    ``pieces`` returns how many bytes arrive next; None: all that there are.
    """

    def __init__(self, sink_for: SinkFor, pieces: Callable[[], int] | None = None) -> None:
        self.server, self.sink_for, self.pieces = Connection("server"), sink_for, pieces

    def client(self) -> Connection:
        return stream()

    def send(self, buffers: list[Buffer]) -> Iterator[tuple[Message, Sink | None]]:
        def received(nbytes: int) -> Messages:
            return with_sinks(self.server, self.server.received(nbytes), self.sink_for)

        return iter(pour(self.server, buffers, self.pieces, received))

    def answer(
        self, session: Session, message: Message, payloads: Payloads, lease: Lease | None
    ) -> None:
        self.receive(session, self.server.send(message, payloads))
        if lease is not None:
            lease.release()

    def receive(self, session: Session, buffers: list[Buffer]) -> None:
        """Have the client receive bytes."""
        pour(session, buffers, self.pieces)


def in_pieces(pieces: Callable[[], int]) -> Callable[[SinkFor], ByteLine]:
    """Return what makes connections whose bytes arrive in pieces."""
    return partial(ByteLine, pieces=pieces)


def pour(
    end: Connection | Session,
    buffers: list[Buffer],
    pieces: Callable[[], int] | None = None,
    received: Callable[[int], Messages | None] | None = None,
) -> list[Any]:
    """Deliver buffers to one end; return the messages that it makes of them."""
    made: list[Any] = []
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            room = end.next_buffer()
            count = min(len(room), len(rest))
            if pieces is not None:
                count = min(count, pieces())
            room[:count] = rest[:count]
            rest = rest[count:]
            made += (received or end.received)(count) or ()
    return made
