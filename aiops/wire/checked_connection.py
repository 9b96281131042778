"""A connection whose every byte is covered by a checksum, which a client asks for.

Such a client's first bytes are `PREAMBLE`. From there on, in both directions, each length of a
header, each header and each payload is followed by its XXH3 (64 bits), as a MessagePack uint64::

    message := ce xxxxxxxx      cf check     length of the header
               map              cf check     the header
               (c6 xxxxxxxx payload  cf check)*

The seed of a check is its number in its direction, from 0: a message that is left out, repeated or
moved is noticed too. A header is read, and a payload's length believed, after its check; a message
is returned after its last one. So a flipped bit never changes what is done: it ends the connection
with `Corrupted`, and a client makes another, on which it asks again.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

from aiops.errors import Corrupted, RemoteProtocolError, UsageError
from aiops.model.parts import Parts
from aiops.wire.connection import Buffer, Connection, Limits, Messages, Places
from aiops.wire.decoding import decode
from aiops.wire.messages import Message
from aiops.wire.sinks import Discard, Sink
from aiops.wire.state_machine import Side

PREAMBLE = b"\xcfchk-xxh3"
"""The first bytes of a client that asks for checks: a MessagePack uint64, as no other client's."""

_PREFIX = struct.Struct(">BI")
_MAP, _BIN = 0xCE, 0xC6
_CHECK = 9  # bytes
_ADDED = 2 * _CHECK  # bytes of a message without payloads


def xxh3(seed: int) -> Any:
    """Return a new XXH3 of 64 bits.

    Raises
    ------
    UsageError
        When the package ``xxhash`` is missing.
    """
    return _maker()(seed=seed)


@functools.cache
def _maker() -> Any:
    try:
        from xxhash import xxh3_64
    except ImportError:
        raise UsageError(
            "checksums need the package xxhash: pip install 'aiops-ps[checksums]'"
        ) from None
    return xxh3_64


def available() -> bool:
    """Return whether checks can be made here."""
    try:
        xxh3(0)
    except UsageError:
        return False
    return True


class CheckedConnection(Connection):
    """A `Connection` with a check behind each item; it has no shared memory and no templates.

    Parameters
    ----------
    side, limits
        As of `Connection`.
    """

    missing: int

    checked = True
    __slots__ = ("_announced", "_hash", "_items_in", "_items_out", "_opening", "_unchecked")

    def __init__(self, side: Side, limits: Limits | None = None) -> None:
        super().__init__(side, limits)
        self._items_in = self._items_out = 0
        self._opening = PREAMBLE  # is to be sent, or read, first
        self._announced = 0  # bytes of the header whose length has been checked
        self._hash: Any = None  # of the payload in progress
        self._unchecked = False  # it has come, and its check has not
        xxh3(0)

    def resume_at(self, items: int) -> None:
        """Read on behind as many items of the peer's, as a test of single messages does."""
        self._items_in, self._opening = items, b"" if items else self._opening

    # ------------------------------------------------------------ sending

    def send(
        self,
        message: Message,
        payloads: Sequence[Sequence[memoryview]] = (),
        places: Places = (),
    ) -> list[Buffer]:
        """Return the buffers to send, as `Connection.send` does, with their checks."""
        plain = super().send(message, payloads, places)[0]
        _mark, length = _PREFIX.unpack_from(plain)
        prefix, header = bytes(plain[:5]), bytes(plain[5 : 5 + length])
        begin, extra = b"", _ADDED
        if self._side == "client":
            begin, self._opening = self._opening, b""
        chunks: list[Buffer] = [
            b"".join((begin, prefix, self._seal(prefix), header, self._seal(header)))
        ]
        parts: Parts = getattr(message, "parts", ())
        nbytes = 0
        for part, views in zip(parts, payloads, strict=bool(parts)):
            chunks += _PREFIX.pack(_BIN, part.nbytes), *views, self._seal(*views)
            extra += _CHECK
            nbytes += part.nbytes
        extra += len(begin)
        self.traffic.bytes_out += extra
        self.traffic.kinds_out[message.kind].overhead += extra
        return [b"".join(chunks)] if nbytes <= self._joined else chunks

    def _seal(self, *views: Buffer) -> bytes:
        """Return the check of the next item that is sent."""
        found = xxh3(self._items_out)
        self._items_out += 1
        for view in views:
            found.update(view)
        return b"\xcf" + bytes(found.digest())

    # ------------------------------------------------------------ receiving

    @property
    def midway(self) -> bool:
        """True while a message has begun to arrive and is not complete."""
        return bool(self._announced) or super().midway

    def received(self, nbytes: int) -> Messages:
        """Read bytes as `Connection.received` does.

        Raises
        ------
        Corrupted
            When a check is wrong.
        RemoteProtocolError
            When the checks are right, and the peer broke the rules.
        """
        self.traffic.bytes_in += nbytes
        if self.missing:
            return self._received_payload(nbytes)
        self._end += nbytes
        if self._message is not None:
            return [] if self.pending is not None else self.fill(self._sink)
        whole: Messages = []
        while self._read_length() and self._message is None:
            length = self._announced
            if not self._has(length + _CHECK):
                room = len(self._head)
                if length + _CHECK > room and 2 * (self._end - self._begin) >= room:
                    self._resize(min(length + room, 2 * room))  # not more than arrived
                break
            header = bytes(self._head[self._begin : self._begin + length])
            self._begin += length
            self._judge(header)
            self._announced = 0
            message = decode(header)
            self._follow(message)
            parts: Parts = getattr(message, "parts", ())
            if len(parts) > self.limits.parts:
                raise RemoteProtocolError(f"{message.kind}.parts: {len(parts)} parts are too many")
            if parts:
                self._message = self.pending = message
                self._parts, self._part, self._length = parts, 0, length + _ADDED
                break
            if message.kind == "share":
                self._map(message)  # type: ignore[arg-type]
            self._count(message.kind, 5 + length + _ADDED, 0)
            whole.append((message, None))
            if len(self._head) > self._usual:
                self._resize(self._usual)
        return whole

    def _has(self, nbytes: int) -> bool:
        return self._end - self._begin >= nbytes

    def _read_length(self) -> bool:
        """Read the length of the next header, if it has come; return whether it is known."""
        if self._side == "server" and self._opening:
            if not self._has(len(PREAMBLE)):
                return False
            if bytes(self._head[self._begin : self._begin + len(PREAMBLE)]) != PREAMBLE:
                raise Corrupted("the first bytes are not those of a client that asks for checks")
            self._begin += len(PREAMBLE)
            self._opening = b""
            self.traffic.kinds_in["hello"].overhead += len(PREAMBLE)
        if not self._announced and self._has(5 + _CHECK):
            prefix = bytes(self._head[self._begin : self._begin + 5])
            self._begin += 5
            self._judge(prefix)
            mark, length = _PREFIX.unpack(prefix)
            if mark != _MAP or not length:
                raise RemoteProtocolError(
                    f"message: a header begins with {_MAP:#04x}, not {mark:#04x}"
                )
            self._check_length(length)
            self._announced = length
        return bool(self._announced)

    def _judge(self, *views: Buffer) -> None:
        """Compare the check that comes next with that of an item."""
        found = self._hash or xxh3(self._items_in)
        self._hash = None
        self._items_in += 1
        for view in views:
            found.update(view)
        check = bytes(self._head[self._begin : self._begin + _CHECK])
        self._begin += _CHECK
        if check != b"\xcf" + found.digest():
            raise Corrupted("a checksum is wrong: bytes were changed on the way")

    def _received_payload(self, nbytes: int) -> Messages:
        """Take note of bytes that were received where they belong."""
        self._hash.update(self._sink.view(self._part, self._filled)[:nbytes])
        self._sink.filled(self._part, self._filled, nbytes)
        self._filled += nbytes
        self.missing -= nbytes
        return [] if self.missing else self.fill(self._sink)

    def fill(self, sink: Sink) -> Messages:
        """Have the payloads of the `pending` message written to a sink, as `Connection.fill`."""
        self._sink, self.pending = sink, None
        parts, count = self._parts, len(self._parts)
        while (index := self._part) < count:
            if self._unchecked:
                if not self._has(_CHECK):
                    return []
                self._judge()
                self._unchecked = False
                self._part += 1
                continue
            if not self._has(5):
                return []
            nbytes = parts[index].nbytes
            if _PREFIX.unpack_from(self._head, self._begin) != (_BIN, nbytes):
                raise Corrupted(f"payload {index} is not announced as its header says")
            self._hash, self._unchecked = xxh3(self._items_in), True
            begin, filled = self._begin + 5, 0
            while filled < nbytes and begin < self._end:  # what was read ahead
                view = sink.view(index, filled)
                several = min(nbytes - filled, self._end - begin, len(view))
                view[:several] = self._head[begin : begin + several]
                self._hash.update(view[:several])
                sink.filled(index, filled, several)
                begin += several
                filled += several
            self._begin, self._filled, self.missing = begin, filled, nbytes - filled
            if self.missing:
                return []
        return self._completed(sink)

    def _completed(self, sink: Sink) -> Messages:
        """Return the message whose payloads have come, and those behind it."""
        message, parts = self._message, self._parts
        assert message is not None, "a message is pending"
        overhead = 5 + self._length + (5 + _CHECK) * len(parts)
        self._count(message.kind, overhead, sum(part.nbytes for part in parts))
        self._message, self._sink, self._parts = None, _NOWHERE, ()
        if len(self._head) > self._usual:
            self._resize(self._usual)
        if self._begin == self._end:
            return [(message, sink)]
        try:
            return [(message, sink), *self.received(0)]
        except RemoteProtocolError:
            sink.abandoned()  # it is not returned: the connection is over
            raise


_NOWHERE = Discard()


def checked_instead(wire: Connection) -> CheckedConnection | None:
    """Return the connection that goes on from a server's whose first byte asks for checks.

    None: it is not the first, or asks for nothing, or the package ``xxhash`` is missing here.
    """
    came = b"" if wire.checked or wire.traffic.messages_in else wire.unread()
    if wire.state != "start" or came[:1] != PREAMBLE[:1] or not available():
        return None
    checked = CheckedConnection("server", wire.limits)
    checked.traffic = wire.traffic
    checked.next_buffer()[: len(came)] = came
    checked.traffic.bytes_in -= len(came)  # they are received again
    return checked
