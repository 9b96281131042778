"""The bytes of an exchange that goes on on another way than the one on which it began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiops.wire.connection import Buffer


class Receiver(Protocol):
    """Takes the bytes of one connection: a session, or the channel to another shard."""

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong."""

    def received(self, nbytes: int) -> None:
        """Process received bytes."""


def process(receiver: Receiver, views: Sequence[memoryview]) -> bool:
    """Process bytes that were received elsewhere; return whether there were any.

    Raises as `Session.received` does.
    """
    for view in views:
        while view:
            room = receiver.next_buffer()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            receiver.received(count)
            view = view[count:]
    return any(map(len, views))


def without(buffers: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """Return buffers without their first ``nbytes``."""
    left: list[Buffer] = []
    for buffer in buffers:
        view = memoryview(buffer)
        gone = min(nbytes, len(view))
        nbytes -= gone
        if gone < len(view):
            left.append(view[gone:])
    return left
