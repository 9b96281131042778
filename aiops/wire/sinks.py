"""Sinks: where the payloads of messages go, as they come."""

from __future__ import annotations

from aiops.wire.shared_payloads import LentPayload

_PIECE = 256 * 1024  # copied and surveyed at a time


class Sink:
    """The place where the payloads of one message are received."""

    __slots__ = ()

    def view(self, part: int, offset: int) -> memoryview:
        """Return writable bytes for the payload of a part from ``offset`` on (not all, perhaps)."""
        raise NotImplementedError

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Say that ``nbytes`` bytes from ``offset`` on have been written."""
        raise NotImplementedError

    def abandoned(self) -> None:
        """Say that the rest will never come: the connection is gone."""
        raise NotImplementedError

    def adopt(self, lent: LentPayload) -> bool:
        """Be offered the message's only payload as it lies; return whether it is not to be copied.

        A sink that takes it gives it back when it is done with it.
        """
        return False


class Discard(Sink):
    """A sink whose payloads are discarded: they are read, so that the connection can go on."""

    _scratch = memoryview(bytearray(256 * 1024))

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    def adopt(self, lent: LentPayload) -> bool:
        """Do without reading it."""
        lent.give_back()
        return True

    def view(self, part: int, offset: int) -> memoryview:
        """Return the scratch bytes that every discarded payload shares."""
        return self._scratch

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Forget them."""

    def abandoned(self) -> None:
        """Nothing is held."""


def copy(payload: memoryview, sink: Sink, part: int, offset: int) -> None:
    """Copy bytes of a payload to where they belong, in pieces that stay in the cache meanwhile."""
    begin = 0
    while begin < len(payload):
        room = sink.view(part, offset + begin)[:_PIECE]
        piece = payload[begin : begin + len(room)]
        room[: len(piece)] = piece
        sink.filled(part, offset + begin, len(piece))
        begin += len(piece)
