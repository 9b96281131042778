"""Decide everything that one server does: events in, effects out, and no I/O.

The server, replay, the simulator and the unit tests drive the same class::

    for effect in engine.handle(event):
        ...carry it out; run an Apply on any thread, then post its Applied...

Theory of operation
===================

**Events and effects.** An event (`aiops.engine.events`) is something that has happened: a client
joined or left, a message is complete, a kernel is done, a time was reached. Each carries its time;
the engine reads no clock. `Engine.handle` changes the state and returns the effects in the order in
which they must be carried out. An effect that takes a lease or a buffer along (`Reply`) owns it:
the driver releases it once the reply has been sent, or at once if it cannot be sent. `handle` is
not reentrant, and all events of one engine come from one thread.

Payloads take another way, because they arrive before their message is complete. `Engine.sink_for`
gets a message's header and returns the sink that the payload is written into. It decides from the
header alone: it takes a buffer, and touches neither parameters nor queue. If the pool has no room,
it returns None, and the connection stops reading until `Engine.wait` has it try again. This bounds
the memory of pushes under way. The event `Received` brings message and sink together. From then on
the engine owns the sink: it ends in `free` or `keep`, or leaves with a reply that sends rows out of
it.

**Owners.** Each part of the state has one object that changes it:

============================  ====================================================================
`Membership` (``crew``)       clients by id, their present connection, their last sequence number
                              and remembered answers, and the workers a barrier waits for
`Admission` (``intake``)      buffers, and the checks a payload must pass while it arrives
`UpdateQueue` (``updates``)   pushes in order of arrival, the policy, the sum in progress, answers
                              a barrier holds back, and the outstanding `Apply`
`Replies` (``answers``)       unanswered pushes, and fetches that wait for an update in place
`TableRequests` (``rows``)    embedding tables; their work takes its turn in the update queue
`DeltaReplies`                the delta replica that coded fetches are answered from, if any
`Rendezvous` (``meeting``)    rounds of workers that average their models with each other
`Store` (``store``)           parameters, versions, leases, optimiser state
============================  ====================================================================

The engine routes each event to its owner. Effects are appended to one list, which keeps their order
across owners. `_define` creates everything that depends on the model, so before a worker has
offered one (or `Initialised` has given it) there is no store, and requests that need one are
refused with `NotReady`.

**One Apply outstanding.** When its turn comes, a push is shown to the policy, which uses, ignores
or refuses it. The update's base and target version, its staleness, learning rates and scalars are
fixed when the `Apply` is issued; later events do not change them. No second `Apply` is issued
before the `Applied` of the first. `Applied` publishes the version, if the job makes one, answers
the push or holds the answer (a barrier), and issues the next. So updates have a total order,
versions are consecutive, and the result does not depend on the speed of the kernel.

**Concurrency.** While an `Apply` runs, every other event is handled as usual: pushes arrive, are
surveyed and queued, and clients join and leave. Fetches depend on where the update is written. If
nothing holds a lease on the current version it is overwritten in place, and fetches wait in
`Replies.readers` until it is readable again. Otherwise the update goes to a spare arena, and the
current version is still served. With relaxed consistency every update is in place, and readers do
not wait. An update's kernel writes its target, the optimiser's state and the sum in progress; the
engine changes none of them meanwhile. Leases and row buffers may be returned on any thread: they
are appended to a deque, which the engine's thread empties.

**Faults.** A request that cannot be served raises `Refused`, which becomes an `Error` reply and
changes no parameter. A push is validated as a whole before it is queued: one bad value refuses all
of it. A connection that is lost does not undo a push: the update is made, and its answer is kept
under the client's sequence number. When the client repeats the push on a new connection, it gets
that answer, and the gradient is not applied again. The answers to a client's last
`aiops.wire.messages.REMEMBERED` pushes are kept; an older push is refused, not applied. A worker
that is silent at a barrier is excused after the deadline, for which `WakeAt` requests a `Tick`.
After `Stopping` new pushes are refused; held ones are acknowledged if their step was made, and
refused if not; queued ones are still carried out. Any other exception, such as one from a policy,
may leave the state half changed: the server ends without handling another event.

**The steady exchange** (`aiops.engine.steady`) is a short way through the same state. A push of a
whole small model, with nothing queued, held or outstanding, is updated and answered in one call,
without message or effect objects. It changes what the general way would change, and it
checks every condition before it changes anything: if one fails, the general way takes the push.

**The journal** (`aiops.engine.journal`) is the list of events with their payloads, each written
before it is handled. A fresh engine makes the same decisions from the same events and, because the
kernels are deterministic, the same parameters to the last bit. So what decides about parameters
must come from an event or the options, never from a clock or a random number. A steady exchange
records the events that the general way would have had. Calls of `sink_for` are not recorded: replay
repeats them. Nor are the ends of leases, which decide whether an update is written in place, and so
which version a fetch is sent meanwhile. Relaxed reads cannot be recorded (the versions that they
mix depend on the moment), nor can sharded runs (no server receives a whole push).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.bandwidth import gates
from aiops.bandwidth.gate_controller import BudgetSample, GateController
from aiops.codecs.choice import CodecChoice
from aiops.engine import statistics, validation
from aiops.engine.admission import Admission, OfferSink
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.events import (
    Applied,
    BudgetTick,
    DistributeModel,
    Drop,
    Effect,
    Event,
    Initialised,
    Joined,
    Left,
    Options,
    Received,
    Reply,
    Shares,
    Stopping,
    Tick,
    Warm,
)
from aiops.engine.membership import Membership
from aiops.engine.receive import PushSink
from aiops.engine.registration import Definition, compare, fill, given, offered, table_stores
from aiops.engine.rendezvous import Rendezvous
from aiops.engine.replies import PendingPush, Replies
from aiops.engine.sharded_options import check_sharded
from aiops.engine.steady import Shortcut, Steady, shortcut
from aiops.engine.table_receive import RowsSink, TableAdmission
from aiops.engine.table_requests import TableRequests
from aiops.engine.update_queue import UpdateQueue
from aiops.errors import (
    BadPush,
    ConflictError,
    NotReady,
    Refused,
)
from aiops.model.arena import aligned
from aiops.model.layout import Array, Ints
from aiops.model.placement import Placement
from aiops.model.tables import NamedTable, Tables
from aiops.store.delta_replica import DeltaReplica
from aiops.store.parameters import Store
from aiops.store.resources import Resources
from aiops.store.snapshots import Version
from aiops.store.sparse_table import SparseTable
from aiops.store.warmup import Warmup
from aiops.wire import messages
from aiops.wire.connection import Connection
from aiops.wire.messages import (
    Define,
    Describe,
    Fetch,
    FetchRows,
    Hello,
    JoinRound,
    Leave,
    Message,
    Ping,
    Pong,
    Push,
    PushRows,
    Reapply,
    Report,
    Stats,
    Welcome,
)
from aiops.wire.sinks import Discard, Sink


class Engine:
    """The decisions of one server; the top of the module tells how it works.

    Parameters
    ----------
    algorithm
        Policy, rule and client plan.
    options
        How the server is run, beside its algorithm; the defaults of `Options` if None.
    machine
        Memory, threads and the device that the store uses.

    Raises
    ------
    ConflictError
        When the algorithm and the options cannot work together.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        options: Options | None = None,
        machine: Resources | None = None,
    ) -> None:
        self.algorithm, self.options = algorithm, options or Options()
        self._machine = machine or Resources()
        workers, deadline = self.options.workers, self.options.worker_deadline
        algorithm.check(workers, self.options.relaxed)
        told = {"patience": deadline, "heartbeat": self.options.heartbeat}
        self.plan = {**algorithm.plan(workers), **told}
        if self.options.shards > 1:
            check_sharded(self.options)
        recall = self._plan_gate()
        self.codecs = (
            CodecChoice.of(self.options.push_codec),
            CodecChoice.of(self.options.fetch_codec),
        )
        self._check_codecs()
        for key, choice in zip(("push_codec", "fetch_codec"), self.codecs, strict=True):
            if choice:
                self.plan[key] = choice.announced
        self.store: Store | None = None
        self.rows: TableRequests | None = None
        self.stopping = False
        self._effects: list[Effect] = []
        self.crew = Membership(workers, deadline)
        self.intake = Admission(
            self.options.max_model,
            self.options.backend,
            parallel_map=self._machine.parallel_map,
            make=self._machine.memory.buffer,
        )
        self.answers = Replies(self._effects)
        self.updates = UpdateQueue(algorithm, workers, self.crew, self.answers, self._effects)
        self.updates.recall.bound = recall
        self.meeting = Rendezvous(self.plan.get("average"), self._effects)
        budget, each = self.options.budget, self.options.worker_budget
        self.budget = GateController.beside(self.plan.get("gate"), budget, each)
        self.answers.budget = self.budget
        self.intake.budget = min(filter(None, (budget, each)), default=None)
        self.pace = statistics.Pace()
        self.profile: Callable[[], dict[str, Any]] | None = None  # time by activity, if counted
        self.file_errors: Callable[[], list[str]] = list  # errors of writing the server's files
        self.now = self.started = 0.0
        self._fresh = True  # no event has been handled yet
        self._tables = Tables({})
        self.short_way: Shortcut | None = None  # of steady exchanges, if there can be any

    def _plan_gate(self) -> int:
        """Add the gate to the plan; return how many bytes of gradients to keep for it."""
        options = self.options
        gate = gates.find(options.gate) if options.gate else None
        if gate is not None:
            gate.check(self.algorithm, options.workers)
        elif options.budget or options.worker_budget:
            gate = gates.for_budget(self.algorithm, options.workers)
        if gate is None:
            return 0
        self.plan |= gate.plan(self.algorithm)
        return self.options.recall if gate.skipped == "reapply" else 0

    def _check_codecs(self) -> None:
        """Refuse to save up gradients for a rule that would diverge on their squares."""
        pushed = {codec.name for _pattern, codec in self.codecs[0].pairs if codec.saves_up}
        if pushed and not self.algorithm.accepts_sums:
            name = self.algorithm.name
            raise ConflictError(
                f"{name} squares each gradient, and {min(pushed)} leaves most of one out, to add it"
                f" to a later one: {name} diverges on what has been saved up so. Push with fp16,"
                " bf16 or int8, or choose another policy, such as fasgd"
            )

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        self.now = self.answers.now = self.updates.now = event.time
        if self._fresh:
            self.started, self._fresh = event.time, False
        _HANDLERS[type(event)](self, event)
        effects = self._effects.copy()
        self._effects.clear()
        # Here, and not in `Replies`: several owners append replies, and each counts for its member.
        for effect in effects:
            if type(effect) is Reply:
                member = self.crew.at(effect.peer)
                if member is not None:
                    member.ledger.answered(effect.message)
        return effects

    def sink_for(self, peer: int, message: Message) -> Sink | None:
        """Return the sink of a message's payloads, or None if there is no room now: call `wait`."""
        return self.intake.sink_for(message)

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it returns whether there was.

        It joins the line of the pool in which the last `sink_for` found no room.
        """
        self.intake.lacking.wait(again)

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return the short way for exchanges like this push, or None if there is none.

        ``known``: the one that the connection has. The push is the message that ``wire`` read last.
        """
        member = self.crew.at(peer)
        if self.short_way is None or member is None:
            return known
        return self.short_way.learn(member, peer, wire, push, known)

    def flush(self) -> list[Effect]:
        """Return the effects of calls of `sink_for`: an engine has none (a lead has)."""
        return []

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        backend, (pushed, fetched) = self.options.backend, self.codecs
        codecs = (codec for _pattern, codec in (*pushed.pairs, *fetched.pairs))
        rule = self.algorithm.rule() if self._machine.device is None else None
        return Warm(Warmup(rule, backend, codecs).steps())

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections to drop: none, since the shell applies its deadlines itself."""
        return []

    @property
    def pools(self) -> Sequence[BufferPool]:
        """The pools that payloads get their buffers from."""
        return self.intake.pools

    @property
    def device(self) -> str:
        """The name of the device that holds the parameters; empty: the host."""
        return "" if self._machine.device is None else self._machine.device.name

    def held_versions(self) -> set[tuple[int, bool]]:
        """Return the versions that the rule compares gradients with, now or later.

        Each is a number, and whether it is a version of the delta replica.
        """
        held = [member.sent.version for member in self.crew if member.sent is not None]
        reads = self.updates.reads
        held += [] if reads is None else [reads]
        return {(version.number, self.of_shadow(version)) for version in held}

    def of_shadow(self, version: Version) -> bool:
        """Return whether a version is one of the delta replica."""
        delta_replies = self.answers.delta_replies
        return delta_replies is not None and delta_replies.shadow.owns(version)

    @property
    def tables(self) -> Sequence[SparseTable]:
        """The model's tables."""
        return self.rows.stores if self.rows else ()

    @property
    def idle(self) -> bool:
        """True if no update is outstanding and none queued."""
        return self.updates.idle

    # ------------------------------------------------------------ membership

    def _on_joined(self, event: Joined) -> None:
        hello = event.hello
        assert isinstance(hello, Hello)
        worker = hello.role == "worker"
        member, replaced = self.crew.join(
            event.peer, hello.client, hello.epoch, hello.name, worker, event.traffic
        )
        if replaced is not None:
            self._effects.append(Drop(replaced, f"{hello.name!r} has a newer connection"))
            self.meeting.left(replaced, self.now)
        if replaced == event.peer:
            return
        member.answered = self.now
        welcome = Welcome(
            id=hello.id,
            protocol=messages.PROTOCOL,
            run=self.options.run,
            proof=event.proof,
            policy=self.algorithm.name,
            settings=self.algorithm.settings(),
            plan={**self._plan_now(), "worker": member.number},
            version=self.answers.version,
            model=self.store.layout.rows if self.store else (),
            last_seq=member.last_seq,
            tables=self.answers.tables,
        )
        self._effects.append(Reply(event.peer, welcome))
        self.updates.crew_changed()

    def _plan_now(self) -> dict[str, Any]:
        """Return the plan for a client that joins: under a budget also the seconds per byte."""
        if self.budget is None:
            return self.plan
        workers = max(self.options.workers or 1, len(self.crew.present()))
        return {**self.plan, "seconds_per_byte": self.budget.seconds_per_byte(workers)}

    def _on_paced(self, event: BudgetTick) -> None:
        if self.budget is None:
            return
        crossing = BudgetSample(
            *(event.time, event.nbytes, event.second, event.peak),
            *(event.backlog, event.busy, event.pressed),
        )
        workers = len(self.crew.present())
        self.budget.paced(crossing, workers)
        weights = self.budget.shares(self.answers.version, workers)
        if weights:
            self._effects.append(Shares(weights))

    def _on_left(self, event: Left) -> None:
        self.meeting.left(event.peer, self.now)
        if self.budget is not None:
            self.budget.left(event.peer)
        member = self.crew.leave(event.peer)
        if member is not None:
            member.forget_sent()
            self.answers.left(event.peer)
            self.updates.crew_changed()

    def _on_tick(self, event: Tick) -> None:
        self.updates.tick()
        self.meeting.tick(self.now)

    def _on_stopping(self, event: Stopping) -> None:
        self.stopping = True
        self.updates.stop()
        self.meeting.stop()

    def _on_applied(self, event: Applied) -> None:
        if event.time >= self.pace.due:
            self.pace.note(event.time, self.answers.version)
        self.updates.applied(event)

    # ------------------------------------------------------------ messages

    def _on_received(self, event: Received) -> None:
        handler = _MESSAGES.get(type(event.message))
        if handler is None:
            self._effects.append(Drop(event.peer, f"{event.message.kind!r} is not a request"))
            return
        member = self.crew.at(event.peer)
        if member is not None:
            taken = event.sink is not None and not isinstance(event.sink, Discard)
            member.ledger.asked(event.message, taken)
        if self.budget is not None and isinstance(event.message, _TRANSMISSIONS):
            self.budget.transmitted(event.peer, self.answers.version)
        try:
            handler(self, event)
        except Refused as fault:
            self.answers.deny(event, fault)

    def _on_ping(self, event: Received) -> None:
        self._effects.append(Reply(event.peer, Pong(event.message.id)))

    def _on_pong(self, event: Received) -> None:
        """Do nothing: the shell has noted that the connection is alive."""

    def _on_leave(self, event: Received) -> None:
        if member := self.crew.at(event.peer):
            member.answers.clear()  # it will repeat no push, so none of its answers is needed
        self._on_left(Left(event.time, event.peer))
        self._effects.append(Drop(event.peer, "it said goodbye"))

    def _on_stats(self, event: Received) -> None:
        self._effects.append(Reply(event.peer, Report(event.message.id, self.report())))

    def _on_fetch(self, event: Received) -> None:
        assert isinstance(event.message, Fetch)
        self.answers.fetch(event.peer, event.message, self.crew.at(event.peer))

    def _on_describe(self, event: Received) -> None:
        self.answers.describe(event.peer, event.message.id)

    def saved_tables(self) -> list[tuple[NamedTable, Ints, Array]]:
        """Return each table with the ids of its stored rows and a copy of their parameters."""
        return [(store.named, *store.stored()) for store in self.tables]

    def _on_meet(self, event: Received) -> None:
        assert isinstance(event.message, JoinRound)
        member = self.crew.at(event.peer)
        if member is None or not member.worker:
            raise Refused("an observer may not average; connect with role='worker'")
        if self.store is None:
            raise NotReady(
                "no worker has defined the model yet: define it before the first average"
            )
        self.meeting.meet(event.peer, event.message, self.store.layout, self.now)

    # ------------------------------------------------------------ the model

    def _on_initialised(self, event: Initialised) -> None:
        definition = given(event, self.algorithm)
        slow = self.intake.too_slow(definition.layout)
        if slow is not None:
            raise ConflictError(f"the model to begin with is too large: {slow}")
        self._define(definition)
        fill(event, self.tables, definition.layout.nbytes)

    def _on_define(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, Define)
        offer = sink if isinstance(sink, OfferSink) else None
        try:
            fault = getattr(sink, "fault", None)
            if isinstance(fault, Refused):
                raise fault
            member = self.crew.at(event.peer)
            if member is None or not member.worker:
                raise BadPush("only a worker may define the model; this client is an observer")
            created = self.store is None
            if self.store is not None:
                compare(self.store.layout, self._tables, message)
            else:
                self._define(offered(message, offer, self.algorithm, self.options.max_model))
            self.answers.describe(event.peer, message.id, created)
        finally:
            if offer is not None:
                offer.free()

    def _define(self, definition: Definition) -> None:
        options, layout, tables = self.options, definition.layout, definition.tables
        stores = table_stores(
            tables, self.algorithm.rule(), options.backend, later=self._machine.later
        )
        # Of several shards, this one decides about the whole layout but holds its first part only.
        held, data = layout, definition.data
        placement = None
        if options.shards > 1:
            placement = Placement.even(layout, options.shards, options.shard_bytes)
            held = placement.layouts[0]
            data = aligned(held.nbytes)
            data[:] = definition.data[: held.nbytes]
        try:
            self.store = Store(
                layout,
                self.algorithm.rule(),
                backend=options.backend,
                live=options.live,
                relaxed=options.relaxed,
                arena=self._machine.memory.holding(held, data),
                machine=self._machine,
                held=held,
            )
        except MemoryError as error:
            raise BadPush(
                f"the model of {held.nbytes} bytes, its rule's state and room for gradients do not"
                f" fit this server's memory: {error}"
            ) from None
        if placement is not None:
            self._effects.append(DistributeModel(placement, definition.data))
        self.store.read_packed({codec.name for _pattern, codec in self.codecs[0].pairs})
        self.intake.defined(held)
        self.crew.defined(layout)
        self.answers.store = self.store
        self.updates.begin(self.store)
        if self.codecs[1]:
            shadow = DeltaReplica(
                *(self.store.current, self.codecs[1], options.backend, options.fetch_lag),
                placement=placement,
                parallel_map=self._machine.parallel_map,
            )
            queue = partial(self.updates.work, first=True)
            self.answers.delta_replies = DeltaReplies(self.store, shadow, self._effects, queue)
        self._tables = tables
        self.answers.tables = self._tables.described
        self.rows = TableRequests(
            self.algorithm, options.workers, stores, self.answers, self.updates.work
        )
        rows_intake = TableAdmission(self._tables, self.intake, options.backend)
        self.intake.rows_sink_for = rows_intake.sink_for
        self.short_way = self._shortcut(self.store)
        tables_warm = [table.warm for table in stores]
        self._effects.append(Warm([*self.store.warming(), *tables_warm]))

    def _shortcut(self, store: Store) -> Shortcut | None:
        """Return the shared part of steady exchanges, or None if the settings rule them out."""
        options, machine = self.options, self._machine
        if options.relaxed or options.shards > 1 or machine.device is not None:
            return None
        if self.budget is not None or self.answers.delta_replies is not None:
            return None
        return shortcut(store, self.updates, self.intake, self.pace, machine)

    # ------------------------------------------------------------ pushes

    def _on_push(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, Push)
        member = self.crew.at(event.peer)
        fault: Refused | None = None
        new = member is not None and message.seq > member.last_seq
        if member is not None and (new or not self.answers.repeated(event, member)):
            # Before the checks: a refusal, too, is the answer to this number, if it is repeated.
            member.last_seq = message.seq
            fault = validation.fault(member, self.store, message, sink, self.stopping)
            if fault is None:
                assert isinstance(sink, PushSink)
                self.updates.push(PendingPush(event.peer, message, sink, member))
                return
            self.answers.refuse_at_once(event, member, fault)
        if isinstance(sink, PushSink):
            sink.free()

    def _on_again(self, event: Received) -> None:
        """Apply a worker's last gradient again; if it is not kept, acknowledge it unused."""
        message = event.message
        assert isinstance(message, Reapply)
        member = self.crew.at(event.peer)
        if member is None or self.answers.repeated(event, member):
            return
        member.last_seq = message.seq
        fault = validation.unready(member, self.store, stopping=self.stopping)
        if fault is None and self.store is not None:
            fault = validation.beyond(self.store, message)
        if fault is not None:
            self.answers.refuse_at_once(event, member, fault)
            return
        recalled = self.updates.recall.find(member.number)
        self.updates.push(PendingPush(event.peer, message, recalled, member))

    def _on_fetch_rows(self, event: Received) -> None:
        if isinstance(event.sink, Discard) and isinstance(event.sink.fault, Refused):
            raise event.sink.fault
        if self.rows is None:
            raise NotReady("no worker has defined the model yet: a worker must do it")
        self.rows.fetch(event)

    def _on_push_rows(self, event: Received) -> None:
        message, sink, rows = event.message, event.sink, self.rows
        assert isinstance(message, PushRows)
        member = self.crew.at(event.peer)
        if member is not None and not (rows and rows.repeated(event, member)):
            member.last_seq = message.seq
            fault = validation.fault(member, self.store, message, sink, self.stopping)
            if fault is None and rows is not None and isinstance(sink, RowsSink):
                fault = rows.fault(sink, message)
            if fault is None and rows is not None:
                rows.push(event, member)
                return
            self.answers.refuse_at_once(event, member, fault or BadPush("it pushes no row"))
        if isinstance(sink, PushSink):
            sink.free()

    # ------------------------------------------------------------ statistics

    def report(self) -> dict[str, Any]:
        """Return the statistics that ``aiops stats`` shows."""
        now = self.now if self.short_way is None else max(self.now, self.short_way.now)
        return statistics.report(self, now)


_HANDLERS: dict[type, Callable[[Engine, Any], None]] = {
    Initialised: Engine._on_initialised,
    Joined: Engine._on_joined,
    Received: Engine._on_received,
    Left: Engine._on_left,
    Tick: Engine._on_tick,
    Applied: Engine._on_applied,
    Stopping: Engine._on_stopping,
    BudgetTick: Engine._on_paced,
}

_TRANSMISSIONS = (Push, Reapply, Fetch, PushRows, FetchRows)
"""Messages that a gate may skip, and whose rate a bandwidth budget follows."""

_MESSAGES: dict[type[Message], Callable[[Engine, Received], None]] = {
    Push: Engine._on_push,
    Reapply: Engine._on_again,
    Fetch: Engine._on_fetch,
    FetchRows: Engine._on_fetch_rows,
    PushRows: Engine._on_push_rows,
    Define: Engine._on_define,
    Describe: Engine._on_describe,
    Stats: Engine._on_stats,
    Ping: Engine._on_ping,
    Pong: Engine._on_pong,
    Leave: Engine._on_leave,
    JoinRound: Engine._on_meet,
}
