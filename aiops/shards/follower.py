"""Hold a part of a sharded model, and carry out the lead's orders on it.

A follower decides only where an update is written (in place if no reader holds the version here).
It publishes a version only when an order names it: published as soon as it is computed, this shard
would be ahead of its lead, which may still order the version before to be sent (`aiops.shards`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from aiops.wire.connection import Connection, SinkFor
from aiops.wire.messages import PROTOCOL, Error, Leave, Message, Ping, Pong, Push
from aiops.wire.server_messages import (
    CountTraffic,
    ExpectPush,
    FinishPush,
    HoldVersion,
    LeadHello,
    LoadShard,
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
        self.admission = Admission(
            options.max_model, options.backend, parallel_map=parallel_map, make=make
        )
        self._rooms = ShardBuffers(self.admission)
        self.store: Store | None = None
        self._lead: int | None = None  # its connection
        self._run = ""
        self._branches: dict[int, tuple[str, int]] = {}  # client and epoch, by connection
        self._peers: dict[tuple[str, int], int] = {}
        self._traffic: dict[int, Traffic] = {}  # of present connections
        self._past: OrderedDict[str, Traffic] = OrderedDict()  # of past connections, by client
        self._replica: DeltaReplica | None = None  # coded fetches are answered from it
        self._outstanding: tuple[int, UpdateJob | ReplicaJob] | None = None
        self._computed: UpdateJob | None = None  # done, and not published yet
        self._held: dict[tuple[int, bool], Lease] = {}  # by version; True: the delta replica's

    # ------------------------------------------------------------ the shell's calls

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        match event:
            case Received():
                return self._on_received(event)
            case Applied():
                return self._on_applied(event)
            case Joined():
                return self._on_joined(event)
            case Left():
                return self._on_left(event)
            case _:  # as for `Stopping`: the lead learns of it when the connection ends
                return []

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
        return self.admission.pools

    def sinks_of(self, peer: int) -> SinkFor:
        """Return the function that gives a connection's messages sinks: `sink_for`."""
        return partial(self.sink_for, peer)

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

    def _on_joined(self, event: Joined) -> list[Effect]:
        hello, replaced = event.hello, list[Effect]()
        if isinstance(hello, LeadHello):
            if self._lead is not None:
                return _refusal(event.peer, hello.id, "this follower has its lead already")
            mine = self.algorithm.name, self.algorithm.settings()
            if mine != (hello.policy, dict(hello.settings)):
                return _refusal(
                    *(event.peer, hello.id),
                    f"the lead's policy is {hello.policy} {dict(hello.settings)}, this follower's"
                    f" {mine[0]} {mine[1]}: start both with the same",
                )
            self._lead, self._run = event.peer, hello.run
        elif isinstance(hello, ShardHello):
            if self._lead is None or hello.run != self._run:
                why = "its lead is another one" if self._lead is not None else "it has no lead yet"
                return _refusal(event.peer, hello.id, f"this follower cannot be followed: {why}")
            key = (hello.client, hello.epoch)
            if key in self._peers:
                return _refusal(event.peer, hello.id, "this client has such a connection already")
            for old, (client, epoch) in list(self._branches.items()):
                if client == hello.client and epoch < hello.epoch:
                    replaced += self._on_left(Left(event.time, old))
                    replaced.append(Drop(old, f"{hello.name!r} has a newer connection"))
            self._branches[event.peer], self._peers[key] = key, event.peer
            self._traffic[event.peer] = event.traffic
        return [*replaced, Reply(event.peer, ShardWelcome(hello.id, PROTOCOL, event.proof))]

    def _on_left(self, event: Left) -> list[Effect]:
        if event.peer == self._lead:
            return [End("its lead is gone")]
        branch = self._branches.pop(event.peer, None)
        if branch is None:
            return []
        self._peers.pop(branch, None)
        past = self._past.setdefault(branch[0], Traffic())
        past.add(self._traffic.pop(event.peer))
        self._past.move_to_end(branch[0])
        if len(self._past) > _DEPARTED:
            self._past.popitem(last=False)
        return self._report_missing(self._rooms.left(*branch))

    def _report_missing(self, numbers: Sequence[int]) -> list[Effect]:
        """Report pushes whose portions will not come, because their connection was lost."""
        return [
            effect
            for number in numbers
            for effect in self._report(PushArrived(number, {"code": LOST}))
        ]

    # ------------------------------------------------------------ messages

    def _on_received(self, event: Received) -> list[Effect]:
        message = event.message
        if isinstance(message, Ping):
            return [Reply(event.peer, Pong(message.id))]
        if isinstance(message, ShardParts):
            return self._on_parts(event, message)
        if event.peer == self._lead and type(message) in _ORDERS:
            try:
                return _ORDERS[type(message)](self, event)
            except (ValueError, RemoteProtocolError) as error:
                refusal = _refusal(event.peer, message.id, f"{message.kind}: {error}")
                return [Note(f"its lead's order makes no sense: {error}"), *refusal]
        if isinstance(message, Pong):
            return []
        return [Drop(event.peer, f"{message.kind!r} is not for a follower")]

    def _on_parts(self, event: Received, message: ShardParts) -> list[Effect]:
        branch = self._branches.get(event.peer)
        came = None if branch is None else self._rooms.arrived(*branch, message)
        return [] if came is None else self._report(PushArrived(came.number, _told(came.fault)))

    def _report(self, message: Message) -> list[Effect]:
        """Send a message to the lead, if there is one."""
        return [] if self._lead is None else [Reply(self._lead, message)]

    # ------------------------------------------------------------ orders

    def _on_load(self, event: Received) -> list[Effect]:
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
        choice = CodecChoice.from_announced(message.plan.get("fetch_codec", ()))
        if choice is None:
            raise ValueError("parameters are to be sent in a codec that is not known here")
        if choice:
            self._replica = DeltaReplica(
                *(self.store.current, choice, self.options.backend),
                placement=placement,
                shard=message.shard,
                parallel_map=self._machine.parallel_map,
            )
        self.admission.defined(layout)
        self._rooms.begin(layout.begin)
        return [Warm(self.store.warming())]

    def _on_expect(self, event: Received) -> list[Effect]:
        assert isinstance(event.message, ExpectPush)
        self._rooms.expect(event.message)
        key = event.message.client, event.message.epoch
        if key not in self._peers and event.message.ranges:
            # A client attaches to all shards before it pushes. This one is not attached, so its
            # connection was lost, and the portion with it.
            return self._report_missing(self._rooms.left(*key))
        return []

    def _on_finish(self, event: Received) -> list[Effect]:
        assert isinstance(event.message, FinishPush)
        self._rooms.forget(event.message.id, keep=event.message.keep)
        return []

    def _on_run_update(self, event: Received) -> list[Effect]:
        message, store = event.message, self._reached(event.message)
        assert isinstance(message, RunUpdate)
        if self._outstanding is not None:
            raise ValueError("one update at a time")
        if REPLICA in message.work:
            return self._follow_model(message)
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
                job.sent = self._version(work.sent, replica=work.coded)
            if not work.measure:  # `spare`: later orders may still name the current version
                job.target = store.begin(work.spare)
        self._outstanding = message.id, job
        return [Apply(message.id, job)]

    def _follow_model(self, message: RunUpdate) -> list[Effect]:
        """Bring the delta replica up to the model."""
        replica, oldest = self._replica, message.work[REPLICA]
        if replica is None or type(oldest) is not int:
            raise ValueError("there is no delta replica of this model")
        assert self.store is not None
        replica.forget(oldest)
        job = replica.follow(self.store.current)
        self._outstanding = message.id, job
        return [Apply(message.id, job)]

    def _on_applied(self, event: Applied) -> list[Effect]:
        assert self._outstanding is not None
        ticket, job = self._outstanding
        self._outstanding = None
        if isinstance(job, ReplicaJob):
            job.replica.followed(job, event.sums)
        elif job.target is not None:
            self._computed = job
        return self._report(UpdateDone(ticket, event.sums.astype("<i8").tobytes()))

    def _on_send_params(self, event: Received) -> list[Effect]:
        message, store = event.message, self._reached(event.message)
        assert isinstance(message, SendParams)
        parts = tuple(Part(*run[:2], RAW, run[1] - run[0], run[2]) for run in message.ranges)
        begin = store.layout.begin
        if any(not begin <= p.start < p.stop <= begin + store.layout.nbytes for p in parts):
            raise ValueError("it holds other bytes")
        peer = self._peers.get((message.client, message.epoch)) if message.client else self._lead
        if peer is None:
            return []
        answer = ShardParts(message.id, message.version, parts)
        return [Reply(peer, answer, store.lease() if parts else None)]

    def _on_send_increments(self, event: Received) -> list[Effect]:
        message, replica = event.message, self._replica
        assert isinstance(message, SendIncrements)
        if replica is None or replica.current.number != message.version:
            raise ValueError(f"its delta replica is not that of version {message.version}")
        peer = self._peers.get((message.client, message.epoch))
        if peer is None:
            return []
        parts, lease = replica.portion(message.ranges, message.increments)
        return [Reply(peer, ShardParts(message.id, message.version, parts), lease)]

    def _on_hold(self, event: Received) -> list[Effect]:
        message = event.message
        assert isinstance(message, HoldVersion)
        key = message.version, message.replica
        if not message.keep:
            lease = self._held.pop(key, None)
            if lease is not None:
                lease.release()
        elif key not in self._held:
            self._held[key] = self._lease(message)
        return []

    def _on_count(self, event: Received) -> list[Effect]:
        found: dict[str, Traffic] = {}
        for client, traffic in (
            *self._past.items(),
            *((self._branches[peer][0], traffic) for peer, traffic in self._traffic.items()),
        ):
            found.setdefault(client, Traffic()).add(traffic)
        counts = {client: traffic.counts() for client, traffic in found.items()}
        return self._report(TrafficCounted(event.message.id, counts))

    def _on_leave(self, event: Received) -> list[Effect]:
        self._lead = None
        return [End()]

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
        if self._replica is None or self._replica.current.number != message.version:
            raise ValueError(f"its delta replica is not that of version {message.version}")
        return self._replica.lease()

    def _version(self, number: int, *, replica: bool) -> Version:
        lease = self._held.get((number, replica))
        assert self.store is not None
        if lease is not None:
            return lease.version
        if replica or number != self.store.version:
            raise ValueError(f"version {number} is not held any more")
        return self.store.current


LOST = "lost"
"""The code of a fault: the client's connection to this shard was lost."""


def _refusal(peer: int, id: int, text: str) -> list[Effect]:
    """Return the end of a connection, with the reason."""
    return [Reply(peer, Error(id, "protocol", text, {}, True)), Drop(peer, text)]


def _told(fault: Refused | None) -> Mapping[str, Any]:
    """Return a fault as the map that a lead is sent."""
    if fault is None:
        return {}
    return {"code": fault.code, "text": str(fault), "details": fault.details}


_ORDERS: dict[type[Message], Callable[[Follower, Received], list[Effect]]] = {
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
