"""Sources of changed frames: single ones for one door of a server, and whole sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from aiops.errors import RemoteProtocolError
from aiops.lab.torture.attack_trial import AttackResult
from aiops.lab.torture.attacked import Door, Script
from aiops.lab.torture.fed_connection import CheckedFedConnection, FedConnection
from aiops.lab.torture.frame_templates import FrameTemplate, Mutator, framed
from aiops.lab.torture.hostile_messages import HostileMessages
from aiops.lab.torture.said import check_said
from aiops.model.parts import Parts
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.handshake import answer
from aiops.wire.messages import Challenge, Hello

_BATCH = 1000  # changed frames, after which all connections end
_TEMPLATES = 500
_CLIENTS = 64  # the statistics of a server that remembers many are slow
_DELIVERED = 64  # one of these that the decoder refuses is sent to the server, too
_MISFRAMED = 128  # one of these is cut, or has a wrong length
_LONGEST = 1 << 16  # bytes of payloads that are made to fit
_SOON = 0.001  # virtual seconds: others go on


class ChangedFrames:
    """Changes frames, counts them, and ends connections.

    Parameters
    ----------
    rng
        Decides everything.
    templates
        Right frames, of which values are put into others.
    result
        Takes the counts, and what is wrong.
    """

    def __init__(
        self, rng: Random, templates: Sequence[FrameTemplate], result: AttackResult
    ) -> None:
        self.rng, self.result = rng, result
        self._mutator = Mutator(rng, templates)

    def changed(self, frame: FrameTemplate, bits: int) -> bytes | None:
        """Return a frame with one thing changed; None: the decoder has refused it.

        ``bits``: 32 random ones.
        """
        result = self.result
        result.frames += 1
        header, payloads = self._mutator.mutated(frame)
        if bits % _MISFRAMED == 0:
            data = self._mutator.misframed(header, payloads)
        else:
            try:
                parts: Parts = getattr(decode(header), "parts", ())
            except RemoteProtocolError:
                result.refused += 1
                if (bits >> 16) % _DELIVERED:
                    return None
                parts = ()
            if parts and bits & 7:
                payloads = _fitting(parts, payloads)
            data = b"\xce" + len(header).to_bytes(4, "big") + header + payloads
        result.sent += len(data)
        return data

    def end(self, connection: FedConnection) -> None:
        """End a connection; check what the server has said."""
        check = CheckedFedConnection.CHECK if isinstance(connection, CheckedFedConnection) else 0
        self.result.wrong += check_said(connection.lose(), self.result.answers, check=check)


class DoorFrames(ChangedFrames):
    """Single frames, without an order, for one door of a server.

    Parameters
    ----------
    rng, result
        As of `ChangedFrames`.
    door
        Where they are sent.
    """

    def __init__(self, rng: Random, door: Door, result: AttackResult) -> None:
        assert door.accept is not None
        self._accept, self._target = door.accept, door.target
        self._requests = list(_right(rng, door, _TEMPLATES))
        drawn = (HostileMessages(rng, door.target).greeting() for _ in range(_CLIENTS))
        self._greetings = [FrameTemplate.of(greeting) for greeting in drawn]
        if door.target.knows:  # then they have to be right
            self._greetings = [each for each in self._greetings if _is_right(each)]
        proofs = [HostileMessages(rng, door.target).proof() for _ in range(_CLIENTS)]
        self._proofs = [FrameTemplate.of(proof) for proof in proofs if door.target.token]
        self._seq = 1 << 20
        super().__init__(rng, [*self._requests, *self._greetings], result)

    def send(self, together: int) -> None:
        """Send frames on some connections at once, and end these; seven of eight are changed."""
        rng, result, requests = self.rng, self.result, self._requests
        connections = [self._connect() for _ in range(together)]
        end, count = result.frames + _BATCH, len(requests)
        while result.frames < end:
            bits = rng.getrandbits(80)
            at, bits = bits % together, bits >> 8
            connection = connections[at]
            if connection.over or connection.paused:
                self.end(connection)
                connections[at] = connection = self._connect()
            frame = requests[(bits & 0xFFFF) % count]
            bits >>= 16
            if frame.seq is not None and bits & 0x700:
                self._seq += 1
                frame = frame.numbered(self._seq)
            data = self.changed(frame, bits >> 16) if bits & 7 else frame.right
            if data is not None:
                connection.feed(data)
        for connection in connections:
            self.end(connection)

    def _connect(self) -> FedConnection:
        """Make a connection, and greet; to a server with a token, say what is no proof of it."""
        target = self._target
        connection = (CheckedFedConnection if target.checked else FedConnection)(self._accept())
        self.result.sessions += 1
        if target.knows:
            greeting = self.rng.choice(self._greetings)
            connection.feed(greeting.right)
            self._prove(connection, greeting)
            return connection
        for frames in filter(None, (self._greetings, self._proofs)):
            frame = self.rng.choice(frames)
            data = self.changed(frame, self.rng.getrandbits(32)) if self._sometimes else None
            connection.feed(data or frame.right)
        return connection

    def _prove(self, connection: FedConnection, greeting: FrameTemplate) -> None:
        """Prove that this peer has a token, if the server asks for that."""
        said, hello = b"".join(connection.said), decode(greeting.header)
        challenge = decode(said[5:]) if said else None
        if isinstance(challenge, Challenge) and isinstance(hello, Hello):
            proof = answer(challenge, hello, self._target.knows, "")
            header = encode(proof)
            connection.feed(b"\xce" + len(header).to_bytes(4, "big") + header)

    @property
    def _sometimes(self) -> bool:
        return self.rng.random() < 0.05


class ScriptedSession(ChangedFrames):
    """A session that is said in its order, with changed frames among the right ones.

    Parameters
    ----------
    rng, result
        As of `ChangedFrames`.
    script
        The session.
    doors
        Where its connections are made.
    """

    def __init__(
        self, rng: Random, script: Script, doors: Mapping[str, Door], result: AttackResult
    ) -> None:
        super().__init__(rng, [each.frame for each in script.frames], result)
        self._script, self._doors = script, doors

    async def say(self) -> None:
        """Say it once, on new connections, which are made again when the server ends them."""
        names = {old: new or self._new_name(old) for old, new in self._script.names.items()}
        swaps = [(old.encode(), new.encode()) for old, new in names.items()]
        connections, greetings = dict[int, FedConnection](), dict[int, bytes]()
        rate = self.rng.choice((0.05, 0.2, 1.0, 3.0))
        for said in self._script.frames:
            frame = said.frame
            for old, new in swaps:
                frame = frame._replace(header=frame.header.replace(old, new))
            number = said.connection
            if number not in connections:
                greetings[number] = frame.right
                connections[number] = self._connect(said.door, frame.right)
                await asyncio.sleep(_SOON)
                continue
            for data in self._versions_of(frame, rate):
                if connections[number].over:
                    self.end(connections[number])
                    connections[number] = self._connect(said.door, greetings[number])
                    await asyncio.sleep(_SOON)
                    if connections[number].over:  # the server has ended, or knows this peer
                        break
                connections[number].feed(data)
            if connections[number].over and self.rng.random() < 0.1:
                break
            if self.rng.random() < 0.5:
                await asyncio.sleep(_SOON)
        for connection in connections.values():
            self.end(connection)

    def _versions_of(self, frame: FrameTemplate, rate: float) -> Iterator[bytes]:
        """Yield a frame with changes, ``rate`` times, and then as it is, once mostly."""
        bits = self.rng.getrandbits
        for _ in range(int(rate + self.rng.random())):
            data = self.changed(frame, bits(32))
            if data is not None:
                yield data
        for _ in range((0, 2)[lot] if (lot := bits(6)) < 2 else 1):
            yield frame.right

    def _connect(self, door: str, greeting: bytes) -> FedConnection:
        accept = self._doors[door].accept
        assert accept is not None
        connection = FedConnection(accept())
        self.result.sessions += 1
        connection.feed(greeting)
        return connection

    def _new_name(self, old: str) -> str:
        return f"{self.rng.getrandbits(4 * len(old)):0{len(old)}x}"


def _fitting(parts: Parts, payloads: bytes) -> bytes:
    """Return payloads as long as their parts say; of great or right lengths, the same.

    Other lengths end a connection before the parts are looked at.
    """
    nbytes = sum([part.nbytes for part in parts])
    if nbytes > _LONGEST or nbytes + 5 * len(parts) == len(payloads):
        return payloads
    return framed([bytes(part.nbytes) for part in parts])


def _right(rng: Random, door: Door, count: int) -> Iterator[FrameTemplate]:
    """Yield requests that the decoder takes, each of another peer."""
    statistics = 0
    while count:
        template = FrameTemplate.of(HostileMessages(rng, door.target).request())
        statistics += template.kind == "stats"
        if template.kind == "stats" and statistics > 1:  # they are slow, and have no fields
            continue
        if _is_right(template):
            yield template
            count -= 1


def _is_right(template: FrameTemplate) -> bool:
    try:
        decode(template.header)
    except RemoteProtocolError:
        return False
    return True
