"""The wire, sans-I/O: bytes in, messages out, and the other way round.

A driver (asyncio or blocking, it makes no difference) does only this::

    n = recv_into(wire.next_buffer())        # straight into the payload's final buffer
    for message, sink in wire.received(n):   # whole messages, payloads already in place
        ...
    send(wire.send(message, payloads))       # buffers for writelines or sendmsg, nothing joined

Where a payload is to be received is asked of ``place(message) -> Sink | None`` as soon as its
header is complete, before anything is allocated. ``None`` means "no room now": the wire then is
`waiting`, the driver stops reading that peer, and calls `resume` when there may be room.

Which message is legal when is the table `aiops.wire.state_machine.HANDSHAKE`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from aiops.errors import LocalProtocolError, RemoteProtocolError
from aiops.model.layout import Bytes
from aiops.model.parts import Parts
from aiops.wire import messages
from aiops.wire.decoding import decode
from aiops.wire.messages import Message, Share
from aiops.wire.shared_payloads import LentPayload, SharedPayloads
from aiops.wire.sinks import Sink, copy
from aiops.wire.state_machine import HANDSHAKE, KNOWN, Side
from aiops.wire.template import Template
from aiops.wire.traffic import Traffic

Buffer: TypeAlias = bytes | memoryview

SMALL = 64 * 1024
"""Payloads of at most so many bytes in all are sent in one buffer with their header, as a copy."""

_HEAD = 16 * 1024  # what is read ahead of a header; a payload's first bytes may fall in it
_SHORT = 4096  # bytes: the longest header that is kept to be learnt from
_LINE = 64  # bytes of a processor's cache line
_PREFIX = struct.Struct(">BI")
_MAP_PREFIX, _BIN_PREFIX = 0xCE, 0xC6
_PLACE = struct.Struct(">BIBQBQ")  # a list of two integers, each in its longest form
_PLACE_PREFIX, _INTEGER_PREFIX = 0xDD, 0xCF


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may announce; checked before anything is allocated."""

    header: int = 4 << 20
    greeting: int = 4 << 10  # the same, before the handshake is done
    parts: int = 1 << 16


SinkFor: TypeAlias = Callable[[Message], "Sink | None"]
Places: TypeAlias = Sequence[tuple[int, int] | None]
"""For each payload: the number of a segment and an offset in it, or None if it is sent."""


class Connection:
    """One connection, seen from one side.

    Parameters
    ----------
    side
        ``"client"`` or ``"server"``: which one this is.
    place
        Asked for a sink once per message that has payloads.
    limits
        What the peer may announce.

    Attributes
    ----------
    shared
        What both sides have shown each other, on a connection within one machine; else None.
    header
        The bytes of the header read last, if they are few.
    expected
        The form of the messages that `match` looks for, if `expect` has been told one.
    forms
        How many it has been told.
    """

    __slots__ = (
        *("_begin", "_borrowed", "_end", "_filled", "_head", "_inside", "_length", "_message"),
        *("_part", "_parts", "_rest", "_usual", "_usually", "_whole"),
        *("_side", "_sink", "expected", "forms", "header", "limits", "place", "shared"),
        *("state", "traffic", "waiting"),
    )

    _room = _HEAD

    def __init__(self, side: Side, place: SinkFor, limits: Limits | None = None) -> None:
        self._side: Side = side
        self._usually = _USUAL["client" if side == "server" else "server"]
        self.place = place
        self.limits = limits or Limits()
        self.state = "start"
        self.traffic = Traffic()
        self.waiting = False
        self._head = memoryview(bytearray(self._room))
        self._begin = self._end = 0  # the bytes of _head that are not read yet
        self._rest = 0  # where they begin when there are none
        self._usual = self._room  # bytes of _head, unless a long header is being read
        self.header = b""
        self.expected: Template | None = None
        self._whole = 0  # bytes of a message as it is expected, with its payload
        self.forms = 0
        self._message: Message | None = None
        self._length = 0  # of its header, in bytes
        self._parts: Parts = ()
        self._sink: Sink | None = None
        self._part = self._filled = 0  # which payload is being received, and how much is there
        self._inside = False  # its prefix has been read
        self.shared: SharedPayloads | None = None
        self._borrowed = False  # payloads of this message were copied from where they are lent

    # ------------------------------------------------------------ sending

    def send(
        self,
        message: Message,
        payloads: Sequence[Sequence[memoryview]] = (),
        places: Places = (),
    ) -> list[Buffer]:
        """Return the buffers to send, in order; ``payloads`` holds the views of each part.

        A payload that has a place in ``places`` is lent and not sent. It counts as if it were.

        Raises
        ------
        LocalProtocolError
            When this side may not say that now.
        """
        header = self._say(message)
        prefix = _PREFIX.pack(_MAP_PREFIX, len(header))
        parts: Parts = getattr(message, "parts", ())
        if not parts:
            return [prefix + header]
        chunks: list[Buffer] = [prefix, header]
        total = 0
        for number, (part, views) in enumerate(zip(parts, payloads, strict=True)):
            place = places[number] if places else None
            if place is not None:
                total += _PLACE.size
                chunks.append(_packed(*place))
                continue
            total += part.nbytes
            chunks.append(_PREFIX.pack(_BIN_PREFIX, part.nbytes))
            chunks += views
        if total <= SMALL:
            return [b"".join(chunks)]
        chunks[:3] = [b"".join(chunks[:3])]
        return chunks

    def _say(self, message: Message) -> bytes:
        """Take note of a message that is sent, with its payloads; return its header."""
        kind = message.kind
        following = HANDSHAKE[self.state][self._side].get(kind)
        if following is None:
            raise LocalProtocolError(f"a {self._side} may not send {kind!r} when {self.state!r}")
        if kind == "error" and message.fatal:  # type: ignore[attr-defined]
            following = "closed"
        self.state = following
        header = messages.encode(message)
        parts: Parts = getattr(message, "parts", ())
        traffic = self.traffic
        counted = traffic.kinds_out[kind]
        traffic.messages_out += 1
        counted.messages += 1
        overhead = 5 + len(header) + 5 * len(parts)
        counted.overhead += overhead
        payload = 0
        for part in parts:
            payload += part.nbytes
        counted.payload += payload
        traffic.bytes_out += overhead + payload
        return header

    # ------------------------------------------------------------ receiving

    @property
    def midway(self) -> bool:
        """Whether a message has begun to arrive and is not complete."""
        return self._message is not None or self._end > self._begin

    @property
    def missing(self) -> int:
        """How many bytes of the payload in progress are still to come (0 between payloads)."""
        if self._inside and self._begin == self._end:
            return self._parts[self._part].nbytes - self._filled
        return 0

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong; never empty."""
        if self._begin == self._end and not self._inside:
            self._begin = self._end = self._rest
            return self._head[self._rest :]
        if self._inside and self._begin == self._end:
            assert self._sink is not None
            want = self._parts[self._part].nbytes - self._filled
            return self._sink.view(self._part, self._filled)[:want]
        if self._begin > self._rest:
            left = self._end - self._begin
            end = self._rest + left
            self._head[self._rest : end] = bytes(self._head[self._begin : self._end])
            self._begin, self._end = self._rest, end
        return self._head[self._end :]

    def received(self, nbytes: int) -> list[tuple[Message, Sink | None]]:
        """Take note of ``nbytes`` bytes in the last `next_buffer`; return the messages now whole.

        Raises
        ------
        RemoteProtocolError
            When the peer broke the rules; the connection cannot go on.
        """
        self.traffic.bytes_in += nbytes
        if self._inside and self._begin == self._end:
            assert self._sink is not None
            self._sink.filled(self._part, self._filled, nbytes)
            self._filled += nbytes
            if self._filled < self._parts[self._part].nbytes:
                return []
            self._part += 1
            self._inside = False
        else:
            self._end += nbytes
        return self._advance()

    # ------------------------------------------------------------ what is expected

    def expect(self, template: Template, nbytes: int) -> memoryview:
        """Look for messages of one form, each with one payload of so many bytes.

        Parameters
        ----------
        template
            The form of all that precedes the payload: two prefixes, and the header between them.
        nbytes
            At most `SMALL`: such messages are read as a whole before anything is made of them.

        Returns
        -------
        memoryview
            Where the payload of a message that `match` finds lies, 64-byte aligned, until the next
            bytes are received; the same memory each time, until `expected` is another.
        """
        self.forms += 1
        whole = template.size + nbytes
        self._resize(max(_HEAD, whole + 2 * _LINE))
        address = np.frombuffer(self._head, np.uint8).ctypes.data
        self.expected, self._whole, self._usual = template, whole, len(self._head)
        self._rest = -(address + template.size) % _LINE
        begin = self._rest + template.size
        return self._head[begin : begin + nbytes]

    def match(self, nbytes: int) -> tuple[int, ...] | None:
        """Look at ``nbytes`` bytes in the last `next_buffer`, and take no note of them yet.

        Returns
        -------
        tuple or None
            The values of a message as it is expected, if these bytes complete it and nothing else
            has come: `answered` takes note of it. ``()`` if they are the beginning of one: they
            have been taken note of. None: `received` is to be told of them.
        """
        begin, end, template = self._begin, self._end + nbytes, self.expected
        if template is None or begin != self._rest or self._message is not None:
            return None
        if not begin + template.size <= end <= begin + self._whole or self.state != "open":
            return None
        pieces = template.unpack(self._head, begin)
        if pieces[::2] != template.constants:
            return None
        if end == begin + self._whole:
            found: tuple[int, ...] = template.pick(pieces)
            return found
        self._end = end
        self.traffic.bytes_in += nbytes
        return ()

    def answered(
        self, nbytes: int, answer: Template, values: Sequence[float | bytes], payload: memoryview
    ) -> bytes:
        """Take note of the push that `match` found, and of its answer; return that.

        Parameters
        ----------
        nbytes
            As `match` was told.
        answer, values
            The form of all that precedes the payload of an ``ack`` with one part, and the values
            that vary in it.
        payload
            The parameters.
        """
        assert self.expected is not None
        answer.pieces[1::2] = values
        head = answer.pack(*answer.pieces)
        self._begin = self._end = self._rest
        traffic, overhead, out = self.traffic, self.expected.size, answer.size + len(payload)
        traffic.bytes_in += nbytes
        traffic.messages_in += 1
        counted = traffic.kinds_in["push"]
        counted.messages += 1
        counted.overhead += overhead
        counted.payload += self._whole - overhead
        traffic.bytes_out += out
        traffic.messages_out += 1
        counted = traffic.kinds_out["ack"]
        counted.messages += 1
        counted.overhead += answer.size
        counted.payload += len(payload)
        return b"".join((head, payload))

    # ------------------------------------------------------------ going on

    def resume(self) -> list[tuple[Message, Sink | None]]:
        """Ask `place` again after `waiting`; return the messages now whole."""
        self.waiting = False
        return self._advance()

    def lost(self) -> None:
        """Say that the connection is gone: a half-filled sink and others' memory are let go."""
        if self.shared is not None:
            self.shared.lost()
        if self._sink is not None:
            self._sink.abandoned()
        self._message, self._sink, self._parts = None, None, ()
        self._inside, self.waiting, self.state = False, False, "closed"
        self._begin = self._end = 0

    def _advance(self) -> list[tuple[Message, Sink | None]]:
        """Read as far as what has come allows."""
        whole: list[tuple[Message, Sink | None]] = []
        try:
            while not self.waiting and (
                self._message is not None or (self._end > self._begin and self._read_message())
            ):
                if self._parts and not self._read_payloads():
                    break
                message = self._message
                assert message is not None
                if type(message) is Share:
                    self._look_at(message)
                whole.append((message, self._sink))
                payload = 0
                for part in self._parts:
                    payload += part.nbytes
                self.traffic.messages_in += 1  # as `_count`
                counted = self.traffic.kinds_in[message.kind]
                counted.messages += 1
                counted.overhead += 5 + self._length + 5 * len(self._parts)
                counted.payload += payload
                if self._borrowed:
                    assert self.shared is not None
                    self._borrowed = False
                    self.shared.give_back(message.id)
                self._message, self._sink, self._parts = None, None, ()
                if len(self._head) > self._usual:  # a long header must not cost memory for ever
                    self._resize(self._usual)
        except RemoteProtocolError:
            for _message, sink in whole:  # nobody will hear of these: the connection is over
                if sink is not None:
                    sink.abandoned()
            raise
        return whole

    def _look_at(self, message: Share) -> None:
        """Map a segment: places in it may follow at once."""
        if self.shared is None:
            raise RemoteProtocolError("memory can be shared within one machine only")
        self.shared.hear(message)

    def _count(self, kind: str, overhead: int, payload: int) -> None:
        """Count a message that is complete."""
        self.traffic.messages_in += 1
        counted = self.traffic.kinds_in[kind]
        counted.messages += 1
        counted.overhead += overhead
        counted.payload += payload

    def _read_message(self) -> bool:
        """Read a header with its prefix, once all of it is there."""
        begin = self._begin
        if self._end - begin < 5:
            return False
        mark, length = _PREFIX.unpack_from(self._head, begin)
        if mark != _MAP_PREFIX:
            raise _misplaced("message", _MAP_PREFIX, mark)
        start = begin + 5
        if start + length > self._end:
            self._check_length(length)
            room = len(self._head) - self._rest
            if 5 + length > room and 2 * (self._end - begin) >= room:
                self._resize(min(length + _HEAD, 2 * room))  # as it comes: announcing is free
            return False
        if length > self.limits.greeting or length > self.limits.header:
            self._check_length(length)
        header = self._head[start : start + length]
        message = decode(header)
        self.header = bytes(header) if length <= _SHORT else b""
        self._begin = start + length
        if self.state != "open" or message.kind not in self._usually:
            self._hear(message)
        parts: Parts = getattr(message, "parts", ())
        if len(parts) > self.limits.parts:
            raise RemoteProtocolError(
                f"{message.kind}.parts: {len(parts)} parts, at most {self.limits.parts} allowed"
            )
        self._message, self._parts, self._part = message, parts, 0
        self._length = length
        return True

    def _hear(self, message: Message) -> None:
        """Check that the peer may say this now."""
        peer = "client" if self._side == "server" else "server"
        following = HANDSHAKE[self.state][peer].get(message.kind)
        if following is None:
            raise RemoteProtocolError(f"a {peer} may not send {message.kind!r} when {self.state!r}")
        if message.kind == "error" and message.fatal:  # type: ignore[attr-defined]
            following = "closed"
        self.state = following

    def _check_length(self, length: int) -> None:
        """Refuse a header longer than this peer may send now."""
        stranger = self._side == "server" and self.state not in KNOWN
        limit = self.limits.greeting if stranger else self.limits.header
        if length > limit:
            raise RemoteProtocolError(f"header: {length} bytes announced, at most {limit} allowed")

    def _resize(self, size: int) -> None:
        """Give the header's buffer another size, if what is in it fits."""
        left = self._end - self._begin
        if left <= size:
            head = memoryview(bytearray(size))
            head[:left] = self._head[self._begin : self._end]
            self._head, self._begin, self._end = head, 0, left
            self.expected, self._rest, self._usual = None, 0, min(self._usual, self._room)

    def _read_payloads(self) -> bool:
        """Find the payloads a place, and fill it; return whether all of them are there."""
        sink = self._sink
        if sink is None:
            assert self._message is not None
            sink = self._sink = self.place(self._message)
            if sink is None:
                self.waiting = True
                return False
        while self._part < len(self._parts):
            nbytes = self._parts[self._part].nbytes
            if not self._inside:
                if self.shared is not None and self._is_lent:
                    data = self._lent(nbytes)
                    if data is None:
                        return False
                    self._take(data, sink)
                    continue
                if self._end - self._begin < 5:
                    return False
                mark, length = _PREFIX.unpack_from(self._head, self._begin)
                if mark != _BIN_PREFIX:
                    raise _misplaced("payload", _BIN_PREFIX, mark)
                if length != nbytes:
                    raise RemoteProtocolError(
                        f"payload {self._part}: {length} bytes announced,"
                        f" but {nbytes} in the header"
                    )
                self._begin += 5
                self._inside, self._filled = True, 0
            while self._begin < self._end and self._filled < nbytes:  # what was read ahead
                view = sink.view(self._part, self._filled)
                count = min(nbytes - self._filled, self._end - self._begin, len(view))
                view[:count] = self._head[self._begin : self._begin + count]
                sink.filled(self._part, self._filled, count)
                self._begin += count
                self._filled += count
            if self._filled < nbytes:
                return False
            self._part += 1
            self._inside = False
        return True

    @property
    def _is_lent(self) -> bool:
        """Whether the next payload has begun to come, and is a place."""
        return (
            self.shared is not None
            and self._begin < self._end
            and self._head[self._begin] == _PLACE_PREFIX
        )

    def _lent(self, nbytes: int) -> Bytes | None:
        """Return what lies at the place that is the next payload, None while it is not all there.

        It is not passed over yet.
        """
        if self._end - self._begin < _PLACE.size:
            return None
        _mark, count, *rest = _PLACE.unpack_from(self._head, self._begin)
        if (count, rest[0], rest[2]) != (2, _INTEGER_PREFIX, _INTEGER_PREFIX):
            raise RemoteProtocolError(f"payload {self._part}: a place is two 64-bit integers")
        assert self.shared is not None
        return self.shared.at(rest[1], rest[3], nbytes)

    def _take(self, data: Bytes, sink: Sink) -> None:
        """Take a payload that is lent, as it lies if that will do; count it as if it had come."""
        assert self._message is not None
        assert self.shared is not None
        lent = LentPayload(data, partial(self.shared.give_back, self._message.id))
        adopted = len(self._parts) == 1 and sink.adopt(lent)
        if not adopted:
            copy(data.data, sink, self._part, 0)
            self._borrowed = True
        self._begin += _PLACE.size
        self.traffic.bytes_in += 5 + len(data) - _PLACE.size
        self._part += 1


def _misplaced(where: str, wanted: int, mark: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{where}: the byte {wanted:#04x} was expected, not {mark:#04x};"
        " the peer does not speak the aiops wire, or has lost its place in it"
    )


_USUAL = {
    side: {kind for kind, state in said.items() if state == "open" and kind != "error"}
    for side, said in HANDSHAKE["open"].items()
}
"""What changes nothing about an open connection, by who says it."""


def _packed(segment: int, offset: int) -> bytes:
    return _PLACE.pack(_PLACE_PREFIX, 2, _INTEGER_PREFIX, segment, _INTEGER_PREFIX, offset)
