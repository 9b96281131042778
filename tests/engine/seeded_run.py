"""Seeded runs of an engine, as lists of steps that any engine can be given.

`Script` drives an engine with clients that a seed chooses: they join, push (whole, in part, coded,
bad, again), fetch, request and push rows, leave and come back; time passes; replies are sent late.
`Driver` gives such steps to another engine, and returns everything that it does as plain values.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiops.algorithms import find
from aiops.codecs import find as find_codec
from aiops.codecs import raw
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    BudgetTick,
    Effect,
    Event,
    Initialised,
    Joined,
    Left,
    Options,
    Received,
    Reply,
    SnapshotDue,
    Tick,
    Warm,
)
from aiops.model.arena import aligned
from aiops.model.layout import Array, Layout, Tensor
from aiops.model.parts import Part
from aiops.model.tables import Table, Tables, fetch_parts, push_parts
from aiops.store.capture_job import CaptureJob
from aiops.store.parameters import UpdateJob
from aiops.store.resources import Resources
from aiops.store.snapshots import Lease
from aiops.store.sparse_table import TableJob
from aiops.wire.data_messages import CoverPush, GivenTask, TakeTask
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import (
    Define,
    Fetch,
    FetchRows,
    Hello,
    Leave,
    Message,
    Push,
    PushRows,
    Reapply,
)
from aiops.wire.ring_messages import JoinRound, SettleRound

MODEL: Mapping[str, Array] = {
    "wide": np.linspace(-1, 1, 480).reshape(24, 20).astype(np.float32),
    "long": np.linspace(1, 2, 300).astype(np.float32),
    "bias": np.linspace(0, 1, 5).astype(np.float32),
    "exact": np.linspace(-2, 2, 7),
    "narrow": np.linspace(0, 1, 6).astype(np.float16),
}

TABLES = {
    "items": Table(60, 2, max_rows=8, max_age=20),
    "users": Table(40, 3),
    "words": Table(1000, 8, "float64", "normal", 0.1, 7, max_age=4),
}

CLIENTS = 4


@dataclass(frozen=True)
class Case:
    """An engine's settings, and those of its clients."""

    policy: str = "asgd"
    settings: tuple[tuple[str, Any], ...] = ()
    push: str = "raw"
    fetch: str = ""
    gate: str = ""
    recall: bool = True
    budget: bool = False
    tables: bool = False
    float32: bool = False  # all tensors are: then kernels read payloads themselves
    live: int = 8
    filter: str = "off"
    large: bool = False  # its updates are shared among threads

    def engine(self, machine: Resources | None = None, backend: str = "numpy") -> Engine:
        """A fresh engine."""
        options = Options(
            workers=CLIENTS,
            worker_deadline=20.0,
            live=self.live,
            backend=backend,
            run="a run",
            budget=1_000_000 if self.budget else None,
            gate=self.gate,
            recall=(20_000 << 10 * self.large) if self.recall else 0,
            push_codec=() if self.push == "raw" else (self.push,),
            fetch_codec=(self.fetch,) if self.fetch else (),
            filter=self.filter,
        )
        return Engine(find(self.policy).make(dict(self.settings)), options, machine)

    def model(self) -> dict[str, Array]:
        """The parameters to begin with."""
        model = dict(MODEL)
        if self.large:
            model["wide"] = np.linspace(-1, 1, 2400 * 1000).reshape(2400, 1000).astype(np.float32)
        return {name: a for name, a in model.items() if not self.float32 or a.dtype == np.float32}


@dataclass(slots=True)
class Step:
    """An event without an engine: its kind and values, and the payload of a message."""

    kind: str
    time: float
    values: tuple[Any, ...] = ()
    payload: bytes = b""
    leased: bool = False


class Driver:
    """Gives steps to an engine; returns its effects as plain values."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outstanding: Apply | None = None
        self.leases: list[Lease] = []
        self.keep = False  # the leases of replies, until the caller releases them

    def take(self, step: Step, row: int) -> list[Any]:
        """Handle a step's event, the row'th."""
        found: list[Any] = []
        if step.kind == "applied":
            assert self.outstanding is not None
            apply, self.outstanding = self.outstanding, None
            sums = apply.run()
            found.append(("sums", sums.tobytes()))
            event: Event = Applied(step.time, apply.ticket, sums)
        else:
            event = event_of(self.engine, step, row)
        effects = self.engine.handle(event, step.leased)
        return found + [self._told(effect) for effect in effects]

    def _told(self, effect: Effect) -> Any:
        if isinstance(effect, Reply):
            return self._replied(effect)
        if isinstance(effect, Apply):
            assert self.outstanding is None, "one update at a time"
            self.outstanding = effect
            return "apply", effect.ticket, *_job(effect.job)
        if isinstance(effect, Warm):
            return "warm"
        return repr(effect)

    def _replied(self, reply: Reply) -> Any:
        payloads: list[bytes] = []
        if reply.rows is not None:
            payloads.append(bytes(reply.rows.answer))
            reply.rows.free()
        if reply.lease is not None:
            parts = reply.message.parts  # type: ignore[attr-defined]
            payloads += [bytes(v) for views in reply.lease.borrowed_views(parts) for v in views]
            if self.keep:
                self.leases.append(reply.lease)
            else:
                reply.lease.release()
        return "reply", reply.peer, encode(reply.message), payloads


def _job(job: Any) -> tuple[Any, ...]:
    """What an update is to do, in values."""
    if isinstance(job, UpdateJob):
        gradient = None if job.gradient is None else bytes(job.gradient.data)
        arrays = (job.weights, job.touched, job.steps, job.scalars, job.scales, job.pushed)
        sent = None if job.sent is None else (job.sent.number, bytes(job.sent.arena.data))
        clip = None if job.clip is None else (job.clip.limits, str(job.clip.groups))
        numbers = job.factor, clip, job.target is None
        return *numbers, gradient, sent, *(None if a is None else a.tobytes() for a in arrays)
    if isinstance(job, TableJob):
        pushed = None if job.pushed is None else [each.tobytes() for each in job.pushed]
        return job.step, pushed, None if job.wanted is None else job.wanted[0].tobytes()
    return (type(job).__name__,)


def event_of(engine: Engine, step: Step, row: int) -> Event:
    """The event of a step, its payload in a sink of this engine."""
    match step.kind:
        case "joined":
            return Joined(step.time, *step.values)
        case "received":
            peer, message = step.values
            return Received(step.time, peer, message, _sink(engine, message, step.payload), row)
        case "left":
            return Left(step.time, *step.values)
        case "tick":
            return Tick(step.time)
        case "snapshot":
            return SnapshotDue(step.time, *step.values)
        case "budget":
            return BudgetTick(step.time, *step.values)
        case "initialised":
            rows, tables = step.values
            data = aligned(len(step.payload))
            data[:] = np.frombuffer(step.payload, np.uint8)
            return Initialised(step.time, rows, data, tables)
    raise AssertionError(step.kind)


def _sink(engine: Engine, message: Message, payload: bytes) -> Any:
    if not getattr(message, "parts", ()):
        return None
    sink = engine.admission.sink_for(message)
    assert sink is not None, "the receive buffers are used up"
    rest = memoryview(payload)
    for number, part in enumerate(message.parts):  # type: ignore[attr-defined]
        offset = 0
        while offset < part.nbytes:
            view = sink.view(number, offset)[: part.nbytes - offset]
            view[:] = rest[: len(view)]
            sink.filled(number, offset, len(view))
            rest, offset = rest[len(view) :], offset + len(view)
    return sink


@dataclass(slots=True)
class Client:
    """A client of a script."""

    name: str
    worker: bool
    peer: int = 0  # 0: it is away
    epoch: int = 0
    seq: int = 0
    ids: int = 0
    have: int = -1
    last: Message | None = None
    payload: bytes = b""
    encoders: dict[str, Any] = field(default_factory=dict)
    tasks: list[GivenTask] = field(default_factory=list)


class Script(Driver):
    """Drives an engine as a seed chooses, and notes each step with everything that it did."""

    def __init__(self, case: Case, seed: int, machine: Resources | None = None) -> None:
        super().__init__(case.engine(machine))
        self.case, self.rng, self.numpy = case, random.Random(seed), np.random.default_rng(seed)
        self.data = random.Random(seed)  # of all that has to do with data sets
        self.keep = True
        self.steps: list[Step] = []
        self.effects: list[list[Any]] = []
        self.time, self.peers = 1.0, 0
        self.clients = [Client(f"client-{i}", i < CLIENTS) for i in range(CLIENTS + 1)]

    def run(self, steps: int) -> Script:
        """Make so and so many steps."""
        for client in self.clients[:2]:
            self._join(client)
        self._begin()
        while len(self.steps) < steps:
            self.time += self.rng.choice((0.0, 0.01, 0.3))
            self._any()
        return self

    def _post(self, kind: str, *values: Any, payload: bytes = b"") -> None:
        step = Step(kind, self.time, values, payload, self.engine.freeze())
        self.steps.append(step)
        self.effects.append(self.take(step, len(self.steps)))
        for effect in self.effects[-1]:
            if effect[0] == "reply" and isinstance(given := decode(effect[2]), GivenTask):
                for client in self.clients:
                    if client.peer == effect[1] and given.task:
                        client.tasks.append(given)

    def _any(self) -> None:
        client = self.rng.choice(self.clients)
        if self.leases and self.rng.random() < 0.4:
            self.leases.pop(self.rng.randrange(len(self.leases))).release()
        match self.rng.random():
            case luck if luck < 0.45 and self.outstanding is not None:
                self._post("applied")
            case luck if luck < 0.5 and not self._snapshot_waits():
                self._post("snapshot", len(self.steps))
            case luck if luck < 0.53:
                self.time += self.rng.choice((1.0, 25.0))
                self._post("tick")
            case _ if client.peer == 0:
                self._join(client)
            case luck if luck < 0.57:
                self._leave(client)
            case luck if luck < 0.67 and self.case.budget:
                counts = self.rng.randrange(2_000_000), self.rng.randrange(10_000), 4000
                self._post("budget", *counts, 100, self.rng.randrange(4), self.rng.random() < 0.7)
            case _:
                self._message(client)

    def _snapshot_waits(self) -> bool:
        training = self.engine.training
        if training is None:
            return True
        queue, now = training.updates.queued, self.outstanding
        return any(isinstance(item, CaptureJob) for item in queue) or (
            now is not None and isinstance(now.job, CaptureJob)
        )

    # ------------------------------------------------------------ connections

    def _join(self, client: Client) -> None:
        self.peers += 1
        client.peer, client.epoch = self.peers, client.epoch + 1
        role = "worker" if client.worker else "observer"
        hello = Hello(
            *(0, 1, client.name, client.epoch, f"name of {client.name}", role),
            *(False, b"n" * 16, "test"),
        )
        self._post("joined", client.peer, hello)

    def _leave(self, client: Client) -> None:
        if self.rng.random() < 0.3:
            self._send(client, Leave(self._id(client)))
            client.last = None
        else:
            self._post("left", client.peer)
        client.peer = 0

    def _begin(self) -> None:
        model = self.case.model()
        tables = Tables(TABLES, model).described if self.case.tables else ()
        layout = Layout.of(model)
        data = b"".join(bytes(raw.encode(model[tensor.name])) for tensor in layout.tensors)
        rows = tuple((t.name, t.dtype.name, t.shape) for t in layout.tensors)
        if self.rng.random() < 0.5:
            self._post("initialised", rows, tuple((row, 0) for row in tables), payload=data)
        else:
            whole = (Part(0, len(data), "raw", len(data), 0),)
            client = self.clients[0]
            self._send(client, Define(self._id(client), rows, whole, tables), data)

    # ------------------------------------------------------------ messages

    def _id(self, client: Client) -> int:
        client.ids += 1
        return 1000 * client.epoch + client.ids

    def _send(self, client: Client, message: Message, payload: bytes = b"") -> None:
        self._post("received", client.peer, message, payload=payload)

    def _message(self, client: Client) -> None:
        rng, coded = self.rng, bool(self.case.fetch) and self.rng.random() < 0.8
        version = self.engine.version
        if self.data.random() < 0.1:
            self._take_task(client)
        id, have = self._id(client), rng.choice((-1, version, client.have, max(version - 9, 0)))
        wants = ((0, 2, have), (3, 4, -1)) if rng.random() < 0.2 and not self.case.float32 else ()
        client.have = self.engine.version
        luck = rng.random()
        if self.case.tables and luck < 0.35:
            self._rows(client, id)
        elif luck < 0.5 or not client.worker:
            self._send(client, Fetch(id, have, wants, coded, id % 5 == 0))
        elif self.case.policy == "average" and luck < 0.8:
            layout = self.engine.defined_store.layout
            port = rng.choice((0, 4000, 4001))
            nonce = bytes([rng.randrange(256)] * 16)
            if rng.random() < 0.3:
                number = rng.randrange(1 + self.engine.rendezvous.rounds)
                self._send(client, SettleRound(id, number, rng.random() < 0.8, ()))
                return
            known = rng.randrange(2), layout.digest, nonce, b"", rng.random() < 0.5
            self._send(client, JoinRound(id, "127.0.0.1", port, *known))
        elif luck < 0.58 and client.last is not None:  # on this connection, or a newer one
            again = copy.copy(client.last)
            again.id = id
            self._send(client, again, client.payload)
        elif luck < 0.74 and self.case.recall:
            client.seq += 1
            self._send_push(client, Reapply(id, client.seq, rng.random() < 0.5, have, wants, coded))
        else:
            client.seq += 1
            parts, payload = self._gradient(client)
            fetch, count = rng.random() < 0.6, rng.choice((1, 1, 3))
            push = Push(id, client.seq, fetch, have, parts, wants, coded, count)
            self._send_push(client, push, payload)

    def _send_push(self, client: Client, message: Message, payload: bytes = b"") -> None:
        client.last, client.payload = message, payload
        if client.tasks and self.data.random() < 0.6:
            task = self.data.choice(client.tasks)
            start = self.data.randrange(task.start, task.stop)
            stop = self.data.randrange(start, task.stop) + 1
            cover = CoverPush(self._id(client), client.seq, ((task.task, start, stop),))
            self._send(client, cover)
        self._send(client, message, payload)

    def _take_task(self, client: Client) -> None:
        data = self.data
        client.tasks = [task for task in client.tasks if data.random() < 0.8]
        keeps = tuple(task.task for task in client.tasks)
        seen = tuple((t.task, t.start, t.start + 1) for t in client.tasks if data.random() < 0.1)
        holder = data.choice(("", "", "client-0"))
        sizes = data.choice((0, 3, 10)), data.random() < 0.3
        known = data.choice(("a", "b")), 40, 1, 0, 0, 50
        self._send(client, TakeTask(self._id(client), *known, *sizes, holder, keeps, seen))

    def _gradient(self, client: Client) -> tuple[tuple[Part, ...], bytes]:
        """A gradient of all tensors, or of some, at a version not long ago."""
        store, rng = self.engine.defined_store, self.rng
        layout, behind = store.layout, rng.choice((0, 0, 0, 1, 3))
        indices = range(len(layout.tensors))
        if rng.random() < 0.3:
            indices = sorted(rng.sample(indices, rng.randrange(1, len(indices))))
        level = store.current.level
        whole = len(indices) == len(layout.tensors) and self.case.push == "raw"
        if whole and level is not None:
            base = max(level - behind, 0)
            data = b"".join(self._values(layout.tensors[i]) for i in indices)
            return (Part(0, layout.nbytes, "raw", layout.nbytes, base),), data
        parts, payloads = [], []
        for index in indices:
            tensor = layout.tensors[index]
            base = max(int(store.current.tensor_versions[index]) - behind, 0)
            codec, data = self._coded(client, tensor)
            end = tensor.offset + tensor.nbytes
            parts.append(Part(tensor.offset, end, codec, len(data), base))
            payloads.append(data)
        return tuple(parts), b"".join(payloads)

    def _values(self, tensor: Tensor) -> bytes:
        values = self.numpy.normal(0, 0.3, tensor.shape).astype(tensor.dtype)
        if self.rng.random() < 0.01:
            values.reshape(-1)[0] = np.nan
        return bytes(raw.encode(values))

    def _coded(self, client: Client, tensor: Tensor) -> tuple[str, bytes]:
        data = self._values(tensor)
        codec = find_codec(self.case.push)
        if self.case.push == "raw" or tensor.dtype != np.float32 or len(tensor.shape) < 2:
            return "raw", data
        if tensor.name not in client.encoders:
            client.encoders[tensor.name] = codec.encoder(
                tensor.shape, feedback=True, backend="numpy"
            )
        values = np.nan_to_num(np.frombuffer(data, np.float32))
        return codec.name, bytes(client.encoders[tensor.name].encode(values))

    def _rows(self, client: Client, id: int) -> None:
        rng, number = self.rng, self.rng.randrange(len(TABLES))
        name = sorted(TABLES)[number]
        table, version = TABLES[name], self.engine.tables[number].version
        wanted = self.numpy.integers(0, table.rows, rng.choice((0, 3)))
        if rng.random() < 0.4 or not client.worker:
            wanted = self.numpy.integers(0, table.rows, 4)
            message: Message = FetchRows(id, number, fetch_parts(table, len(wanted)))
            self._send(client, message, wanted.astype("<i8").tobytes())
            return
        client.seq += 1
        pushed = self.numpy.integers(0, table.rows, rng.randrange(1, 6))
        grads = self.numpy.normal(0, 0.3, (len(pushed), table.width)).astype(table.dtype)
        parts = push_parts(table, len(pushed), len(wanted))
        base = max(version - rng.choice((0, 1)), 0)
        push = PushRows(id, client.seq, number, base, parts)
        payload = pushed.astype("<i8").tobytes() + wanted.astype("<i8").tobytes() + grads.tobytes()
        self._send_push(client, push, payload)
