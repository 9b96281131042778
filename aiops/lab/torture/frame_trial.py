"""Mutated frames, handed to a server's connections in this process, as many as it can take.

The server is that of `aiops.lab.torture.attacked`, in virtual time: its acceptor, transports, wire
and engine are those of every server. Only the network is left out: a `FedConnection` hands bytes to
the transport, as an event loop does with those of a socket. Right frames are drawn once for each
trial. Then one thing is changed in frame after frame (`aiops.lab.torture.frame_templates`), and
seven of eight that a server is sent are changed.

A frame whose header is no message is refused by the decoder, which ends a connection. To make a new
connection takes as long as fifty refusals, so only one of `_DELIVERED` such frames is also sent to
the server. All others are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, cast

from aiops.errors import RemoteProtocolError
from aiops.lab.torture.attack_trial import AttackTrial
from aiops.lab.torture.attacked import SETTINGS, TABLELESS, AttackedServer, AttackPlan, Door
from aiops.lab.torture.frame_templates import FrameTemplate, Mutator
from aiops.lab.torture.hostile_messages import HostileMessages
from aiops.lab.torture.said import check_said
from aiops.wire.decoding import decode

FRAMES = 200_000
"""The changed frames of a trial."""

_BATCH = 2000  # changed frames, after which all connections end, and what is held is checked
_TEMPLATES = 500
_CLIENTS = 64  # the statistics of a server that remembers many are slow
_DELIVERED = 64
_MISFRAMED = 128  # one of these is cut, or has a wrong length
_PAUSE = 0.5  # virtual seconds between batches: longer than the server's own timers


def draw_frames(seed: int, names: tuple[str, ...] = tuple(SETTINGS)) -> AttackPlan:
    """Return the plan of a seed."""
    rng = Random(f"frames {seed}")
    variant = rng.choice(names)
    token = rng.random() < 0.05
    return AttackPlan(
        seed,
        variant,
        peers=FRAMES // 20 if token else FRAMES,
        together=rng.choice((1, 2, 8)),
        token=token,
        state=rng.random() < 0.2,
        tables=variant not in TABLELESS and rng.random() < 0.6,
    )


class FedConnection:
    """One connection of a server, as its transport sees it; what the server says is kept.

    Parameters
    ----------
    protocol
        The server's.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        self._protocol = protocol
        self.said: list[bytes | memoryview] = []
        self.over = self.paused = False
        protocol.connection_made(self)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """Hand bytes to the server, until it ends the connection or reads no further."""
        protocol, view = self._protocol, memoryview(data)
        while view and not self.over and not self.paused:
            room = cast(memoryview, protocol.get_buffer(-1))
            count = min(len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            protocol.buffer_updated(count)

    def lose(self) -> bytes:
        """End it; return what the server said."""
        self.over = True
        self._protocol.connection_lost(None)
        return b"".join(self.said)

    # ------------------------------------------------------------ what the server calls

    def write(self, data: bytes | memoryview) -> None:
        """Keep what the server says."""
        self.said.append(data)

    def abort(self) -> None:
        """End it."""
        self.over = True

    close = abort

    def is_closing(self) -> bool:
        """Return whether it has been ended."""
        return self.over

    def pause_reading(self) -> None:
        """Read nothing more."""
        self.paused = True

    def resume_reading(self) -> None:
        """Read on."""
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the default: there is no socket."""
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: all is kept at once."""

    def get_write_buffer_size(self) -> int:
        """Return 0."""
        return 0


class FrameTrial(AttackTrial):
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    def __init__(self, plan: AttackPlan) -> None:
        super().__init__(plan)
        self._seq = 1 << 20

    async def attack(self, attacked: AttackedServer) -> None:
        """Send the frames."""
        plan, result = self.plan, self.result
        doors = [DoorFrames(self._rng, door) for door in attacked.doors if door.accept]
        while result.frames < plan.peers and not result.wrong:
            self._batch(self._rng.choice(doors))
            await asyncio.sleep(_PAUSE)
            result.wrong += attacked.held()
            await self.step(attacked)

    def _batch(self, frames: DoorFrames) -> None:
        """Send frames on a few connections at once, and end these."""
        rng, result = self._rng, self.result
        open_ = [frames.connect(rng) for _ in range(self.plan.together)]
        result.sessions += len(open_)
        end, templates, mutator = result.frames + _BATCH, frames.requests, frames.mutator
        count, together = len(templates), len(open_)
        while result.frames < end:
            bits = rng.getrandbits(64)
            at, bits = bits % together, bits >> 8
            connection = open_[at]
            if connection.over or connection.paused:
                self._end(connection)
                open_[at] = connection = frames.connect(rng)
                result.sessions += 1
            template = templates[(bits & 0xFFFF) % count]
            bits >>= 16
            if template.seq is not None and bits & 0x700:
                self._seq += 1
                template = template.numbered(self._seq)
            if not bits & 7:
                connection.feed(template.right)
                continue
            result.frames += 1
            header, payloads = mutator.mutated(template)
            if (bits >> 16) % _MISFRAMED == 0:
                data = mutator.misframed(header, payloads)
            else:
                try:
                    decode(header)
                except RemoteProtocolError:
                    result.refused += 1
                    if (bits >> 32) % _DELIVERED:
                        continue
                data = b"\xce" + len(header).to_bytes(4, "big") + header + payloads
            result.sent += len(data)
            connection.feed(data)
        for connection in open_:
            self._end(connection)

    def _end(self, connection: FedConnection) -> None:
        self.result.wrong += check_said(connection.lose(), self.result.answers)


class DoorFrames:
    """The right frames that are changed for one door of a server.

    Parameters
    ----------
    rng
        Decides everything.
    door
        Where they are sent.
    """

    def __init__(self, rng: Random, door: Door) -> None:
        assert door.accept is not None
        self._accept = door.accept
        self.requests: Sequence[FrameTemplate] = list(_right(rng, door, _TEMPLATES))
        drawn = (HostileMessages(rng, door.target).greeting() for _ in range(_CLIENTS))
        self._greetings = [FrameTemplate.of(greeting) for greeting in drawn]
        proofs = [HostileMessages(rng, door.target).proof() for _ in range(_CLIENTS)]
        self._proofs = [FrameTemplate.of(proof) for proof in proofs if door.target.token]
        self.mutator = Mutator(rng, [*self.requests, *self._greetings])

    def connect(self, rng: Random) -> FedConnection:
        """Make a connection, and greet; to a server with a token, say what is no proof of it."""
        connection = FedConnection(self._accept())
        for frames in filter(None, (self._greetings, self._proofs)):
            frame = rng.choice(frames)
            if rng.random() < 0.05:
                header, payloads = self.mutator.mutated(frame)
                frame = frame._replace(header=header, payloads=payloads)
            connection.feed(frame.right)
        return connection


def _right(rng: Random, door: Door, count: int) -> Iterator[FrameTemplate]:
    """Yield requests that the decoder takes, each of another peer."""
    statistics = 0
    while count:
        template = FrameTemplate.of(HostileMessages(rng, door.target).request())
        statistics += template.kind == "stats"
        if template.kind == "stats" and statistics > 2:  # they are slow, and have no fields
            continue
        with suppress(RemoteProtocolError):
            decode(template.header)
            yield template
            count -= 1
