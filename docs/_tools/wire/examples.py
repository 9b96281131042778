"""One message of each kind, and whole conversations, as the code that speaks the wire says them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from aiops.algorithms.asgd import ASGD
from aiops.algorithms.average import Average
from aiops.averaging.ring_allreduce import Flat, Ring
from aiops.averaging.ring_allreduce import proof as ring_proof
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Event, Initialised, Joined, Options, Received, Reply
from aiops.model.arena import Arena
from aiops.model.layout import Bytes, Layout
from aiops.model.parts import Part, Parts
from aiops.wire import messages
from aiops.wire.connection import Connection
from aiops.wire.handshake import Greeter, answer, check_welcome, proof
from aiops.wire.messages import Message
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Sink
from aiops.wire.state_machine import HANDSHAKE, Side
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
        return messages.encode(self.message)

    @property
    def frame(self) -> bytes:
        """The whole message's bytes, as the sender's `Connection` writes them."""
        speaker = Connection(self.sender, _Kept)
        kind = self.message.kind
        speaker.state = next(s for s, says in HANDSHAKE.items() if kind in says[self.sender])
        views = [[memoryview(payload)] for payload in self.payloads]
        return b"".join(speaker.send(self.message, views, self.places))


@dataclass(frozen=True)
class Conversation:
    """Whole messages in the order in which they are said on one connection."""

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


def hello(epoch: int = 1, role: str = "worker") -> messages.Hello:
    """Return the greeting of the examples' client."""
    return messages.Hello(0, 1, "5f0c", epoch, "w0", role, False, NONCES[0], "example/1")


def one_of_each() -> list[Example]:
    """Return one small message of each kind."""
    m = messages
    rows, row = (("w", "float32", (3,)),), ("w", "float32", (3,), 0)
    push = (*_rows_of(1, 8), *_rows_of(2, 8), *_rows_of(1, 4))
    pushed = struct.pack("<q", 5), struct.pack("<2q", 0, 5), struct.pack("<f", 0.5)
    refused = "the push holds no tensor: push at least one"
    vbars = struct.pack("<f", 0.25)
    ring = (("10.0.0.5", 40001, True), ("10.0.0.6", 40001, True))
    digest = Layout(rows).digest
    return [
        _said("client", hello()),
        _said("client", m.Prove(0, proof(TOKEN, "client", *NONCES, hello().client))),
        _said("client", m.Define(1, rows, _floats(0)), struct.pack("<3f", 1, 2, 3)),
        _said("client", m.Describe(2)),
        _said("client", m.Push(3, 1, True, 6, _floats(6)), struct.pack("<3f", 0.5, -1, 0)),
        _said("client", m.Again(11, 2, False, -1)),
        _said("client", m.Fetch(4, -1, ((0, 1, 6),), True)),
        _said("client", m.FetchRows(8, 0, _rows_of(1, 8)), struct.pack("<q", 5)),
        _said("client", m.PushRows(9, 2, 0, 6, push), *pushed),
        _said("client", m.Stats(5)),
        _said("client", m.Ping(6)),
        _said("client", m.Leave(7)),
        _said("client", m.Meet(8, "10.0.0.5", 40001, 2, digest, NONCES[0])),
        _said("server", m.Challenge(0, NONCES[1])),
        _said("server", m.Welcome(0, 1, "8c2f", b"", "fasgd", {"lr": 0.5}, {}, 7, (row,), 3)),
        _said("server", m.Model(1, True, 0, (row,))),
        _said(
            "server",
            m.Ack(3, 7, 7, True, 1, 0.5, 0.25, vbars, _floats(7)),
            struct.pack("<3f", 3, 2, 1),
        ),
        _said("server", m.Params(4, 7)),
        _said("server", m.TableRows(9, 7, 0, _rows_of(2, 4)), struct.pack("<2f", 1, 2)),
        _said("server", m.Report(5, {"version": 7, "workers": ()})),
        _said("server", m.Round(8, 3, 0, ring, bytes(range(32)))),
        _said("server", m.Pong(6)),
        _said("server", m.Error(3, "bad-push", refused, {}, False, 7)),
        _said("server", m.Share(0, 1, 16_384)),
        _said("client", m.Release(3)),
        *_of_shards(row),
        _said("client", m.Greet(0, 3, 0, ring_proof(bytes(range(32)), "client", 3, 0))),
        _said("client", m.Chunk(0, 1, (Part(0, 4, "raw", 4, 3),)), struct.pack("<f", 1)),
    ]


def _of_shards(row: tuple[str, str, tuple[int, ...], int]) -> list[Example]:
    """Return one small message of each kind that shards have to do with."""
    m = messages
    who = "5f0c", 1, "w0", "8c2f", False, NONCES[0], "example/1"
    half, numbers = (Part(8, 12, "raw", 4, 7),), struct.pack("<d", 0.5)
    work = {"factor": 1.0, "measure": False, "sent": -1, "spare": True, "touched": None}
    return [
        _said("client", m.Follow(0, 1, *who)),
        _said("server", m.Attached(0, 1, b"")),
        _said("client", m.Portion(3, 0, half), struct.pack("<f", 0)),
        _said("client", m.Lead(0, 1, "8c2f", 1, "shard 1 of 2", *who[3:], "fasgd", {"lr": 0.5})),
        _said(
            "client",
            m.Begin(0, {}, (row,), (("", 7172, 8),), 1, half),
            struct.pack("<f", 3),
        ),
        _said("client", m.Expect(1, "5f0c", 1, 3, ((8, 12, 7),))),
        _said("client", m.Use(1, 1, 7, {**work, "steps": numbers})),
        _said("client", m.Send(3, "5f0c", 1, 8, ((8, 12, 8),))),
        _said("client", m.SendCoded(3, "5f0c", 1, 8, (), ((8, 12, 1),))),
        _said("client", m.Hold(0, 8, True, False)),
        _said("client", m.Forget(1, False)),
        _said("client", m.Count(2)),
        _said("server", m.Arrived(1, {})),
        _said("server", m.Done(1, struct.pack("<q", 1 << 22))),
        _said("server", m.Counted(2, {"5f0c": (52, 9, 1, 0, {"portion": (1, 48, 4)}, {})})),
    ]


def _said(sender: Side, message: Message, *payloads: bytes) -> Example:
    return Example(message.kind, sender, message, payloads)


def _floats(version: int) -> Parts:
    """Return the one part of a model of three float32."""
    return (Part(0, 12, "raw", 12, version),)


def _rows_of(count: int, each: int) -> Parts:
    """Return the one part of a payload of so many rows, or ids, of so many bytes."""
    return (Part(0, count, "raw", count * each, 0),)


class Script:
    """A client and a server that talk through memory, and what they say.

    Both sides are the real thing: every byte passes a `Connection` at each end.

    With ``near`` they are on one machine, and what is said after `share` is lent: each side has one
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
        self._greeter = Greeter(token, NONCES[1])
        self._wires: dict[Side, Connection] = {
            "client": Connection("client", _Kept),
            "server": Connection("server", self.engine.intake.place),
        }
        if near:
            self._wires["client"].shared = SharedPayloads(lambda nbytes: self._segments["server"])
            self._wires["server"].shared = SharedPayloads(lambda nbytes: self._segments["client"])
        self._peer = 0

    def share(self, sender: Side, nbytes: int) -> None:
        """Have a side show the other its segment."""
        self._segments[sender] = np.zeros(nbytes, np.uint8)
        self._carry(sender, messages.Share(0, 1, nbytes), ())

    def say(self, message: Message, *payloads: bytes) -> Message:
        """Have the client say something; return the last thing that the server said."""
        for heard, sink in self._carry("client", message, payloads):
            self._serve(heard, sink)
        return self.steps[-1].message

    def greet(self, hello: messages.Hello, token: str | None = None) -> Message:
        """Go through the handshake."""
        self._peer = hello.epoch
        reply = self.say(hello)
        if isinstance(reply, messages.Challenge):
            reply = self.say(answer(reply, hello, token, "the server"))
        if isinstance(reply, messages.Welcome) and token is not None:
            check_welcome(reply, hello, messages.Challenge(0, NONCES[1]), token, "the server")
        return reply

    def done(self) -> Conversation:
        """Return what was said."""
        return Conversation(self.title, tuple(self.steps))

    def _carry(
        self, sender: Side, message: Message, payloads: Iterable[bytes]
    ) -> list[tuple[Message, Sink | None]]:
        """Move a message across, and note it."""
        said = tuple(bytes(payload) for payload in payloads)
        name = f"{self.title} / {len(self.steps) + 1} {message.kind}"
        segment = self._segments.get(sender)
        places = ((1, 0),) * len(said) if segment is not None else ()
        if segment is not None and said:
            segment[: len(said[0])] = np.frombuffer(said[0], np.uint8)
        self.steps.append(Example(name, sender, message, said, places))
        views = [[memoryview(payload)] for payload in said]
        stream = b"".join(self._wires[sender].send(message, views, places))
        receiver = self._wires["server" if sender == "client" else "client"]
        whole: list[tuple[Message, Sink | None]] = []
        while stream:
            view = receiver.next_buffer()[: len(stream)]
            view[:], stream = stream[: len(view)], stream[len(view) :]
            whole += receiver.received(len(view))
        return whole

    def _serve(self, message: Message, sink: Sink | None) -> None:
        if isinstance(message, messages.Share | messages.Release):
            return  # that is between the two ends of the connection
        if self._greeter.admitted:
            self._post(Received(0.0, self._peer, message, sink))
            return
        reply = self._greeter.greet(message)
        if reply is not None:
            self._carry("server", reply, ())
            return
        assert self._greeter.hello is not None
        self._post(Joined(0.0, self._peer, self._greeter.hello, self._greeter.proof))

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
    """Return what the first of two workers, at [1, 2, 3], says to the second, at [3, 6, 9].

    The second has a connection of its own to the first, on which it says as much.
    """
    title, secret, number = "Two workers of a round", bytes(range(32)), 3
    layout = Layout((("w", "float32", (3,)),))
    rings = []
    for rank, values in enumerate(((1, 2, 3), (3, 6, 9))):
        flat, arena = Flat(layout), Arena(layout)
        arena.views["w"][:] = values
        flat.load(arena)
        rings.append(Ring(rank, [True, True], flat))
    said: list[tuple[Side, Message, bytes]] = [
        ("client", messages.Greet(0, number, 0, ring_proof(secret, "client", number, 0)), b""),
        ("server", messages.Greet(0, number, 1, ring_proof(secret, "server", number, 1)), b""),
    ]
    (first,), (other,) = (ring.begin() for ring in rings)
    rings[0].room(*other[:3])[:] = other.view  # on the other connection, from the second worker
    second = rings[0].received(other.start, other.hop)
    assert second is not None
    for piece in (first, second):
        part = Part(piece.start, piece.stop, "raw", piece.stop - piece.start, number)
        said.append(("client", messages.Chunk(0, piece.hop, (part,)), bytes(piece.view)))
    return Conversation(
        title,
        tuple(
            Example(f"{title} / {n} {m.kind}", side, m, (data,) if data else ())
            for n, (side, m, data) in enumerate(said, 1)
        ),
    )


def conversations() -> list[Conversation]:
    """Return the conversations of the page, as a real engine has them."""
    m = messages
    plain = Script("Without a token")
    plain.greet(hello(role="observer"))
    for message in (m.Ping(1), m.Describe(2), m.Leave(3)):
        plain.say(message)
    token = Script("With a token", TOKEN)
    token.greet(hello(), TOKEN)
    token.say(m.Leave(1))
    wrong = Script("With a wrong token", TOKEN)
    wrong.greet(hello(), "guess")

    train = Script("Define a model, push, fetch")
    train.greet(hello())
    b, w = struct.pack("<e", 1), struct.pack("<2f", 1, 2)
    rows = (("b", "float16", (1,)), ("w", "float32", (2, 1)))
    train.say(m.Define(1, rows, (Part(0, 10, "raw", 10, 0),)), w + b)
    push = m.Push(2, 1, True, -1, (Part(0, 10, "raw", 10, 0),))
    gradient = struct.pack("<2f", 2, -2) + struct.pack("<e", 4)
    train.say(push, gradient)
    train.say(m.Push(3, 2, False, -1, (Part(0, 8, "raw", 8, 1),)), struct.pack("<2f", 1, 1))
    train.say(m.Fetch(4, 1))
    train.say(m.Fetch(5, 2))

    back = Script("The connection was lost: come back, push again", engine=train.engine)
    back.greet(hello(epoch=2))
    again = m.Push(1, 2, True, -1, (Part(0, 8, "raw", 8, 1),))
    back.say(again, struct.pack("<2f", 1, 1))

    refused = Script("A refused push: the connection lives, nothing changed", engine=train.engine)
    refused.greet(hello(epoch=3))
    bad = m.Push(1, 3, False, -1, (Part(0, 8, "raw", 8, 2),))
    refused.say(bad, struct.pack("<2f", 1, float("nan")))
    refused.say(m.Fetch(2, 2))
    refused.say(m.Again(3, 4, True, -1, ((1, 2, 2),)))

    layout = Layout(rows)
    alone = Script("Ready to average, and nobody else is there", engine=_averaging(layout))
    alone.greet(hello())
    alone.say(m.Meet(1, "10.0.0.5", 40001, 0, layout.digest, NONCES[0]))
    near = Script("A gradient and parameters in shared memory", near=True)
    near.greet(hello())
    near.say(m.Define(1, rows, (Part(0, 10, "raw", 10, 0),)), w + b)
    near.share("client", 1 << 14)
    near.say(push, gradient)
    near.say(m.Release(2))

    sharded = exchange(hello(), NONCES[0])
    scripts = (plain, token, wrong, train, back, refused, _tables(), alone, near)
    return [
        *(script.done() for script in scripts),
        two_workers_average(),
        _talk("Two shards: the client and the lead", sharded.to_lead),
        _talk("Two shards: the client and the follower", sharded.to_follower),
        _talk("Two shards: the lead, as a client, and the follower", sharded.orders),
    ]


def _talk(title: str, said: Iterable[tuple[Side, Message, tuple[bytes, ...]]]) -> Conversation:
    steps = (
        Example(f"{title} / {n} {message.kind}", side, message, payloads)
        for n, (side, message, payloads) in enumerate(said, 1)
    )
    return Conversation(title, tuple(steps))


def _averaging(layout: Layout) -> Engine:
    """Return an engine whose workers average a model of that layout."""
    engine = Engine(Average(), Options(backend="numpy"))
    rows = tuple((name, dtype, shape) for name, dtype, shape, _offset in layout.rows)
    engine.handle(Initialised(0.0, rows, np.zeros(layout.nbytes, np.uint8)))
    return engine


def _tables() -> Script:
    """Return a conversation about a table of three rows of two."""
    m = messages
    script = Script("A table: fetch rows, push, push and fetch, a row that is none")
    script.greet(hello())
    script.say(m.Define(1, (), (), (("t", 3, 2, "float32", "uniform", 0.5, 0),)))
    script.say(m.FetchRows(2, 0, _rows_of(2, 8)), struct.pack("<2q", 2, 0))
    twice, gradients = struct.pack("<2q", 2, 2), struct.pack("<4f", 1, 0, 1, 2)
    script.say(m.PushRows(3, 1, 0, 0, (*_rows_of(2, 8), *_rows_of(2, 8))), twice, gradients)
    parts = (*_rows_of(1, 8), *_rows_of(2, 8), *_rows_of(1, 8))
    payloads = struct.pack("<q", 0), struct.pack("<2q", 2, 0), struct.pack("<2f", 1, 1)
    script.say(m.PushRows(4, 2, 0, 1, parts), *payloads)
    script.say(m.FetchRows(5, 0, _rows_of(1, 8)), struct.pack("<q", 3))
    return script
