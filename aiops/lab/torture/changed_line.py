"""A line to a server that is hostile at times: what it answers is changed, doubled, late, invented.

The server behind it is honest. Its partner, a lead or a standby, cannot tell: the handshake and the
token are right, and most messages too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import msgpack

from aiops.errors import RemoteProtocolError
from aiops.lab.torture.frame_templates import FrameTemplate, Mutator, framed
from aiops.lab.torture.hostile_messages import HostileMessages, Target
from aiops.lab.torture.message_line import CutFrames, MessageLine, PassedConnection
from aiops.wire.decoding import decode

_KEPT = 200  # frames that were said, of which values are put into others
_AGAIN = 20  # frames after which the mutator knows newer ones
_FIT = 1 << 16  # bytes of payloads that are made as long as their parts say
_LATE = (0.01, 0.5, 6.0)  # virtual seconds


@dataclass(slots=True)
class ChangedCounts:
    """The frames that a line has said.

    Attributes
    ----------
    frames
        Those that are not right.
    refused
        Those of them that a decoder refuses.
    sent
        Their bytes.
    """

    frames: int = 0
    refused: int = 0
    sent: int = 0


class ChangedLine(MessageLine):
    """Changes what servers answer to those who greet in some way.

    Parameters
    ----------
    rng
        Decides everything.
    greeting
        The kind of the first message of those connections.
    kinds
        The messages that are invented.
    target
        The facts of the model.

    Attributes
    ----------
    rate
        The part of the messages that is not passed on as it is; 0: the server is honest.
    counts
        What was said.
    """

    def __init__(self, rng: Random, greeting: str, kinds: Sequence[str], target: Target) -> None:
        super().__init__()
        self._rng, self._greeting, self._kinds = rng, greeting, kinds
        self._invented = HostileMessages(rng, target)
        self._said_so_far = deque[FrameTemplate](maxlen=_KEPT)
        self._since = 0
        self._mutator: Mutator | None = None
        self._asked, self._told = dict[int, CutFrames](), dict[int, CutFrames]()
        self._greetings = dict[int, str]()
        self._held = list[bytes]()  # that may come later
        self.rate, self.counts = 0.0, ChangedCounts()

    def said(self, connection: PassedConnection, data: bytes) -> None:
        """Pass on what a client says; note how it greets."""
        number = connection.number
        if number not in self._greetings:
            for _raw, frame in self._asked.setdefault(number, CutFrames()).add(data):
                self._greetings.setdefault(number, frame.kind)
        connection.to_server(data)

    def answered(self, connection: PassedConnection, data: bytes) -> None:
        """Pass on what a server answers, with changes."""
        if self._greetings.get(connection.number) != self._greeting:
            connection.to_client(data)
            return
        for raw, frame in self._told.setdefault(connection.number, CutFrames()).add(data):
            self._note(frame)
            if self._rng.random() >= self.rate:
                connection.to_client(raw)
            else:
                self._say(connection, raw, frame)

    def _note(self, frame: FrameTemplate) -> None:
        self._said_so_far.append(frame)
        self._since += 1
        if self._mutator is None or self._since >= _AGAIN:
            drawn = [FrameTemplate.of(self._draw()) for _ in range(_AGAIN)]
            self._mutator, self._since = Mutator(self._rng, [*self._said_so_far, *drawn]), 0

    def _draw(self) -> tuple[dict[str, object], list[bytes]]:
        """Return a message of one of the kinds, with the number of one that was said, mostly."""
        header, payloads = self._invented.of_kind(self._rng.choice(self._kinds))
        if self._said_so_far and self._rng.random() < 0.8:
            said = msgpack.unpackb(self._rng.choice(self._said_so_far).header)
            header["id"] = said["id"] + self._rng.choice((0, 0, 0, 1, 2))
        return header, payloads

    def _say(self, connection: PassedConnection, raw: bytes, frame: FrameTemplate) -> None:
        """Say something else in the place of a message, or beside it."""
        for data, late in self._instead(raw, frame):
            self.counts.frames += 1
            self.counts.sent += len(data)
            if late:
                asyncio.get_running_loop().call_later(late, connection.to_client, data)
            else:
                connection.to_client(data)

    def _instead(self, raw: bytes, frame: FrameTemplate) -> Iterator[tuple[bytes, float]]:
        """Yield what is said, each with the seconds that it is late."""
        rng = self._rng
        way = rng.randrange(16)
        if way < 7:  # changed; then right too, at times
            yield self._changed(frame), 0.0
            if rng.random() < 0.3:
                yield raw, 0.0
        elif way < 9:  # doubled
            for _ in range(rng.choice((2, 2, 3, 100))):
                yield raw, 0.0
        elif way < 10:
            yield raw, rng.choice(_LATE)
        elif way < 11:  # exchanged, or not at all
            self._held.append(raw)
            if len(self._held) > 1:
                yield self._held.pop(0), 0.0
        elif way < 15:  # invented
            for _ in range(rng.choice((1, 1, 2, 8))):
                made = FrameTemplate.of(self._draw())
                yield (made.right if rng.random() < 0.6 else self._changed(made)), 0.0
            if rng.random() < 0.8:
                yield raw, 0.0
        else:
            assert self._mutator is not None
            header = self._huge(frame) if rng.random() < 0.2 else frame.header
            yield self._mutator.misframed(header, frame.payloads), 0.0

    def _huge(self, frame: FrameTemplate) -> bytes:
        """Return a header with a value of up to a mebibyte."""
        header = msgpack.unpackb(frame.header)
        longest = self._rng.choice((1 << 12, 1 << 16, 1 << 20))
        header[self._rng.choice(list(header))] = self._rng.choice(
            (bytes(longest), "x" * longest, [0] * (longest // 4), {str(n): n for n in range(999)})
        )
        data: bytes = msgpack.packb(header)
        return data

    def _changed(self, frame: FrameTemplate) -> bytes:
        """Return a frame with one thing changed."""
        assert self._mutator is not None
        header, payloads = self._mutator.mutated(frame)
        try:
            parts = getattr(decode(header), "parts", ())
        except RemoteProtocolError:
            self.counts.refused += 1
            parts = ()
        nbytes = sum(part.nbytes for part in parts)
        if parts and nbytes <= _FIT and nbytes + 5 * len(parts) != len(payloads):
            payloads = framed([bytes(part.nbytes) for part in parts])
        return b"\xce" + len(header).to_bytes(4, "big") + header + payloads
