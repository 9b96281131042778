"""Sinks: receive the payloads of messages into their final buffers."""

from __future__ import annotations

from aiops.wire.shared_payloads import LentPayload

_PIECE = 256 * 1024  # bytes copied and surveyed at a time


class Sink:
    """Receives the payloads of one message."""

    __slots__ = ()

    def view(self, part: int, offset: int) -> memoryview:
        """Return writable bytes for a part's payload from ``offset`` on; they may be fewer."""
        raise NotImplementedError

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Note that ``nbytes`` bytes from ``offset`` on have been written."""
        raise NotImplementedError

    def abandoned(self) -> None:
        """Let go of everything: the rest will never come, the connection is gone."""
        raise NotImplementedError

    def adopt(self, lent: LentPayload) -> bool:
        """Adopt the message's only payload in place, or return False to have it copied.

        A sink that adopts it gives it back when it needs it no longer.
        """
        return False


class Discard(Sink):
    """A sink that discards payloads: they are received, so that the connection can go on."""

    _scratch = memoryview(bytearray(256 * 1024))

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    def adopt(self, lent: LentPayload) -> bool:
        """Give the payload back unread."""
        lent.give_back()
        return True

    def view(self, part: int, offset: int) -> memoryview:
        """Return scratch bytes that all discarded payloads share."""
        return self._scratch

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: the bytes are discarded."""

    def abandoned(self) -> None:
        """Do nothing: no buffer is held."""


def copy(payload: memoryview, sink: Sink, part: int, offset: int) -> None:
    """Copy bytes of a payload into a sink, in pieces that stay in the cache to be surveyed."""
    begin = 0
    while begin < len(payload):
        room = sink.view(part, offset + begin)[:_PIECE]
        piece = payload[begin : begin + len(room)]
        room[: len(piece)] = piece
        sink.filled(part, offset + begin, len(piece))
        begin += len(piece)
