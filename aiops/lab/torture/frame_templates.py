"""Change single values and bytes of right frames, many thousand times a second.

A `FrameTemplate` is one right frame, and knows where each value of its header lies. `Mutator` puts
another value in such a place (one at which something breaks, or one of another frame), or changes
bytes, of the header, its length, or the payloads. That takes a slice or two and no encoder, so that
a fuzzer's time is that of the server.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import msgpack

from aiops.lab.torture.hostile_messages import NUMBERS, REALS, Drawn
from aiops.wire.encoding import encode
from aiops.wire.messages import Message

_PREFIX = struct.Struct(">BI")
_FLOATS = tuple(
    struct.pack("<f", value)
    for value in (
        0.0,
        -0.0,
        1.0,
        1e18,
        9e17,
        3e38,
        1e-45,
        float("nan"),
        float("inf"),
        -float("inf"),
    )
)
_LENGTHS = (0, 1, 4, 16, 4095, 4096, 4097, 1 << 16, 1 << 22, (1 << 22) + 1, 1 << 31, (1 << 32) - 1)
_WIDE = 1 << 20  # a sequence number is written at least as long as this one, so that others fit

Span = tuple[int, int]


class FrameTemplate(NamedTuple):
    """A right frame.

    Attributes
    ----------
    kind
        That of its message.
    header
        The MessagePack map.
    spans
        Where each value of the header lies, also within others.
    payloads
        All that follows, each payload behind its prefix.
    seq
        Where its sequence number lies, in 5 bytes; None: it has none.
    """

    kind: str
    header: bytes
    spans: tuple[Span, ...]
    payloads: bytes = b""
    seq: Span | None = None

    @classmethod
    def of(cls, drawn: Drawn) -> FrameTemplate:
        """Return the template of a message."""
        header, payloads = drawn
        seq = None
        if type(header.get("seq")) is int:
            header = {**header, "seq": header["seq"] % _WIDE + _WIDE}
        data: bytes = msgpack.packb(header)
        if "seq" in header:
            at = data.index(b"\xa3seq") + 4
            seq = at, at + 5
        return cls(header["kind"], data, tuple(spans_of(data)), framed(payloads), seq)

    def numbered(self, seq: int) -> FrameTemplate:
        """Return it with another sequence number, of 2¹⁶ to 2³²."""
        if self.seq is None:
            return self
        start, stop = self.seq
        number = _PREFIX.pack(0xCE, seq)
        return self._replace(header=self.header[:start] + number + self.header[stop:])

    @property
    def right(self) -> bytes:
        """The bytes of the frame."""
        return _PREFIX.pack(0xCE, len(self.header)) + self.header + self.payloads


def message_frame(message: Message) -> bytes:
    """Return the frame of a message without payloads."""
    header = encode(message)
    return _PREFIX.pack(0xCE, len(header)) + header


def framed(payloads: Sequence[bytes]) -> bytes:
    """Return payloads, each behind its prefix."""
    return b"".join(_PREFIX.pack(0xC6, len(each)) + each for each in payloads)


def spans_of(data: bytes) -> Iterator[Span]:
    """Yield where each value of a map lies."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)

    def value(top: bool = False) -> Iterator[Span]:
        start = unpacker.tell()
        mark = data[start]
        if 0x80 <= mark <= 0x8F or mark in (0xDE, 0xDF):
            for _ in range(unpacker.read_map_header()):
                unpacker.skip()
                yield from value()
        elif 0x90 <= mark <= 0x9F or mark in (0xDC, 0xDD):
            for _ in range(unpacker.read_array_header()):
                yield from value()
        else:
            unpacker.skip()
        if not top:
            yield start, unpacker.tell()

    return value(top=True)


def _type_of(mark: int) -> str:
    """Return the type of a value by its first byte."""
    if mark <= 0x7F or mark >= 0xE0 or 0xCC <= mark <= 0xD3:
        return "integer"
    if mark in (0xCA, 0xCB):
        return "real"
    if 0xA0 <= mark <= 0xBF or mark in (0xD9, 0xDA, 0xDB):
        return "text"
    if mark in (0xC4, 0xC5, 0xC6):
        return "bytes"
    if 0x90 <= mark <= 0x9F or mark in (0xDC, 0xDD):
        return "list"
    return "map" if 0x80 <= mark <= 0x8F or mark in (0xDE, 0xDF) else "other"


_TYPES = tuple(_type_of(mark) for mark in range(256))


class Mutator:
    """Changes frames.

    Parameters
    ----------
    rng
        Decides everything.
    templates
        Right frames: values of one are put into others.
    """

    def __init__(self, rng: Random, templates: Sequence[FrameTemplate]) -> None:
        self._bits = rng.getrandbits
        edges = [msgpack.packb(number) for number in (*NUMBERS, -1, -33, -(1 << 31), -(1 << 63))]
        edges += [msgpack.packb(real) for real in REALS]
        others: tuple[object, ...] = (None, True, False, [], {}, "", "x" * 300, b"")
        edges += [msgpack.packb(other) for other in others]
        edges += [msgpack.packb(bytes(count)) for count in (1, 16, 32, 33, 64)]
        edges += [b"\xd4\x05x", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"]
        lent = {t.header[a:b] for t in templates for a, b in t.spans if b - a < 200}
        self._all = sorted({*edges, *lent})
        self._alike = {
            name: [data for data in self._all if _TYPES[data[0]] == name] for name in set(_TYPES)
        }

    def mutated(self, frame: FrameTemplate) -> tuple[bytes, bytes]:
        """Return a frame of which one thing is changed: its header, and all that follows.

        What is changed is a value of the header (by one of its type, mostly), some of its bytes,
        or payloads.
        """
        bits = self._bits(96)
        way, bits = bits & 15, bits >> 4
        header, payloads = frame.header, frame.payloads
        if way < 10:
            span = frame.spans[(bits & 0xFFFF) % len(frame.spans)]
            bits >>= 16
            if span == frame.seq and bits & 0xF0000:  # a high one makes all others too old
                span = frame.spans[(bits >> 20) % len(frame.spans)]
            start, stop = span
            values = self._all if way > 7 else self._alike[_TYPES[header[start]]]
            value = values[(bits & 0xFFFF) % len(values)]
            return header[:start] + value + header[stop:], payloads
        if way < 13 and payloads:
            at = 5 + (bits & 0xFFFFFFFF) % len(payloads) // 4 * 4
            value = _FLOATS[(bits >> 32) % len(_FLOATS)]
            if way == 12:  # any bytes, also those of a prefix
                at -= 5
                value = (bits >> 32 & 0xFFFFFFFF).to_bytes(4, "big")
            return header, payloads[:at] + value + payloads[at + 4 :]
        return self._with_other_bytes(header, bits), payloads

    def _with_other_bytes(self, header: bytes, bits: int) -> bytes:
        at = (bits & 0xFFFF) % len(header)
        bits >>= 16
        match bits & 7:
            case 0:
                return header[:at] + header[at + 1 + (bits >> 3 & 7) :]
            case 1:
                return header[:at] + (bits >> 8 & 0xFFFF).to_bytes(2, "big") + header[at:]
            case 2:
                return header[:at] + bytes([bits >> 8 & 0xFF]) + header[at + 1 :]
            case _:
                flipped = header[at] ^ 1 << (bits >> 3 & 7)
                return header[:at] + bytes([flipped]) + header[at + 1 :]

    def misframed(self, header: bytes, payloads: bytes) -> bytes:
        """Return a frame whose length is wrong, or that is cut, or twice as long."""
        bits = self._bits(64)
        way, bits = bits & 3, bits >> 2
        data = _PREFIX.pack(0xCE, len(header)) + header + payloads
        if way == 0:
            return _PREFIX.pack(0xCE, _LENGTHS[bits % len(_LENGTHS)]) + data[5:]
        if way == 1:
            return data[: bits % len(data)]
        if way == 2:
            return data[bits % len(data) :]
        return _PREFIX.pack(bits & 0xFF, len(header)) + data[5:]
