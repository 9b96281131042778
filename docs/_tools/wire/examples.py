"""One message of each kind, and whole conversations, made by the code that speaks the wire."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from aiops.algorithms.asgd import ASGD
from aiops.algorithms.average import Average
from aiops.averaging.ring_allreduce import Flat, Ring
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Event, Initialised, Joined, Options, Received, Reply
from aiops.model.arena import Arena
from aiops.model.layout import Bytes, Layout
from aiops.model.parts import Part, Parts
from aiops.state.frames import SegmentHead, frame
from aiops.wire import messages
from aiops.wire.admin_messages import (
    Done,
    Drain,
    Kick,
    Pause,
    Resume,
    RollbackTo,
    TakeSnapshot,
)
from aiops.wire.connection import Connection, Messages, with_sinks
from aiops.wire.data_messages import CoverPush, GivenTask, TakeTask
from aiops.wire.encoding import KINDS, encode
from aiops.wire.handshake import (
    Admitted,
    ServerHandshake,
    answer,
    check_welcome,
    generation_proof,
    place_proof,
    proof,
)
from aiops.wire.messages import Message
from aiops.wire.ring_messages import (
    JoinRound,
    RelayHello,
    RelayReady,
    RingChunk,
    RingHello,
    Round,
    RoundSettled,
    SettleRound,
)
from aiops.wire.ring_proofs import ChunkSeal, relay_proof, ring_name, ring_token
from aiops.wire.ring_proofs import proof as ring_proof
from aiops.wire.server_messages import (
    BudgetUsed,
    ClosePushes,
    CountTraffic,
    ExpectPush,
    FinishPush,
    HoldVersion,
    KeepSets,
    LeadHello,
    LoadShard,
    NoteHistory,
    PaceClients,
    PushArrived,
    RollBack,
    RunUpdate,
    SendAway,
    SendIncrements,
    SendParams,
    SendRows,
    ShardHello,
    ShardParts,
    ShardState,
    ShardWelcome,
    ShareSecret,
    SnapshotSaved,
    StoredRows,
    TrafficCounted,
    UpdateDone,
)
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Sink
from aiops.wire.standby_messages import (
    Fence,
    JournalRows,
    PlaceGiven,
    Promote,
    Promoted,
    RowsKept,
    SnapshotPart,
    StandbyHello,
    StandbyWelcome,
    TakePlace,
)
from aiops.wire.state_machine import HANDSHAKE, Side
from aiops.wire.token_keys import only, token_id
from docs._tools.wire.sharded import exchange


@dataclass(frozen=True)
class Example:
    """One message as it crosses the wire."""

    name: str
    sender: Side
    message: Message
    payloads: tuple[bytes, ...] = ()
    places: tuple[tuple[int, int], ...] = ()  # where the payloads lie, if they are lent

    @property
    def header(self) -> bytes:
        """The header map's bytes."""
        return encode(self.message)

    @property
    def frame(self) -> bytes:
        """The whole message's bytes, as the sender's `Connection` writes them."""
        wire = Connection(self.sender)
        kind = self.message.kind
        wire.state = next(s for s, allowed in HANDSHAKE.items() if kind in allowed[self.sender])
        views = [[memoryview(payload)] for payload in self.payloads]
        return b"".join(wire.send(self.message, views, self.places))


@dataclass(frozen=True)
class Conversation:
    """Whole messages in the order in which they cross one connection."""

    title: str
    steps: tuple[Example, ...]


class _Kept(Sink):
    """A sink that keeps what came."""

    def __init__(self, message: Message) -> None:
        self.payloads = [bytearray(part.nbytes) for part in message.parts]  # type: ignore[attr-defined]

    def view(self, part: int, offset: int) -> memoryview:
        return memoryview(self.payloads[part])[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        pass

    def abandoned(self) -> None:
        pass


# ---------------------------------------------------------------- the examples

TOKEN = "correct horse battery staple"
NONCES = bytes(range(16)), bytes(range(16, 32))

SECRET = bytes(range(32))
"""That of run `8c2f`."""

RELAY_TOKEN = "tell only the relay"


def hello(epoch: int = 1, role: str = "worker") -> messages.Hello:
    """Return the greeting of the examples' client."""
    return messages.Hello(
        0, messages.PROTOCOL, "5f0c", epoch, "w0", role, False, NONCES[0], "example/1"
    )


def relay_hello() -> RelayHello:
    """Return the greeting of the first worker of the examples' round, for its connection."""
    ring = ring_name(bytes(range(32)), 3)
    return RelayHello(0, messages.PROTOCOL, ring, 0, True, NONCES[0])


def _relay_proof(side: Side) -> bytes:
    hello = relay_hello()
    return relay_proof(ring_token(RELAY_TOKEN, hello.ring), side, hello, NONCES[1])


def one_of_each() -> list[Example]:
    """Return one small message of each kind, in the order of `encoding.KINDS`."""
    m, version = messages, messages.PROTOCOL
    rows, row = (("w", "float32", (3,)),), ("w", "float32", (3,), 0)
    push = (*_rows_of(1, 8), *_rows_of(2, 8), *_rows_of(1, 4))
    pushed = struct.pack("<q", 5), struct.pack("<2q", 0, 5), struct.pack("<f", 0.5)
    refused = "the push holds no tensor: push at least one"
    vbars = struct.pack("<f", 0.25)
    plan = {"routine": "direct"}
    ring = (("10.0.0.5", 40001, True), ("10.0.0.6", 40001, True))
    digest = Layout(rows).digest
    given = proof(TOKEN, "client", *NONCES, hello().client)
    found = [
        _sent("client", hello()),
        _sent("client", m.Prove(0, given, token_id(TOKEN))),
        _sent("client", m.Define(1, rows, _floats(0)), struct.pack("<3f", 1, 2, 3)),
        _sent("client", m.Describe(2)),
        _sent("client", m.Push(3, 1, True, 6, _floats(6)), struct.pack("<3f", 0.5, -1, 0)),
        _sent("client", m.Reapply(4, 2, False, -1)),
        _sent("client", m.Fetch(5, -1, ((0, 1, 6),), True)),
        _sent("client", m.FetchRows(6, 0, _rows_of(1, 8)), struct.pack("<q", 5)),
        _sent("client", m.PushRows(7, 3, 0, 6, push), *pushed),
        _sent("client", m.Stats(8)),
        _sent("client", m.Ping(9)),
        _sent("client", m.Log(0, (("loss", 0.25), ("accuracy", 0.5)), 12.5, 0.5)),
        _sent("client", m.Leave(10)),
        _sent("client", JoinRound(8, "10.0.0.5", 40001, 2, digest, NONCES[0], settles=True)),
        _sent("client", SettleRound(9, 3, True, ((4, 96, 128),))),
        _sent("server", m.Challenge(0, NONCES[1])),
        _sent(
            "server",
            m.Welcome(
                *(0, version, "8c2f", b"", "fasgd", {"lr": 0.5}, plan, 7, (row,), 3),
                generation=3,
                intact=(6,),
                acks="written",
                generation_proof=generation_proof(SECRET, "8c2f", 3),
            ),
        ),
        _sent("server", m.Model(1, True, 0, (row,))),
        _sent(
            "server",
            m.Ack(3, 7, 7, True, 1, 0.5, 0.25, vbars, _floats(7)),
            struct.pack("<3f", 3, 2, 1),
        ),
        _sent("server", m.FetchedParams(5, 7)),
        _sent("server", m.TableRows(7, 7, 0, _rows_of(2, 4)), struct.pack("<2f", 1, 2)),
        _sent("server", m.Report(8, {"version": 7, "workers": ()})),
        _sent("server", Round(8, 3, 0, ring, bytes(range(32)), settles=True)),
        _sent("server", RoundSettled(9, True, True, False)),
        _sent(
            "client",
            TakeTask(11, "mnist", 60_000, 1, 0, 0, 3, 512, True, "", (4,), ((4, 96, 128),)),
        ),
        _sent("server", GivenTask(11, 5, 0, 512, 1024, False)),
        _sent("client", CoverPush(12, 4, ((5, 512, 544),))),
        _sent("server", m.Pong(9)),
        _sent("server", m.Error(3, "bad-push", refused, {}, False, 7)),
        _sent("server", m.Share(0, 1, 16_384)),
        _sent("client", m.Release(3)),
        *_of_shards(row),
        *_of_standbys(),
        *_of_administrators(),
        _sent("client", RingHello(0, 3, 0, ring_proof(bytes(range(32)), "client", 3, 0))),
        _sent("client", RingChunk(0, 1, (Part(0, 4, "raw", 4, 3),)), struct.pack("<f", 1)),
        _sent("client", relay_hello()),
        _sent("server", RelayReady(0, _relay_proof("server"))),
    ]
    order = list(KINDS)
    return sorted(found, key=lambda example: order.index(example.name))


_HOLDS = {
    "portions": (9,),
    "versions": (),
    "snapshots": (18_000, 18_220),
    "reached": 18_240,
    "history": ((1 << 20, 0), (2 << 20, 18_200)),
}


def _of_shards(row: tuple[str, str, tuple[int, ...], int]) -> list[Example]:
    """Return one small message of each kind that shards have to do with."""
    version = messages.PROTOCOL
    who = "5f0c", 1, "w0", "8c2f", False, NONCES[0], "example/1"
    lead = version, "8c2f", 1, "shard 1 of 2", *who[3:], "fasgd", {"lr": 0.5}, 2, False
    proof = generation_proof(SECRET, "8c2f", 2, lead=True)
    half, numbers = (Part(8, 12, "raw", 4, 7),), struct.pack("<d", 0.5)
    work = {"factor": 1.0, "round": "step", "sent": -1, "spare": True, "touched": None}
    return [
        _sent("client", ShardHello(0, version, *who)),
        _sent("server", ShardWelcome(0, version, b"")),
        _sent("client", ShardParts(3, 0, half), struct.pack("<f", 0)),
        _sent("client", LeadHello(0, *lead, proof)),
        _sent("client", ShareSecret(0, SECRET)),
        _sent(
            "client",
            LoadShard(0, {}, (row,), (("", 7172, 8),), 1, half),
            struct.pack("<f", 3),
        ),
        _sent("client", ExpectPush(1, "5f0c", 1, 3, ((8, 12, 7),))),
        _sent("client", RunUpdate(1, 1, 7, {**work, "steps": numbers})),
        _sent("client", SendParams(3, "5f0c", 1, 8, ((8, 12, 8),))),
        _sent("client", SendIncrements(3, "5f0c", 1, 8, (), ((8, 12, 1),))),
        _sent("client", HoldVersion(0, 8, True, False)),
        _sent("client", FinishPush(1, False)),
        _sent("client", NoteHistory(0, (1 << 20, 2 << 20), (0, 18_200), 18_200)),
        _sent("client", KeepSets(0, (18_000, 18_220))),
        _sent("client", RollBack(0, 18_231)),
        _sent("client", CountTraffic(2)),
        _sent("client", SendRows(4)),
        _sent("client", ClosePushes(0, "the server is shutting down and takes no more pushes")),
        _sent("client", SendAway(0, "5f0c", "this client was sent away by token 'admin'")),
        _sent("client", PaceClients(0, 500_000, 0, {"5f0c": 2.0})),
        _sent(
            "server",
            ShardState(0, True, "8c2f", 1, 2, 7, 3, False, _HOLDS),
        ),
        _sent("server", PushArrived(1, {}, 1.5, bytes(8), struct.pack("<2d", 1.5, -0.25))),
        _sent("server", UpdateDone(1, struct.pack("<q", -1), struct.pack("<3d", 65_535, 1e18, 2))),
        _sent("server", SnapshotSaved(18_220, "")),
        _sent(
            "server",
            TrafficCounted(
                2,
                {"5f0c": (52, 9, 1, 0, {"shard_parts": (1, 48, 4)}, {})},
                {"row": 812, "acks": "written"},
                {"words": {"made": 3816, "evicted": 0, "bytes": 61_056, "rows_pushed": 9_400}},
            ),
        ),
        _sent(
            "server",
            StoredRows(4, 0, 0, (Part(0, 1, "raw", 12, 0),)),
            struct.pack("<qf", 5, 0.5),
        ),
        _sent("server", BudgetUsed(0, 48_112, 470_300, 1_200_000, 2, True)),
    ]


def _standby_hello(run: str, generation: int, row: int) -> StandbyHello:
    version, named = messages.PROTOCOL, ("b71e", 1, "10.0.0.6:7171", True, NONCES[0], "example/1")
    proof = generation_proof(SECRET, run, generation) if generation else b""
    return StandbyHello(0, version, *named, run, generation, row, proof)


def _rows(first: int) -> tuple[JournalRows, bytes]:
    """Return a message of two rows, a tick and a client's leaving, and its payload."""
    data = SegmentHead(first, 3, "8c2f", 7).pack()
    for number, kind, row in (first, 9, b"\x90"), (first + 1, 5, b"\x92\x01\xc0"):
        data += b"".join(frame(number, kind, 2.5, 0, row, salt=7, unsynced=1))
    return JournalRows(0, first, first + 1, first + 1, _whole(len(data))), data


def _whole(nbytes: int) -> Parts:
    return (Part(0, nbytes, "raw", nbytes, 0),)


def _welcomed(hello: StandbyHello, row: int, snapshot: int) -> StandbyWelcome:
    starts = (1, 0, (0,)), (2, 40, (19,)), (3, 90, (44,))
    named = b"", "8c2f", 3, row, snapshot
    return StandbyWelcome(hello.id, messages.PROTOCOL, *named, {"starts": starts}, SECRET)


def _fence() -> Fence:
    proof = generation_proof(SECRET, "8c2f", 65536)
    return Fence(1, "8c2f", 65536, "aiops://10.0.0.6:7171", proof)


def _take_place() -> TakePlace:
    shard, where = (1, 2), ("10.0.0.6", 7171)
    proof = place_proof(SECRET, "8c2f", shard[0], *where)
    return TakePlace(1, "8c2f", *shard, *where, 3, 7, 3, False, _HOLDS, proof)


def _of_standbys() -> list[Example]:
    """Return one small message of each kind that standbys have to do with."""
    again = _standby_hello("8c2f", 2, 88)
    rows, data = _rows(89)
    return [
        _sent("client", again),
        _sent("server", _welcomed(again, 88, 0)),
        _sent("server", SnapshotPart(0, _whole(8)), b"aiopsSS\n"),
        _sent("server", rows, data),
        _sent("client", RowsKept(0, 90, 88, 90)),
        _sent("client", Promote(1)),
        _sent("server", Promoted(1, 65536, 44)),
        _sent("client", _take_place()),
        _sent("server", PlaceGiven(1, 1 << 36)),
        _sent("client", _fence()),
    ]


def _of_administrators() -> list[Example]:
    """Return one message of each kind that directs a server."""
    requests = (
        *(Kick(1, "w3", "it holds up the others"), Pause(2, "maintenance"), Resume(3)),
        *(TakeSnapshot(4), Drain(5), RollbackTo(6, 44)),
    )
    return [*(_sent("client", each) for each in requests), _sent("server", Done(1, 50, 1))]


def _fed() -> Conversation:
    """Return what a standby that holds nothing and its primary send each other."""
    hello, snapshot = _standby_hello("", 0, 0), b"aiopsSS\n" + bytes(8)
    rows, data = _rows(93)
    parts = Part(0, 8, "raw", 8, 0), Part(8, 16, "raw", 8, 0)
    return _conversation(
        "A new standby is fed",
        [
            ("client", hello, ()),
            ("server", _welcomed(hello, 92, len(snapshot)), ()),
            *(
                ("server", SnapshotPart(0, (part,)), (snapshot[part.start : part.stop],))
                for part in parts
            ),
            ("client", RowsKept(0, 92, 92, 92), ()),
            ("server", rows, (data,)),
            ("client", RowsKept(0, 94, 92, 94), ()),
            ("client", RowsKept(0, 94, 94, 94), ()),
        ],
    )


def _promotions() -> list[Conversation]:
    """Return what an operator and a standby, and the new server and the old one, send."""
    found = []
    asked: list[tuple[str, Message, Message]] = [
        ("A standby is promoted", Promote(1), Promoted(1, 65536, 44)),
        ("A standby takes the place of a follower", _take_place(), PlaceGiven(1, 1 << 36)),
        (
            "A server is told that another has its run",
            _fence(),
            messages.Error(
                1,
                "superseded",
                "this server was superseded by aiops://10.0.0.6:7171 (generation 65,536)",
                {"generation": 65536, "primary": "aiops://10.0.0.6:7171"},
                True,
            ),
        ),
    ]
    for title, request, reply in asked:
        script = Recorder(title)
        script.greet(hello(role="observer"))
        steps: list[tuple[Side, Message, tuple[bytes, ...]]] = [
            (step.sender, step.message, step.payloads) for step in script.steps
        ]
        steps += ("client", request, ()), ("server", reply, ())
        found.append(_conversation(title, steps))
    return found


def _sent(sender: Side, message: Message, *payloads: bytes) -> Example:
    return Example(message.kind, sender, message, payloads)


def _floats(version: int) -> Parts:
    """Return the one part of a model of three float32."""
    return (Part(0, 12, "raw", 12, version),)


def _rows_of(count: int, each: int) -> Parts:
    """Return the one part of a payload of ``count`` rows, or row numbers, of ``each`` bytes."""
    return (Part(0, count, "raw", count * each, 0),)


class Recorder:
    """A record of the messages between a client and a server, joined through memory.

    Every byte passes a `Connection` at each end, and a real `Engine` answers.

    With ``near`` both are on one machine, and payloads after `share` are lent: each side has one
    segment, from whose first byte on its payload lies.
    """

    def __init__(
        self,
        title: str,
        token: str | None = None,
        engine: Engine | None = None,
        *,
        near: bool = False,
    ) -> None:
        self.title, self.token = title, token
        self._segments: dict[Side, Bytes] = {}
        self.engine = engine or Engine(ASGD(lr=0.5), Options(backend="numpy"))
        self.steps: list[Example] = []
        self._handshake = ServerHandshake(token and only(token), NONCES[1])
        self._wires: dict[Side, Connection] = {
            "client": Connection("client"),
            "server": Connection("server"),
        }
        self._sinks: dict[Side, Callable[[Message], Sink | None]] = {
            "client": _Kept,
            "server": self.engine.admission.sink_for,
        }
        if near:
            self._wires["client"].shared = SharedPayloads(lambda nbytes: self._segments["server"])
            self._wires["server"].shared = SharedPayloads(lambda nbytes: self._segments["client"])
        self._peer = 0

    def share(self, sender: Side, nbytes: int) -> None:
        """Have a side share its segment with the other."""
        self._segments[sender] = np.zeros(nbytes, np.uint8)
        self._carry(sender, messages.Share(0, 1, nbytes), ())

    def send(self, message: Message, *payloads: bytes) -> Message:
        """Have the client send a message; return the last one that the server sent."""
        for received, sink in self._carry("client", message, payloads):
            self._serve(received, sink)
        return self.steps[-1].message

    def greet(self, hello: messages.Hello, token: str | None = None) -> Message:
        """Go through the handshake."""
        self._peer = hello.epoch
        reply = self.send(hello)
        if isinstance(reply, messages.Challenge):
            reply = self.send(answer(reply, hello, token, "the server"))
        if isinstance(reply, messages.Welcome) and token is not None:
            check_welcome(reply, hello, messages.Challenge(0, NONCES[1]), token, "the server")
        return reply

    def done(self) -> Conversation:
        """Return the conversation so far."""
        return Conversation(self.title, tuple(self.steps))

    def _carry(self, sender: Side, message: Message, payloads: Iterable[bytes]) -> Messages:
        """Move a message across, and record it."""
        data = tuple(bytes(payload) for payload in payloads)
        name = f"{self.title} / {len(self.steps) + 1} {message.kind}"
        segment = self._segments.get(sender)
        places = ((1, 0),) * len(data) if segment is not None else ()
        if segment is not None and data:
            segment[: len(data[0])] = np.frombuffer(data[0], np.uint8)
        self.steps.append(Example(name, sender, message, data, places))
        views = [[memoryview(payload)] for payload in data]
        stream = b"".join(self._wires[sender].send(message, views, places))
        to: Side = "server" if sender == "client" else "client"
        receiver = self._wires[to]
        whole: Messages = []
        while stream:
            view = receiver.next_buffer()[: len(stream)]
            view[:], stream = stream[: len(view)], stream[len(view) :]
            whole += with_sinks(receiver, receiver.received(len(view)), self._sinks[to])
        return whole

    def _serve(self, message: Message, sink: Sink | None) -> None:
        if isinstance(message, messages.Share | messages.Release):
            return  # that is between the two ends of the connection
        if self._handshake.admitted:
            self._post(Received(0.0, self._peer, message, sink))
            return
        reply = self._handshake.receive(message)
        if isinstance(reply, Admitted):
            self._post(Joined(0.0, self._peer, *reply[:2]))
        else:
            self._carry("server", reply, ())

    def _post(self, event: Event) -> None:
        events = [event]
        while events:
            for effect in self.engine.handle(events.pop(0)):
                if isinstance(effect, Apply):
                    events.append(Applied(0.0, effect.ticket, effect.run()))
                elif isinstance(effect, Reply):
                    lease = effect.lease
                    parts: Parts = getattr(effect.message, "parts", ())
                    views = [] if lease is None else [b"".join(p) for p in lease.payloads(parts)]
                    if effect.rows is not None:
                        views = [bytes(effect.rows.answer)]
                        effect.rows.free()
                    if lease is not None:
                        lease.release()
                    if views and "client" in self._segments and "server" not in self._segments:
                        self.share("server", 1 << 14)
                    self._carry("server", effect.message, views)


def two_workers_average() -> Conversation:
    """Return the messages of the first of two workers, at [1, 2, 3], to the second, at [3, 6, 9].

    The second has a connection of its own to the first, with as many messages.
    """
    title, secret, number = "Two workers of a round", bytes(range(32)), 3
    layout = Layout((("w", "float32", (3,)),))
    rings = []
    for rank, values in enumerate(((1, 2, 3), (3, 6, 9))):
        flat, arena = Flat(layout), Arena(layout)
        arena.views["w"][:] = values
        flat.load(arena)
        rings.append(Ring(rank, [True, True], flat))
    sent: list[tuple[Side, Message, bytes]] = [
        ("client", RingHello(0, number, 0, ring_proof(secret, "client", number, 0)), b""),
        ("server", RingHello(0, number, 1, ring_proof(secret, "server", number, 1)), b""),
    ]
    (first,), (other,) = (ring.begin() for ring in rings)
    rings[0].room(*other[:3])[:] = other.view  # on the other connection, from the second worker
    second = rings[0].received(other.start, other.hop)
    assert second is not None
    for piece in (first, second):
        part = Part(piece.start, piece.stop, "raw", piece.stop - piece.start, number)
        sent.append(("client", RingChunk(0, piece.hop, (part,)), bytes(piece.view)))
    return _conversation(title, ((side, m, (data,) if data else ()) for side, m, data in sent))


def two_workers_and_a_relay() -> Conversation:
    """Return the messages of the first of two workers to a relay, and through it to the second."""
    title, secret, number = "Two workers of a round, through a relay", bytes(range(32)), 3
    part, values = Part(0, 4, "raw", 4, number), struct.pack("<f", 1)
    seal = ChunkSeal(secret, number, 0).of(part, 1, memoryview(values))
    sent: list[tuple[Side, Message, bytes]] = [
        ("client", relay_hello(), b""),
        ("server", messages.Challenge(0, NONCES[1]), b""),
        ("client", messages.Prove(0, _relay_proof("client")), b""),
        ("server", RelayReady(0, _relay_proof("server")), b""),
        ("client", RingHello(0, number, 0, ring_proof(secret, "client", number, 0)), b""),
        ("server", RingHello(0, number, 1, ring_proof(secret, "server", number, 1)), b""),
        ("client", RingChunk(0, 1, (part,), seal), values),
    ]
    return _conversation(title, ((side, m, (data,) if data else ()) for side, m, data in sent))


def conversations() -> list[Conversation]:
    """Return the conversations of the page, as a real engine has them."""
    m = messages
    plain = Recorder("Without a token")
    plain.greet(hello(role="observer"))
    for message in (m.Ping(1), m.Describe(2), m.Leave(3)):
        plain.send(message)
    token = Recorder("With a token", TOKEN)
    token.greet(hello(), TOKEN)
    token.send(m.Leave(1))
    wrong = Recorder("With a wrong token", TOKEN)
    wrong.greet(hello(), "guess")

    train = Recorder("Define a model, push, fetch")
    train.greet(hello())
    b, w = struct.pack("<e", 1), struct.pack("<2f", 1, 2)
    rows = (("b", "float16", (1,)), ("w", "float32", (2, 1)))
    train.send(m.Define(1, rows, (Part(0, 10, "raw", 10, 0),)), w + b)
    push = m.Push(2, 1, True, -1, (Part(0, 10, "raw", 10, 0),))
    gradient = struct.pack("<2f", 2, -2) + struct.pack("<e", 4)
    train.send(push, gradient)
    train.send(m.Push(3, 2, False, -1, (Part(0, 8, "raw", 8, 1),)), struct.pack("<2f", 1, 1))
    train.send(m.Fetch(4, 1))
    train.send(m.Fetch(5, 2))

    back = Recorder("The connection was lost: connect again, push again", engine=train.engine)
    back.greet(hello(epoch=2))
    again = m.Push(1, 2, True, -1, (Part(0, 8, "raw", 8, 1),))
    back.send(again, struct.pack("<2f", 1, 1))

    refused = Recorder("A refused push: the connection lives, nothing changed", engine=train.engine)
    refused.greet(hello(epoch=3))
    bad = m.Push(1, 3, False, -1, (Part(0, 8, "raw", 8, 2),))
    refused.send(bad, struct.pack("<2f", 1, float("nan")))
    refused.send(m.Fetch(2, 2))
    refused.send(m.Reapply(3, 4, True, -1, ((1, 2, 2),)))

    data = Recorder("A data set: a task, a push that covers it, and no more", engine=train.engine)
    data.greet(hello(epoch=4))
    asked = TakeTask(1, "d", 4, 1, 0, 0, 1, 16, True, "", (), ())
    data.send(asked)
    data.send(CoverPush(2, 5, ((1, 0, 4),)))
    data.send(m.Push(2, 5, False, -1, (Part(0, 8, "raw", 8, 2),)), struct.pack("<2f", 1, 1))
    data.send(replace(asked, id=3))
    data.send(CoverPush(4, 6, ((1, 0, 4),)))
    data.send(m.Push(4, 6, False, -1, (Part(0, 8, "raw", 8, 3),)), struct.pack("<2f", 1, 1))

    layout = Layout(rows)
    alone = Recorder("Ready to average, and no other worker is there", engine=_averaging(layout))
    alone.greet(hello())
    alone.send(JoinRound(1, "10.0.0.5", 40001, 0, layout.digest, NONCES[0]))
    near = Recorder("A gradient and parameters in shared memory", near=True)
    near.greet(hello())
    near.send(m.Define(1, rows, (Part(0, 10, "raw", 10, 0),)), w + b)
    near.share("client", 1 << 14)
    near.send(push, gradient)
    near.send(m.Release(2))

    sharded = exchange(hello(), NONCES[0])
    scripts = (plain, token, wrong, train, back, refused, _tables(), data, alone, near)
    return [
        *(script.done() for script in scripts),
        two_workers_average(),
        two_workers_and_a_relay(),
        _conversation("Two shards: the client and the lead", sharded.to_lead),
        _conversation("Two shards: the client and the follower", sharded.to_follower),
        _conversation("Two shards: the lead, as a client, and the follower", sharded.orders),
        _fed(),
        *_promotions(),
    ]


def _conversation(
    title: str, sent: Iterable[tuple[Side, Message, tuple[bytes, ...]]]
) -> Conversation:
    steps = (
        Example(f"{title} / {n} {message.kind}", side, message, payloads)
        for n, (side, message, payloads) in enumerate(sent, 1)
    )
    return Conversation(title, tuple(steps))


def _averaging(layout: Layout) -> Engine:
    """Return an engine whose workers average a model of that layout."""
    engine = Engine(Average(), Options(backend="numpy"))
    rows = tuple((name, dtype, shape) for name, dtype, shape, _offset in layout.rows)
    engine.handle(Initialised(0.0, rows, np.zeros(layout.nbytes, np.uint8)))
    return engine


def _tables() -> Recorder:
    """Return a conversation about a table of three rows of two."""
    m = messages
    script = Recorder("A table: fetch rows, push, push and fetch, a row that is none")
    script.greet(hello())
    script.send(m.Define(1, (), (), (("t", 3, 2, "float32", "uniform", 0.5, 0),)))
    script.send(m.FetchRows(2, 0, _rows_of(2, 8)), struct.pack("<2q", 2, 0))
    twice, gradients = struct.pack("<2q", 2, 2), struct.pack("<4f", 1, 0, 1, 2)
    script.send(m.PushRows(3, 1, 0, 0, (*_rows_of(2, 8), *_rows_of(2, 8))), twice, gradients)
    parts = (*_rows_of(1, 8), *_rows_of(2, 8), *_rows_of(1, 8))
    payloads = struct.pack("<q", 0), struct.pack("<2q", 2, 0), struct.pack("<2f", 1, 1)
    script.send(m.PushRows(4, 2, 0, 1, parts), *payloads)
    script.send(m.FetchRows(5, 0, _rows_of(1, 8)), struct.pack("<q", 3))
    return script
