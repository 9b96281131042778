"""Hold a part of a sharded model, and carry out the lead's orders on it.

A follower decides only where an update is written (in place if no reader holds the version here).
It publishes a version only when an order names it: published as soon as it is computed, this shard
would be ahead of its lead, which may still order the version before to be sent (`aiops.shards`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.codecs.choice import CodecChoice
from aiops.engine.admission import Admission
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.events import (
    Applied,
    Apply,
    Drop,
    Effect,
    End,
    Event,
    Joined,
    Left,
    Note,
    Options,
    Received,
    Reply,
    Stopping,
    Warm,
)
from aiops.engine.steady import Steady
from aiops.errors import Refused, RemoteProtocolError
from aiops.model.arena import aligned
from aiops.model.layout import Bytes, Layout
from aiops.model.parts import Part
from aiops.model.placement import RAW, Placement
from aiops.shards.orders import REPLICA, ShardWork
from aiops.shards.receive import ShardBuffers
from aiops.store.delta_replica import DeltaReplica, ReplicaJob
from aiops.store.parameters import Store, UpdateJob
from aiops.store.resources import Resources
from aiops.store.snapshots import Lease, Version
from aiops.store.warmup import Warmup
from aiops.wire.connection import Connection
from aiops.wire.messages import (
    PROTOCOL,
    CountTraffic,
    Error,
    ExpectPush,
    FinishPush,
    HoldVersion,
    LeadHello,
    Leave,
    LoadShard,
    Message,
    Ping,
    Pong,
    Push,
    PushArrived,
    RunUpdate,
    SendIncrements,
    SendParams,
    ShardHello,
    ShardParts,
    ShardWelcome,
    TrafficCounted,
    UpdateDone,
)
from aiops.wire.sinks import Discard, Sink
from aiops.wire.traffic import Traffic

_DEPARTED = 4096  # clients whose traffic is remembered after they left


class Beginning(Sink):
    """The sink of the part of a model that a follower begins with.

    Parameters
    ----------
    nbytes
        The bytes of the part.
    lengths
        The bytes of each of its payloads, which are consecutive.
    """

    def __init__(self, nbytes: int, lengths: Sequence[int]) -> None:
        self.data: Bytes = aligned(nbytes)
        self._offsets = np.cumsum([0, *lengths]).tolist()

    def view(self, part: int, offset: int) -> memoryview:
        """Return the memory for the rest of a payload."""
        return self.data[self._offsets[part] + offset : self._offsets[part + 1]].data

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: the lead has surveyed the values."""

    def abandoned(self) -> None:
        """Do nothing: the lead is lost, and the server ends."""


class Follower:
    """A follower of a sharded model.

    Parameters
    ----------
    algorithm
        It must be the lead's; only its rule is used.
    options
        The settings of the server: kernels, the most versions alive, memory.
    machine
        Memory, threads and the device that the store uses.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        options: Options,
        machine: Resources | None = None,
    ) -> None:
        self.algorithm, self.options = algorithm, options
        self._machine = machine or Resources()
        parallel_map = self._machine.parallel_map
        make = self._machine.memory.buffer
        self.intake = Admission(
            options.max_model, options.backend, parallel_map=parallel_map, make=make
        )
        self._rooms = ShardBuffers(self.intake)
        self.store: Store | None = None
        self._lead: int | None = None  # its connection
        self._run = ""
        self._branches: dict[int, tuple[str, int]] = {}  # client and epoch, by connection
        self._peers: dict[tuple[str, int], int] = {}
        self._traffic: dict[int, Traffic] = {}  # of present connections
        self._past: OrderedDict[str, Traffic] = OrderedDict()  # of past connections, by client
        self._shadow: DeltaReplica | None = (
            None  # the delta replica, from which coded fetches are answered
        )
        self._outstanding: tuple[int, UpdateJob | ReplicaJob] | None = None
        self._computed: UpdateJob | None = None  # done, and not published yet
        self._held: dict[tuple[int, bool], Lease] = {}  # by version; True: the delta replica's
        self._effects: list[Effect] = []

    # ------------------------------------------------------------ the shell's calls

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def idle(self) -> bool:
        """True if no update is outstanding."""
        return self._outstanding is None

    @property
    def led(self) -> bool:
        """True if a lead is connected."""
        return self._lead is not None

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return None: only an engine that holds the whole model has a short way."""
        return None

    def flush(self) -> list[Effect]:
        """Return the effects of calls of `sink_for`: a follower has none (a lead has)."""
        return []

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        rule = self.algorithm.rule() if self._machine.device is None else None
        return Warm(Warmup(rule, self.options.backend).steps())

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections to drop: none, since the shell applies its deadlines itself."""
        return []

    @property
    def pools(self) -> Sequence[BufferPool]:
        """The pools that portions get their buffers from."""
        return self.intake.pools

    def sink_for(self, peer: int, message: Message) -> Sink | None:
        """Return the sink of a message's payloads, or None if there is no room now: call `wait`."""
        if peer == self._lead and isinstance(message, LoadShard):
            lengths = [part.nbytes for part in message.parts]
            if sum(lengths) > self.options.max_model:
                raise RemoteProtocolError(
                    f"load_shard: {sum(lengths)} bytes, more than --max-model"
                    f" {self.options.max_model}"
                )
            return Beginning(sum(lengths), lengths)
        branch = self._branches.get(peer)
        if branch is None or not isinstance(message, ShardParts):
            return Discard()
        return self._rooms.sink_for(*branch, message)

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it returns whether there was."""
        self._rooms.wait(again)

    # ------------------------------------------------------------ connections

    def _on_joined(self, event: Joined) -> None:
        hello = event.hello
        if isinstance(hello, LeadHello):
            if self._lead is not None:
                self._refuse(event.peer, hello.id, "this follower has its lead already")
                return
            mine = self.algorithm.name, self.algorithm.settings()
            if mine != (hello.policy, dict(hello.settings)):
                self._refuse(
                    *(event.peer, hello.id),
                    f"the lead's policy is {hello.policy} {dict(hello.settings)}, this follower's"
                    f" {mine[0]} {mine[1]}: start both with the same",
                )
                return
            self._lead, self._run = event.peer, hello.run
        elif isinstance(hello, ShardHello):
            if self._lead is None or hello.run != self._run:
                why = "its lead is another one" if self._lead is not None else "it has no lead yet"
                self._refuse(event.peer, hello.id, f"this follower cannot be followed: {why}")
                return
            key = (hello.client, hello.epoch)
            if key in self._peers:
                self._refuse(event.peer, hello.id, "this client has such a connection already")
                return
            for old, (client, epoch) in list(self._branches.items()):
                if client == hello.client and epoch < hello.epoch:
                    self._on_left(Left(event.time, old))
                    self._effects.append(Drop(old, f"{hello.name!r} has a newer connection"))
            self._branches[event.peer], self._peers[key] = key, event.peer
            self._traffic[event.peer] = event.traffic
        self._effects.append(Reply(event.peer, ShardWelcome(hello.id, PROTOCOL, event.proof)))

    def _refuse(self, peer: int, id: int, text: str) -> None:
        self._effects.append(Reply(peer, Error(id, "protocol", text, {}, True)))
        self._effects.append(Drop(peer, text))

    def _on_left(self, event: Left) -> None:
        if event.peer == self._lead:
            self._effects.append(End("its lead is gone"))
            return
        branch = self._branches.pop(event.peer, None)
        if branch is not None:
            self._peers.pop(branch, None)
            past = self._past.setdefault(branch[0], Traffic())
            past.add(self._traffic.pop(event.peer))
            self._past.move_to_end(branch[0])
            if len(self._past) > _DEPARTED:
                self._past.popitem(last=False)
            self._miss(self._rooms.left(*branch))

    def _miss(self, numbers: Sequence[int]) -> None:
        """Report pushes whose portions will not come, because their connection was lost."""
        for number in numbers:
            self._tell(PushArrived(number, {"code": LOST}))

    def _on_stopping(self, event: Stopping) -> None:
        """Do nothing: the lead learns of it when the connection ends."""

    # ------------------------------------------------------------ messages

    def _on_received(self, event: Received) -> None:
        message = event.message
        if isinstance(message, Ping):
            self._effects.append(Reply(event.peer, Pong(message.id)))
        elif isinstance(message, ShardParts):
            self._on_parts(event, message)
        elif event.peer == self._lead and type(message) in _ORDERS:
            try:
                _ORDERS[type(message)](self, event)
            except (ValueError, RemoteProtocolError) as error:
                self._effects.append(Note(f"its lead's order makes no sense: {error}"))
                self._refuse(event.peer, message.id, f"{message.kind}: {error}")
        elif not isinstance(message, Pong):
            self._effects.append(Drop(event.peer, f"{message.kind!r} is not for a follower"))

    def _on_parts(self, event: Received, message: ShardParts) -> None:
        branch = self._branches.get(event.peer)
        if branch is None:
            return
        came = self._rooms.arrived(*branch, message)
        if came is not None:
            self._tell(PushArrived(came.number, _told(came.fault)))

    def _tell(self, message: Message) -> None:
        if self._lead is not None:
            self._effects.append(Reply(self._lead, message))

    # ------------------------------------------------------------ orders

    def _on_load(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, LoadShard)
        if self.store is not None:
            raise ValueError("it has begun already")
        whole = Layout((row[:3] for row in message.model), empty=True)
        placement = Placement(whole, [0, *(row[2] for row in message.shards)])
        if not 0 < message.shard < len(placement):
            raise ValueError(f"there is no shard {message.shard}")
        layout = placement.layouts[message.shard]
        data = sink.data if isinstance(sink, Beginning) else aligned(0)
        if len(data) != layout.nbytes:
            raise ValueError(f"{len(data)} bytes came for {layout.nbytes}")
        try:
            self.store = Store(
                layout,
                self.algorithm.rule(),
                backend=self.options.backend,
                live=self.options.live,
                relaxed=self.options.relaxed,
                arena=self._machine.memory.holding(layout, data),
                machine=self._machine,
            )
        except MemoryError as error:
            raise ValueError(f"there is no room for its part of the model: {error}") from None
        self.store.read_packed(message.plan.get("push_codecs", ()))
        choice = CodecChoice.told(message.plan.get("fetch_codec", ()))
        if choice is None:
            raise ValueError("parameters are to be sent in a codec that is not known here")
        if choice:
            self._shadow = DeltaReplica(
                *(self.store.current, choice, self.options.backend),
                placement=placement,
                shard=message.shard,
                parallel_map=self._machine.parallel_map,
            )
        self.intake.defined(layout)
        self._rooms.begin(layout.begin)
        self._effects.append(Warm(self.store.warming()))

    def _on_expect(self, event: Received) -> None:
        assert isinstance(event.message, ExpectPush)
        self._rooms.expect(event.message)
        key = event.message.client, event.message.epoch
        if key not in self._peers and event.message.ranges:
            # A client attaches to all shards before it pushes. This one is not attached, so its
            # connection was lost, and the portion with it.
            self._miss(self._rooms.left(*key))

    def _on_finish(self, event: Received) -> None:
        assert isinstance(event.message, FinishPush)
        self._rooms.forget(event.message.id, keep=event.message.keep)

    def _on_run_update(self, event: Received) -> None:
        message, store = event.message, self._reached(event.message)
        assert isinstance(message, RunUpdate)
        if self._outstanding is not None:
            raise ValueError("one update at a time")
        if REPLICA in message.work:
            self._follow_model(message)
            return
        work = ShardWork(message.work, len(store.layout.tensors))
        job = UpdateJob(store, store.cost, factor=work.factor, measure=work.measure)
        covered = None
        if message.push:
            job.gradient = self._rooms.gradient(message.push)
            covered = job.gradient.cover.tensors
            job.weights = work.weights_of(len(covered))
        if work.steps_taken:
            touched = store.layout.all if work.touched is None else work.touched
            direct = job.gradient is not None and job.weights is None
            if direct and not np.array_equal(touched, covered):  # type: ignore[arg-type]
                raise ValueError("the update is of other tensors than the push")
            job.touched, job.steps = touched, work.steps(len(touched))
            job.scalars = work.scalars(len(touched), len(store.rule.scalars))
            if store.rule.reads:
                job.sent = self._version(work.sent, shadow=work.coded)
            if not work.measure:  # `spare`: later orders may still name the current version
                job.target = store.begin(work.spare)
        self._outstanding = message.id, job
        self._effects.append(Apply(message.id, job))

    def _follow_model(self, message: RunUpdate) -> None:
        """Bring the delta replica up to the model."""
        shadow, oldest = self._shadow, message.work[REPLICA]
        if shadow is None or type(oldest) is not int:
            raise ValueError("there is no shadow of this model")
        assert self.store is not None
        shadow.forget(oldest)
        job = shadow.follow(self.store.current)
        self._outstanding = message.id, job
        self._effects.append(Apply(message.id, job))

    def _on_applied(self, event: Applied) -> None:
        assert self._outstanding is not None
        ticket, job = self._outstanding
        self._outstanding = None
        if isinstance(job, ReplicaJob):
            job.shadow.followed(job, event.sums)
        elif job.target is not None:
            self._computed = job
        self._tell(UpdateDone(ticket, event.sums.astype("<i8").tobytes()))

    def _on_send_params(self, event: Received) -> None:
        message, store = event.message, self._reached(event.message)
        assert isinstance(message, SendParams)
        parts = tuple(Part(*run[:2], RAW, run[1] - run[0], run[2]) for run in message.ranges)
        begin = store.layout.begin
        if any(not begin <= p.start < p.stop <= begin + store.layout.nbytes for p in parts):
            raise ValueError("it holds other bytes")
        peer = self._peers.get((message.client, message.epoch)) if message.client else self._lead
        if peer is not None:
            answer = ShardParts(message.id, message.version, parts)
            self._effects.append(Reply(peer, answer, store.lease() if parts else None))

    def _on_send_increments(self, event: Received) -> None:
        message, shadow = event.message, self._shadow
        assert isinstance(message, SendIncrements)
        if shadow is None or shadow.current.number != message.version:
            raise ValueError(f"its shadow is not that of version {message.version}")
        peer = self._peers.get((message.client, message.epoch))
        if peer is not None:
            parts, lease = shadow.portion(message.ranges, message.increments)
            self._effects.append(Reply(peer, ShardParts(message.id, message.version, parts), lease))

    def _on_hold(self, event: Received) -> None:
        message = event.message
        assert isinstance(message, HoldVersion)
        key = message.version, message.replica
        if not message.keep:
            lease = self._held.pop(key, None)
            if lease is not None:
                lease.release()
        elif key not in self._held:
            self._held[key] = self._lease(message)

    def _on_count(self, event: Received) -> None:
        found: dict[str, Traffic] = {}
        for client, traffic in (
            *self._past.items(),
            *((self._branches[peer][0], traffic) for peer, traffic in self._traffic.items()),
        ):
            found.setdefault(client, Traffic()).add(traffic)
        told = {client: traffic.told() for client, traffic in found.items()}
        self._tell(TrafficCounted(event.message.id, told))

    def _on_leave(self, event: Received) -> None:
        self._lead = None
        self._effects.append(End())

    # ------------------------------------------------------------ inside

    def _reached(self, message: Message) -> Store:
        """Return the store at the version that an order names; publish it if just computed."""
        store, version = self.store, message.version  # type: ignore[attr-defined]
        if store is None:
            raise ValueError("the model has not begun")
        job = self._computed
        if job is not None and version == store.version + 1:
            assert job.target is not None
            self._computed = None
            store.commit(job.target, job.touched, np.zeros(len(job.touched), np.int64))
        if version != store.version:
            raise ValueError(f"it is about version {version}, and this is {store.version}")
        return store

    def _lease(self, message: HoldVersion) -> Lease:
        """Return a lease on the version that an order names, which must be the current one."""
        if not message.replica:
            return self._reached(message).lease()
        if self._shadow is None or self._shadow.current.number != message.version:
            raise ValueError(f"its shadow is not that of version {message.version}")
        return self._shadow.lease()

    def _version(self, number: int, *, shadow: bool) -> Version:
        lease = self._held.get((number, shadow))
        assert self.store is not None
        if lease is not None:
            return lease.version
        if shadow or number != self.store.version:
            raise ValueError(f"version {number} is not held any more")
        return self.store.current


LOST = "lost"
"""The code of a fault: the client's connection to this shard was lost."""


def _told(fault: Refused | None) -> Mapping[str, Any]:
    """Return a fault as the map that a lead is sent."""
    if fault is None:
        return {}
    return {"code": fault.code, "text": str(fault), "details": fault.details}


_HANDLERS: dict[type, Callable[[Follower, Any], None]] = {
    Joined: Follower._on_joined,
    Received: Follower._on_received,
    Left: Follower._on_left,
    Applied: Follower._on_applied,
    Stopping: Follower._on_stopping,
}

_ORDERS: dict[type[Message], Callable[[Follower, Received], None]] = {
    LoadShard: Follower._on_load,
    ExpectPush: Follower._on_expect,
    FinishPush: Follower._on_finish,
    RunUpdate: Follower._on_run_update,
    SendParams: Follower._on_send_params,
    SendIncrements: Follower._on_send_increments,
    HoldVersion: Follower._on_hold,
    CountTraffic: Follower._on_count,
    Leave: Follower._on_leave,
}
