"""One connection, sans-I/O: received bytes become messages, and messages become bytes to send.

Theory of operation
===================

A `Connection` has no socket, clock or thread, and calls nothing above it. A driver (asyncio or
blocking) does only this::

    n = recv_into(connection.next_buffer())        # a payload goes straight to its final buffer
    messages = connection.received(n)              # whole messages, payloads already in place
    while connection.pending is not None:          # a header that announces payloads
        sink = sink_for(connection.pending)        # the driver's decision; None: no room now
        messages += connection.fill(sink)
    send(connection.send(message, payloads))       # buffers for writelines or sendmsg, not joined

A message is a MessagePack header behind a prefix of 5 bytes, then the payloads of its parts, each
behind a prefix of 5 bytes. The prefixes are MessagePack too, so that the stream can be decoded by
any MessagePack library.

**States.** `aiops.wire.state_machine.HANDSHAKE` is a table: for each state and side, the kinds of
message that may be sent, and the state that follows. Both directions share one state. A connection
begins in ``"start"``, the handshake leads to ``"open"`` (or one of its counterparts between shards
and between workers), and a fatal error leads to ``"closed"``, where nothing is legal. `send` raises
`LocalProtocolError`, before it changes anything, if this side may not send the message. A message
of the peer that the table does not allow is a `RemoteProtocolError`.

**Head buffer and sinks.** `next_buffer` offers one of two places. Between payloads it is the head
buffer, 16 KiB for prefixes and headers. A longer header makes it grow as its bytes arrive, so that
announcing one costs no memory, and it shrinks after the message. Within a payload it is a view of
the message's `Sink`. A header with parts becomes `pending` as soon as it is complete, before memory
is allocated for payloads, and the driver answers with `fill` and a sink. Payload bytes that were
read behind the header are copied from the head buffer; all others are received where they belong.
`Sink.filled` reports each run of bytes. `received` or `fill` returns a message when its last
payload is complete, with its sink; a message without parts has none. Payloads that are not wanted
go to a `Discard`, and the connection goes on.

**Waiting for room.** While a message is `pending`, nothing behind its header is parsed. A driver
that has no sink for it stops reading, which leaves the rest with the peer, and calls `fill` when
there is room. Messages that were complete before it are returned at once, so they do not wait.

**Shared payloads.** On a connection within one machine, each side may show the other segments of
shared memory (`Share`). A payload may then be a place, a segment and an offset, instead of bytes.
If the sink adopts such a payload, it is read in place, and the sink gives it back later;
otherwise it is copied into the sink and given back when the message is complete. `Traffic` counts
it as if it had been sent, so that its figures do not depend on where a peer runs.

**Expected messages.** In training of a small model nearly every message is a push of the whole
gradient or its answer, whose headers differ in a few integers. The server learns the form of a push
as a `Template` and passes it to `expect`. The head buffer then has room for the whole message, with
the payload aligned to 64 bytes. `match` looks at received bytes first. It takes effect only if they
are the beginning of such a message, complete as far as its payload's prefix. If they complete one,
and nothing else has come, it returns the values that vary and leaves the message where it is; the
server computes with the payload in the head buffer and calls `answered`, which counts both messages
and returns the answer. In every other case (another form, another state, a request that cannot be
answered at once) `received` takes the same bytes, and no message is lost or read twice. Expected
messages are forgotten when the head buffer is replaced; the server learns them again, up to 32
forms per connection.

**Messages about rows.** A server that answers them at once looks at the bytes of a message that
begins (`opening`), has the head buffer take all of it (`await_rest`), and counts it (`took`). As
with expected messages, `received` takes the same bytes where that cannot be.

**Limits.** `Limits` bounds a header to 4 MiB (4 KiB until a server's peer has completed its
handshake) and a message to 65,536 parts. The length is checked when the prefix is read, and
`aiops.wire.decoding` checks each field. A payload's length has to be the one in the header.
Deadlines, rates and the number of connections are the driver's concern.

**A broken peer.** Bytes that are not a legal message raise `RemoteProtocolError` from `received` or
`fill`, with a sentence that names the fault. Messages completed by the same call are dropped and
their sinks abandoned. The stream has no point to start again from, so the driver closes the
connection. For whatever reason it ends, the driver calls `lost`: the sink in progress is abandoned,
the peer's segments are forgotten, and the state is ``"closed"``.

A connection belongs to one thread, its driver's. Views of the head buffer, such as that of
`expect`, hold until the next bytes are received.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from aiops.errors import LocalProtocolError, RemoteProtocolError
from aiops.model.parts import Parts
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Message, Share
from aiops.wire.shared_payloads import LentPayload, SharedPayloads
from aiops.wire.sinks import Discard, Sink, copy
from aiops.wire.state_machine import HANDSHAKE, KNOWN, Side
from aiops.wire.template import Template
from aiops.wire.traffic import Traffic

Buffer: TypeAlias = bytes | memoryview

SMALL = 64 * 1024
"""Bytes: payloads of at most this sum are copied into one buffer with their header."""

_HEAD = 16 * 1024  # bytes of the head buffer; a payload's first bytes may be received in it
_SHORT = 8192  # bytes: the longest header that is kept, for `Connection.header`: of 256 parts
_LINE = 64  # bytes of a processor's cache line
_PREFIX = struct.Struct(">BI")
_MAP_PREFIX, _BIN_PREFIX = 0xCE, 0xC6
_PLACE = struct.Struct(">BIBQBQ")  # a list of two integers, each in its longest form
_LIST_PREFIX, _INTEGER = 0xDD, 0xCF
_NBYTES = attrgetter("nbytes")  # a part's


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a peer may announce, checked before memory is allocated.

    ``header`` and ``greeting`` are in bytes; ``parts`` is per message.
    """

    header: int = 4 << 20
    greeting: int = 4 << 10  # a header's, until the handshake is complete
    parts: int = 1 << 16


Messages: TypeAlias = list[tuple[Message, Sink | None]]
"""Whole messages in the order in which they came, each with the sink of its payloads, if any."""

SinkFor: TypeAlias = Callable[[Message], Sink | None]
"""Returns the sink of a message with payloads; None: there is no room now."""

Places: TypeAlias = Sequence[tuple[int, int] | None]
"""For each payload: the number of a segment and an offset in it, or None if it is sent."""


class Connection:
    """One connection, seen from one side.

    Parameters
    ----------
    side
        ``"client"`` or ``"server"``: the side that this is.
    limits
        Bounds on what the peer may announce.

    Attributes
    ----------
    pending
        The message whose header is complete, and whose payloads have no sink yet; else None.
    missing
        Bytes of the payload in progress that are still to come; 0 between payloads.
    shared
        The segments that both sides have shown, on a connection within one machine; else None.
    checked
        Whether all bytes are covered by checksums (`aiops.wire.checked_connection`).
    header
        The header read last, if it has at most 8,192 bytes; else empty.
    expected
        The form of the messages that `match` looks for, or None.
    forms
        The number of calls of `expect` so far.
    on_long
        Called with the bytes by which a long header makes the head buffer grow.
    """

    state: str
    header: bytes
    forms: int
    missing: int

    __slots__ = (
        *(
            "_begin",
            "_between",
            "_borrowed",
            "_end",
            "_filled",
            "_head",
            "_least",
            "_length",
            "_message",
        ),
        *("_part",),
        *("_parts", "_rest", "_side", "_sink", "_usual", "_usually", "_whole", "expected", "forms"),
        *("header", "limits", "missing", "on_long", "pending", "shared", "state", "traffic"),
    )

    checked = False
    _room = _HEAD
    _joined = SMALL

    def __init__(self, side: Side, limits: Limits | None = None) -> None:
        self._side: Side = side
        self._usually = _USUAL["client" if side == "server" else "server"]
        self.limits: Limits = limits or Limits()
        self.state = "start"
        self.traffic: Traffic = Traffic()
        self._head = memoryview(bytearray(self._room))
        self._begin = self._end = 0  # the bytes of _head that are not read yet
        self._rest = 0  # where the next bytes go when there are none
        self._usual = self._room  # bytes of _head, unless a long header is being read
        self.header = b""
        self.expected: Template | None = None
        self._whole = 0  # bytes of a message as it is expected, with its payloads
        self._between = 0  # of them, those of prefixes between payloads
        self.forms = 0
        self._least = 0  # bytes of _head that messages about rows need
        self._message: Message | None = None  # its header has been read, and its payloads not
        self.pending: Message | None = None
        self._length = 0  # of its header, in bytes
        self._parts: Parts = ()
        self._sink: Sink = _NOWHERE
        self._part = 0  # the payload that comes next, or is in progress
        self._filled = self.missing = 0  # bytes of it that have come, and that have not
        self.shared: SharedPayloads | None = None
        self._borrowed = False  # lent payloads of this message were copied
        self.on_long: Callable[[int], None] | None = None

    # ------------------------------------------------------------ sending

    def send(
        self,
        message: Message,
        payloads: Sequence[Sequence[memoryview]] = (),
        places: Places = (),
    ) -> list[Buffer]:
        """Return the buffers to send, in order; ``payloads`` holds the views of each part.

        A payload that has a place in ``places`` is lent and not sent. It counts as if it were sent.

        Raises
        ------
        LocalProtocolError
            When this side may not send that now.
        """
        kind = message.kind
        following = HANDSHAKE[self.state][self._side].get(kind)
        if following is None:
            raise LocalProtocolError(f"a {self._side} may not send {kind!r} when {self.state!r}")
        if kind == "error" and message.fatal:  # type: ignore[attr-defined]
            following = "closed"
        self.state = following
        header = encode(message)
        prefix = _PREFIX.pack(_MAP_PREFIX, len(header))
        chunks: list[Buffer] = [prefix + header]
        copied = payload = 0
        parts: Parts = getattr(message, "parts", ())
        if parts:
            for number, (part, views) in enumerate(zip(parts, payloads, strict=True)):
                nbytes = part.nbytes
                payload += nbytes
                place = places[number] if places else None
                if place is not None:
                    chunks.append(
                        _PLACE.pack(_LIST_PREFIX, 2, _INTEGER, place[0], _INTEGER, place[1])
                    )
                    continue
                copied += nbytes
                chunks.append(_PREFIX.pack(_BIN_PREFIX, nbytes))
                chunks += views
            if copied <= self._joined:
                chunks = [b"".join(chunks)]
            else:
                chunks[:2] = [b"".join(chunks[:2])]
        traffic, overhead = self.traffic, 5 + len(header) + 5 * len(parts)
        traffic.messages_out += 1
        traffic.bytes_out += overhead + payload
        counted = traffic.kinds_out[kind]
        counted.messages += 1
        counted.overhead += overhead
        counted.payload += payload
        return chunks

    # ------------------------------------------------------------ receiving

    @property
    def midway(self) -> bool:
        """True while a message has begun to arrive and is not complete."""
        return self._message is not None or self._end > self._begin

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong; never empty."""
        if self.missing:
            return self._sink.view(self._part, self._filled)[: self.missing]
        if self._begin == self._end:
            self._begin = self._end = self._rest
        elif self._begin > self._rest:  # the rest of a header moves to the front, to make room
            end = self._rest + self._end - self._begin
            self._head[self._rest : end] = bytes(self._head[self._begin : self._end])
            self._begin, self._end = self._rest, end
        return self._head[self._end :]

    def received(self, nbytes: int) -> Messages:
        """Read ``nbytes`` bytes in the last `next_buffer`; return the messages now whole.

        Stops behind a header that announces payloads: see `pending`.

        Raises
        ------
        RemoteProtocolError
            When the peer broke the rules; the connection cannot go on.
        """
        self.traffic.bytes_in += nbytes
        if self.missing:
            return self._received_payload(nbytes)
        self._end += nbytes
        if self._message is not None:
            return [] if self.pending is not None else self.fill(self._sink)
        whole: Messages = []
        head = self._head
        while (begin := self._begin) + 5 <= self._end:
            mark, length = _PREFIX.unpack_from(head, begin)
            if mark != _MAP_PREFIX:
                raise _misplaced("message", _MAP_PREFIX, mark)
            start = begin + 5
            if start + length > self._end:
                self._expect_longer(length)
                break
            if length > self.limits.greeting or length > self.limits.header:
                self._check_length(length)
            header = bytes(head[start : start + length])
            message = decode(header)
            self.header = header if length <= _SHORT else b""
            self._begin = start + length
            if self.state != "open" or message.kind not in self._usually:
                self._follow(message)
            parts: Parts = getattr(message, "parts", ())
            if parts:
                if len(parts) > self.limits.parts:
                    raise RemoteProtocolError(
                        f"{message.kind}.parts: {len(parts)} parts, at most {self.limits.parts}"
                        " allowed"
                    )
                self._message = self.pending = message
                self._parts, self._part, self._length = parts, 0, length
                break
            if type(message) is Share:
                self._map(message)
            self._count(message.kind, 5 + length, 0)
            whole.append((message, None))
            if len(head) > self._usual:  # a long header must not cost memory after it
                self._resize(self._usual)
                head = self._head
        return whole

    def _received_payload(self, nbytes: int) -> Messages:
        """Take note of bytes that were received where they belong."""
        self._sink.filled(self._part, self._filled, nbytes)
        self._filled += nbytes
        self.missing -= nbytes
        if self.missing:
            return []
        self._part += 1
        return self.fill(self._sink)

    def fill(self, sink: Sink) -> Messages:
        """Have the payloads of the `pending` message written to a sink, which is its own from now.

        Returns
        -------
        list
            That message, if its payloads have come already, and all that were complete behind it.

        Raises
        ------
        RemoteProtocolError
            When the peer broke the rules; the connection cannot go on.
        """
        self._sink, self.pending = sink, None
        head, parts, count = self._head, self._parts, len(self._parts)
        while (index := self._part) < count:
            nbytes = parts[index].nbytes
            begin = self._begin
            if self._end - begin < 5:
                return []
            mark, length = _PREFIX.unpack_from(head, begin)
            if mark != _BIN_PREFIX:
                if self.shared is None or mark != _LIST_PREFIX:
                    raise _misplaced("payload", _BIN_PREFIX, mark)
                if not self._borrow(nbytes):
                    return []
                continue
            if length != nbytes:
                raise RemoteProtocolError(
                    f"payload {index}: {length} bytes announced, but {nbytes} in the header"
                )
            begin += 5
            filled = 0
            while filled < nbytes and begin < self._end:  # what was read ahead
                view = sink.view(index, filled)
                several = min(nbytes - filled, self._end - begin, len(view))
                view[:several] = head[begin : begin + several]
                sink.filled(index, filled, several)
                begin += several
                filled += several
            self._begin, self._filled, self.missing = begin, filled, nbytes - filled
            if self.missing:
                return []
            self._part += 1
        message = self._message
        assert message is not None, "a message is pending"
        self.traffic.messages_in += 1  # `_count` in line: one call less per message
        counted = self.traffic.kinds_in[message.kind]
        counted.messages += 1
        counted.overhead += 5 + self._length + 5 * count
        counted.payload += sum(map(_NBYTES, parts))  # `map` enters no function of Python
        if self._borrowed:
            assert self.shared is not None
            self._borrowed = False
            self.shared.give_back(message.id)
        self._message, self._sink, self._parts = None, _NOWHERE, ()
        if len(head) > self._usual:
            self._resize(self._usual)
        if self._begin == self._end:
            return [(message, sink)]
        try:
            return [(message, sink), *self.received(0)]
        except RemoteProtocolError:
            sink.abandoned()  # it is not returned: the connection is over
            raise

    # ------------------------------------------------------------ what is expected

    @property
    def head(self) -> memoryview:
        """The head buffer, which is another one whenever `expected` changes."""
        return self._head

    def expect(self, template: Template, nbytes: int, between: int = 0) -> memoryview:
        """Have `match` look for messages of one form.

        Parameters
        ----------
        template
            The form of all that precedes the first payload: two prefixes, and the header between
            them.
        nbytes
            Bytes from there on: the whole message fits in the head buffer, which is made as large.
        between
            Those of them that are prefixes of further payloads, which are not compared.

        Returns
        -------
        memoryview
            All from the first payload on of a message that `match` finds, 64-byte aligned, valid
            until the next bytes are received; the same memory each time, until `expected` changes.
        """
        self.forms += 1
        whole = template.size + nbytes
        self._resize(max(_HEAD, whole + 2 * _LINE, self._least))
        address = np.frombuffer(self._head, np.uint8).ctypes.data
        self.expected, self._whole, self._usual = template, whole, len(self._head)
        self._between = between
        self._rest = -(address + template.size) % _LINE
        begin = self._rest + template.size
        return self._head[begin : begin + nbytes]

    def match(self, nbytes: int) -> tuple[int, ...] | None:
        """Compare ``nbytes`` bytes in the last `next_buffer` with the expected form.

        Returns
        -------
        tuple or None
            The values of an expected message, if these bytes complete it and nothing else has come;
            `answered` or `received` is to be called then. ``()`` if they are the beginning of one,
            which is counted. None: call `received` with them; nothing has changed.
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
        """Count the push that `match` found, and its answer; return the answer.

        Parameters
        ----------
        nbytes
            The argument of `match`.
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
        overhead = self.expected.size + self._between
        traffic, out = self.traffic, answer.size + len(payload)
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

    def took_expected(self, nbytes: int) -> None:
        """Count the push that `match` found, whose answer is sent by `send`.

        ``nbytes``: the argument of `match`.
        """
        assert self.expected is not None
        overhead = self.expected.size + self._between
        self.took(nbytes, "push", overhead, self._whole - overhead)

    # ------------------------------------------------------------ messages about rows

    def opening(self, nbytes: int) -> memoryview | None:
        """Return the unread bytes of a message that begins, ``nbytes`` of which have just come.

        None: they are payload, or nothing of the kind that `aiops.wire.row_headers` describes may
        come now. In both cases nothing changes.
        """
        if self._message is not None or self.state not in _ANSWERING:
            return None
        return self._head[self._begin : self._end + nbytes]

    def lacks(self, size: int) -> int:
        """Return the bytes by which `await_rest` would make the head buffer larger."""
        return max(0, _room_for(size) - max(self._least, self._room))

    def await_rest(self, nbytes: int, size: int) -> None:
        """Count ``nbytes`` bytes of a message of ``size`` bytes, whose rest is to come behind them.

        The head buffer has room for messages of that size from here on.
        """
        self.traffic.bytes_in += nbytes
        self._end += nbytes
        self._least = max(self._least, _room_for(size))
        if len(self._head) - self._rest < size:
            self._resize(self._least)
            self._usual = len(self._head)

    def took(self, nbytes: int, kind: str, overhead: int, payload: int) -> None:
        """Count a message that the last ``nbytes`` bytes completed; `opening` had all of it."""
        self._begin = self._end = self._rest
        traffic = self.traffic
        traffic.bytes_in += nbytes
        traffic.messages_in += 1
        counted = traffic.kinds_in[kind]
        counted.messages += 1
        counted.overhead += overhead
        counted.payload += payload

    # ------------------------------------------------------------ going on

    def unread(self) -> bytes:
        """Return the bytes that have come, between payloads, and are no message yet."""
        return bytes(self._head[self._begin : self._end])

    def lost(self) -> None:
        """Close for good: let go of a half-filled sink and of the peer's memory."""
        if self.shared is not None:
            self.shared.lost()
        self._sink.abandoned()
        self._message, self.pending, self._sink, self._parts = None, None, _NOWHERE, ()
        self.missing, self.state = 0, "closed"
        self._begin = self._end = 0

    def _map(self, message: Share) -> None:
        """Map a segment: places in it may follow at once."""
        if self.shared is None:
            raise RemoteProtocolError("memory can be shared within one machine only")
        self.shared.map(message)

    def _count(self, kind: str, overhead: int, payload: int) -> None:
        """Count a message that is complete."""
        self.traffic.messages_in += 1
        counted = self.traffic.kinds_in[kind]
        counted.messages += 1
        counted.overhead += overhead
        counted.payload += payload

    def _expect_longer(self, length: int) -> None:
        """Make room for a header that has begun to come, as far as it has come."""
        self._check_length(length)
        room = len(self._head) - self._rest
        if 5 + length > room and 2 * (self._end - self._begin) >= room:
            self._resize(min(length + _HEAD, 2 * room))  # not more than arrived
            if self.on_long is not None:
                self.on_long(len(self._head) - self._rest - room)

    @property
    def lengthened(self) -> int:
        """Bytes that its head buffer has for a long header, beside the usual ones."""
        return len(self._head) - self._usual

    def _follow(self, message: Message) -> None:
        """Check that the peer may send this now, and go to the state that follows."""
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
        """Replace the head buffer by one of another size, if its bytes fit."""
        left = self._end - self._begin
        if left <= size:
            head = memoryview(bytearray(size))
            head[:left] = self._head[self._begin : self._end]
            self._head, self._begin, self._end = head, 0, left
            self.expected, self._rest, self._usual = None, 0, min(self._usual, self._room)

    def _borrow(self, nbytes: int) -> bool:
        """Have the sink adopt or copy the payload at a place; return False if that is incomplete.

        It is counted as if it had been received.
        """
        begin, message, shared = self._begin, self._message, self.shared
        if self._end - begin < _PLACE.size:
            return False
        assert message is not None
        assert shared is not None
        _mark, count, first, segment, second, offset = _PLACE.unpack_from(self._head, begin)
        if (count, first, second) != (2, _INTEGER, _INTEGER):
            raise RemoteProtocolError(f"payload {self._part}: a place is two 64-bit integers")
        data = shared.at(segment, offset, nbytes)
        lent = LentPayload(data, partial(shared.give_back, message.id))
        if len(self._parts) > 1 or not self._sink.adopt(lent):
            copy(data.data, self._sink, self._part, 0)
            self._borrowed = True
        self._begin += _PLACE.size
        self.traffic.bytes_in += 5 + nbytes - _PLACE.size
        self._part += 1
        return True


def with_sinks(connection: Connection, messages: Messages, sink_for: SinkFor) -> Messages:
    """Return received messages and those behind them, as long as there is a sink for each.

    Parameters
    ----------
    connection, messages
        The connection, and what its `Connection.received` has returned.
    sink_for
        Returns the sink of a message with payloads. None: there is no room now, and the message
        stays `Connection.pending`.

    Raises
    ------
    RemoteProtocolError
        When the peer broke the rules; the sinks of all messages are abandoned then.
    """
    try:
        while connection.pending is not None:
            sink = sink_for(connection.pending)
            if sink is None:
                break
            messages += connection.fill(sink)
    except RemoteProtocolError:
        for _message, received in messages:
            if received is not None:
                received.abandoned()
        raise
    return messages


def _misplaced(where: str, wanted: int, mark: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{where}: the byte {wanted:#04x} was expected, not {mark:#04x};"
        " the peer does not speak the aiops wire, or has lost its place in it"
    )


_USUAL = {
    side: {kind for kind, state in said.items() if state == "open" and kind != "error"}
    for side, said in HANDSHAKE["open"].items()
}
"""By sender: the kinds of message that leave an open connection open."""


def _room_for(size: int) -> int:
    """Return the bytes of a head buffer for messages of a size, wherever in a line they begin."""
    return max(_HEAD, 1 << (size + _LINE - 1).bit_length())


_ANSWERING = ("open", "shard open")  # the states in which requests are answered

_NOWHERE = Discard()
