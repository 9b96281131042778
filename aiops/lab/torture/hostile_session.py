"""Draw all that one hostile peer sends on a connection: messages, damaged in every way, in pieces.

Damage is done on three levels: to the fields of a header (another type, a number at which sums
break, one more or less, nesting), to the bytes of a frame (flipped, cut, inserted, lengths that are
wrong), and to the order of frames (repeated, left out, exchanged).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import msgpack

from aiops.lab.torture.hostile_messages import NUMBERS, Drawn, Header, HostileMessages, Target

_LENGTHS = (0, 1, 5, 64, 4096, 1 << 20, (1 << 32) - 1)


class SentPiece(NamedTuple):
    """Bytes that are sent at once.

    Attributes
    ----------
    data
        The bytes.
    frames
        The number of frames that end in them.
    pause
        Seconds until the next piece.
    """

    data: bytes
    frames: int
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class HostileSession:
    """The bytes of one connection.

    Attributes
    ----------
    pieces
        What is sent, one after the other.
    ending
        The way in which the peer ends it: ``close``, ``abort``, ``eof`` (it reads on), ``stay``
        (until it is dropped).
    reads
        Whether it reads what the server sends.
    """

    pieces: tuple[SentPiece, ...]
    ending: str
    reads: bool


def draw_session(rng: Random, target: Target, most: int) -> HostileSession:
    """Return a session of at most this many frames, before damage to their order."""
    messages = HostileMessages(rng, target)
    wildness = rng.choice((0.01, 0.05, 0.05, 0.2, 0.8))
    drawn = [messages.greeting(), *(messages.request() for _ in range(rng.randrange(most)))]
    frames = [_frame(one, wildness * (0.2 if not at else 1), rng) for at, one in enumerate(drawn)]
    if rng.random() < wildness:
        _disorder(frames, rng)
    return HostileSession(
        tuple(_pieces(frames, rng)),
        rng.choice(("close", "close", "abort", "eof", "stay")),
        rng.random() < 0.9,
    )


def _frame(drawn: Drawn, wildness: float, rng: Random) -> bytes:
    """Return the bytes of a message, damaged with this probability."""
    header, payloads = drawn
    if rng.random() < wildness * 0.7:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _damage_field(header, rng)
    data = _packed(header, rng, wildness)
    chunks = [b"\xce", len(data).to_bytes(4, "big"), data]
    for payload in payloads:
        chunks += [b"\xc6", len(payload).to_bytes(4, "big"), payload]
    if rng.random() < wildness * 0.3:
        at = rng.randrange(len(chunks))
        chunks[at] = _damage_bytes(chunks[at], rng)
    return b"".join(chunks)


def _packed(header: Header, rng: Random, wildness: float) -> bytes:
    data: bytes = msgpack.packb(header, use_bin_type=True, datetime=False)
    if 0 < len(header) < 15 and rng.random() < wildness * 0.05:  # a key that comes twice
        twice = msgpack.packb(rng.choice(list(header))) + msgpack.packb(rng.choice(NUMBERS))
        data = bytes([data[0] + 1]) + data[1:] + twice
    if rng.random() < wildness * 0.02:  # deeper than any reader should follow
        data = b"\x81\xa4kind" + rng.choice((b"\x91", b"\x81\xa1a")) * 2000 + b"\xc0"
    return data


def _damage_field(header: Header, rng: Random) -> None:
    messages = HostileMessages(rng, Target((), (), 0))
    name = rng.choice(list(header)) if header else "kind"
    match rng.randrange(6):
        case 0:
            header.pop(name, None)
        case 1:
            header[rng.choice(("x", "kind", "parts", "seq", "id", "", "p" * 300))] = messages.wild()
        case 2:
            header[name] = rng.choice(NUMBERS)
        case 3:
            header[name] = messages.wild()
        case _:
            header[name] = _inside(header.get(name), messages, rng)


def _inside(value: Any, messages: HostileMessages, rng: Random) -> Any:
    """Return a value with a wild one somewhere inside."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        lot = rng.random()
        if lot < 0.1:
            return value[:at] + value[at + 1 :]
        if lot < 0.2:
            return value + value * rng.choice((1, 1, 300))
        return [_inside(v, messages, rng) if n == at else v for n, v in enumerate(value)]
    if isinstance(value, int) and rng.random() < 0.6:
        near = min(value + 1, NUMBERS[-1]), max(value - 1, -1)
        return rng.choice((*near, rng.choice(NUMBERS)))
    return messages.wild()


def _damage_bytes(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 2 if len(data) == 4:
            return rng.choice(_LENGTHS).to_bytes(4, "big")
        case _:
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 1, 3, 20)) if data else 0):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(flipped)


def _disorder(frames: list[bytes], rng: Random) -> None:
    """Repeat, leave out and exchange frames."""
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(frames))
        match rng.randrange(3):
            case 0:
                frames.insert(rng.randrange(len(frames) + 1), frames[at])
            case 1 if len(frames) > 1:
                del frames[at]
            case _:
                other = rng.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]


def _pieces(frames: list[bytes], rng: Random) -> Iterator[SentPiece]:
    """Cut frames into what is sent at once."""
    way = rng.choice(("each", "each", "all", "cut"))
    if way == "all":
        yield SentPiece(b"".join(frames), len(frames), rng.choice((0.0, 0.1)))
        return
    for frame in frames:
        while way == "cut" and len(frame) > 1 and rng.random() < 0.5:
            at = rng.choice((1, 4, 5, 6, rng.randrange(1, len(frame))))
            yield SentPiece(
                frame[:at], 0, rng.choice((0.1, 1.0, 40.0)) if rng.random() < 0.02 else 0.0
            )
            frame = frame[at:]
        yield SentPiece(frame, 1, 0.1 if rng.random() < 0.05 else 0.0)
    if rng.random() < 0.8:
        yield SentPiece(b"", 0, 0.1)  # the answers come
