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

Payloads take another way, because they arrive before their message is complete.
`Admission.sink_for` gets a message's header and returns the sink that the payload is written into.
It decides from the header alone: it takes a buffer, and touches neither parameters nor queue. If
the pool has no room, it returns None, and the connection stops reading until `Engine.wait` has it
try again. This bounds the memory of pushes under way. The event `Received` brings message and sink
together. From then on the engine owns the sink: it ends in `free` or `keep`, or leaves with a reply
that sends rows out of it.

**Owners.** Each part of the state has one object that changes it. The engine has those that exist
from the start, and, once a worker has offered a model (or `Initialised` has given it), a `Training`
with the others:

=====================  ===========================================================================
`Membership`           clients by id, their present connection, their last sequence number and
                       remembered answers, and the workers a barrier waits for
`Admission`            buffers, and the checks a payload must pass while it arrives
`Rendezvous`           rounds of workers that average their models with each other
`Training`             everything about the model, which is:
`.store`               parameters, versions, leases, optimiser state
`.updates`             pushes in order of arrival, the policy, and the outstanding `Apply`
`.updates.maker`       the sum in progress, learning rates, and the outstanding update
`.updates.held`        the answers that a barrier holds back
`.replies`             unanswered pushes, and fetches that wait for an update in place
`.copied`              the copy of the model that is due, to be saved, if one is
`.table_requests`      embedding tables; their work takes its turn in the update queue
`.delta_replies`       the delta replica that coded fetches are answered from, if any
`.data_sets`           the examples that workers are given, and those that count as seen
=====================  ===========================================================================

Each owner's decision methods return the effects that they decide, and the engine returns them in
that order. A request that needs a model is refused with `NotReady` while there is none.

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
After `Paused` new pushes are refused until that ends, and use up no sequence number; queued ones
are carried out, and no worker is overdue. After `Stopping` new ones are refused too; held ones are
acknowledged if their step was made, and refused if not; queued ones are still carried out. If a
successor goes on with the state (`Stopping.kept`), held ones stay as they are, for it to answer.
Any other exception, such as one from a policy, may leave the state half changed: the server ends
without handling another event.

**The steady exchange** (`aiops.engine.steady`) is a short way through the same state. A push of a
whole small model, with nothing queued, held or outstanding, is updated and answered in one call,
without message or effect objects. It changes what the general way would change, and it
checks every condition before it changes anything: if one fails, the general way takes the push.
Messages about rows have such a way too (`aiops.engine.steady_rows`), where nothing is recorded.

**Capture** (`aiops.engine.capture`). Each owner returns its state as plain values and named arrays
(`state`), and continues from them (`restore`). What an owner has beside that is a cache, a buffer,
or a connection's. A new attribute that decides about later events belongs into both methods.
A capture is an event, `SnapshotDue`: its `CaptureJob` takes the place of the next `Apply`. The
state is the one after the event that issued the job, when no update is outstanding. The job copies
what updates overwrite in place; nothing else waits for it. It has a ticket like any other, so a
replay issues it too, and there it does nothing.

**The journal** (`aiops.durable.rows`) is the list of events with their payloads, each written
before it is handled. A fresh engine makes the same decisions from the same events and, because the
kernels are deterministic, the same parameters to the last bit. So what decides about parameters
must come from an event or the options, never from a clock or a random number. A steady exchange
records the events that the general way would have had. Requests for sinks are not recorded: replay
repeats them. Nor are the ends of leases, which decide whether an update is written in place, and so
which version a fetch is sent meanwhile. Instead, each event has a bit: whether the current version
had readers when it came. That is fixed until the event has been handled (`Engine.freeze`). A replay
finds fewer readers, since it sends nothing, but takes the recorded bit. Relaxed reads cannot be
recorded (the versions that they mix depend on the moment), nor can sharded runs (no server receives
a whole push).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.bandwidth.gate_controller import BudgetSample, GateController
from aiops.common.gathering import Gathering, gathered
from aiops.engine import statistics, validation
from aiops.engine.admission import Admission, OfferSink
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.client_plan import ClientPlan
from aiops.engine.events import (
    Applied,
    BudgetTick,
    CopyDue,
    DistributeModel,
    Drop,
    Effect,
    Event,
    Initialised,
    Joined,
    Left,
    Options,
    Paused,
    Received,
    Reply,
    Resumed,
    Shares,
    SnapshotDue,
    Stopping,
    Tick,
    Warm,
)
from aiops.engine.membership import Member, Membership
from aiops.engine.push_closure import PushClosure
from aiops.engine.receive import PushSink
from aiops.engine.registration import Definition, compare, given, given_rows, offered
from aiops.engine.rendezvous import Rendezvous
from aiops.engine.replies import error_of, too_old
from aiops.engine.run_warnings import RunWarnings, cautions
from aiops.engine.steady import Shortcut, Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.engine.training import Training
from aiops.errors import BadPush, ConflictError, NotReady, Refused
from aiops.filters import compiled_screen
from aiops.model.parts import LARGEST
from aiops.model.row_shards import shards_of
from aiops.model.tables import StoredTable
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import DeltaReplica
from aiops.store.parameters import Store
from aiops.store.resources import Resources
from aiops.store.sparse_table import SparseTable
from aiops.store.warmup import Warmup
from aiops.wire import messages
from aiops.wire.connection import Connection, SinkFor
from aiops.wire.data_messages import CoverPush, TakeTask
from aiops.wire.messages import (
    Define,
    Describe,
    Error,
    Fetch,
    FetchRows,
    Hello,
    Leave,
    Log,
    Ping,
    Pong,
    Push,
    PushRows,
    Reapply,
    Report,
    Stats,
    Welcome,
)
from aiops.wire.ring_messages import JoinRound, SettleRound
from aiops.wire.sinks import Discard

_TRANSMISSIONS = (Push, Reapply, Fetch, PushRows, FetchRows)
"""Messages that a gate may skip, and whose rate a bandwidth budget follows."""

_NO_SHELL: Mapping[str, Any] = {"profile": None, "file_errors": []}

_UNDEFINED = "no worker has defined the model yet"


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
    shell_report
        Returns the shell's part of the statistics: ``profile`` (time by activity) and
        ``file_errors``.

    Attributes
    ----------
    training
        Everything about the model; None until it is defined.
    now
        The time of the last event, in seconds.
    policy, machine
        The policy of this run, and the machine as above.
    warnings
        What is to be said, once, of the settings of this run.
    closure
        Whether pushes are taken.

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
        shell_report: Callable[[], Mapping[str, Any]] = lambda: _NO_SHELL,
    ) -> None:
        self.algorithm, self.options = algorithm, options or Options()
        options, workers = self.options, self.options.workers
        self.machine = machine or Resources()
        self._clients = ClientPlan(algorithm, options)
        self.plan = self._clients.fields
        self.codecs = self._clients.pushed, self._clients.fetched
        self.budget = GateController.for_gate(
            self.plan.get("gate"), options.budget, options.worker_budget
        )
        self.warnings = RunWarnings(
            algorithm, self._clients.gate, self.budget, cautions(algorithm, self._clients.pushed)
        )
        self.membership = Membership(workers, options.worker_deadline)
        self.admission = Admission(
            options.max_model,
            options.backend,
            budget=min(filter(None, (options.budget, options.worker_budget)), default=None),
            shards=(options.shards, options.shard_bytes),
            spread=options.spread_tables,
            parallel_map=self.machine.parallel_map,
            make=self.machine.memory.buffer,
        )
        relay = options.relay, options.relay_token
        self.rendezvous = Rendezvous(self.plan.get("average"), *relay, options.worker_deadline)
        self.training: Training | None = None
        self.policy = algorithm.policy(workers)
        self.closure = PushClosure()
        self._shell_report = shell_report
        self.now = 0.0
        self._started: float | None = None  # the time of the first event

    # ------------------------------------------------------------ the shell's calls

    def freeze(self) -> bool:
        """Fix, for the next event, whether the current version has readers; return it.

        A recorder journals it with the event, and hands it to `handle`.
        """
        return self.training is not None and self.training.store.freeze()

    def handle(self, event: Event, leased: bool | None = None) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out.

        Parameters
        ----------
        event
            What has happened.
        leased
            Whether the current version has readers, as `freeze` returned it. They decide whether
            an update is done in place, and so which version is fetched meanwhile: it is a part of
            the event where events are recorded or replayed. None: the store decides by the leases
            that it finds.
        """
        if leased is not None and self.training is not None:
            self.training.store.freeze(leased)
        self.now = event.time
        if self._started is None:
            self._started = event.time
        match event:
            case Received():
                effects = self._received(event)
            case Applied() if self.training is not None:
                effects = self.training.updates.applied(event)
            case Joined():
                effects = self._joined(event)
            case Left():
                effects = self._left(event)
            case Tick():
                effects = self._tick(event)
            case Initialised():
                effects = self._initialised(event)
            case BudgetTick():
                effects = self._budget_tick(event)
            case Stopping():
                effects = self._stop(event)
            case Paused():
                effects = self._pause(event)
            case Resumed():
                effects = self._resume(event)
            case SnapshotDue():
                effects = self._snapshot_due(event)
            case CopyDue():
                training = self.training
                effects = [] if training is None else training.copy(event.time)
            case _:
                raise TypeError(f"an engine has no such event: {event!r}")
        if self.training is not None and self.training.data_sets.waiting:
            effects = effects + self._data_changed(self.training, event.time)
        # Here, and not in `Replies`: several owners reply, and each reply counts for its member.
        for effect in effects:
            if type(effect) is Reply:
                member = self.membership.at(effect.peer)
                if member is not None:
                    member.ledger.answered(effect.message)
        return effects

    def sinks_of(self, peer: int) -> SinkFor:
        """Return the function that gives a connection's messages sinks; None: call `wait`."""
        return self.admission.sink_for

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it returns whether there was.

        It joins the line of the pool in which the last `Admission.sink_for` found no room.
        """
        self.admission.full_pool.wait(again)

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return the short way for exchanges like this push, or None if there is none.

        ``known``: the one that the connection has. The push is the message that ``wire`` read last.
        """
        member, training = self.membership.at(peer), self.training
        if training is None or training.shortcut is None or member is None:
            return known
        return training.shortcut.learn(member, peer, wire, push, known)

    def steady_rows(self, peer: int, wire: Connection) -> SteadyRows | None:
        """Return the short way of a connection's messages about rows, if they have one."""
        shared = None if self.training is None else self.training.rows_shortcut
        return None if shared is None else SteadyRows(shared, peer, wire)

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        backend, (pushed, fetched) = self.options.backend, self.codecs
        codecs = (codec for _pattern, codec in (*pushed.pairs, *fetched.pairs))
        rule = self.algorithm.rule() if self.machine.device is None else None
        warmup = Warmup(rule, backend, codecs)
        filters = partial(compiled_screen.warm, self.options.filter, backend)
        return Warm([*warmup.steps(), filters], warmup.over)

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections to drop: none, since the shell applies its deadlines itself."""
        return []

    # ------------------------------------------------------------ state, to be read

    @property
    def store(self) -> Store | None:
        """The parameters; None until the model is defined."""
        return self.training.store if self.training is not None else None

    @property
    def defined_store(self) -> Store:
        """The parameters, for a caller that has seen the model defined."""
        if self.training is None:
            raise LookupError("no worker has defined the model yet")
        return self.training.store

    @property
    def short_way(self) -> Shortcut | None:
        """The shared part of steady exchanges, if there can be any."""
        return self.training.shortcut if self.training is not None else None

    @property
    def version(self) -> int:
        """The model version, 0 without a model."""
        return self.training.store.version if self.training is not None else 0

    @property
    def pools(self) -> Sequence[BufferPool]:
        """The pools that payloads get their buffers from."""
        return self.admission.pools

    @property
    def tables(self) -> Sequence[SparseTable]:
        """The model's tables."""
        return self.training.table_requests.stores if self.training is not None else ()

    @property
    def replica(self) -> DeltaReplica | None:
        """The delta replica, if coded fetches are answered from one."""
        delta_replies = self.training.delta_replies if self.training is not None else None
        return None if delta_replies is None else delta_replies.replica

    @property
    def idle(self) -> bool:
        """True if no update is outstanding and none queued."""
        return self.training is None or self.training.updates.idle

    @property
    def working(self) -> bool:
        """True if work on rows or on the delta replica is outstanding."""
        return self.training is not None and self.training.updates.working

    def saved_tables(self) -> list[StoredTable]:
        """Return each table with the ids of its stored rows and a copy of their parameters."""
        return [(store.named, *store.stored()) for store in self.tables]

    def report(self) -> dict[str, Any]:
        """Return the statistics that ``aiops stats`` shows."""
        return gathered(self.gather())

    def gather(self, shown: int | None = None, now: float = 0.0) -> Gathering[dict[str, Any]]:
        """Return the statistics, with a pause after each slice of the clients.

        ``shown``: as `statistics.report`. ``now``: the time, if it is past that of the last event.
        """
        device = self.machine.device
        # What goes a short way is no event, but each push is noted with its member.
        rows = None if self.training is None else self.training.rows_shortcut
        now = max(now, self.now) if rows is None else max(now, self.now, rows.now)
        now = max([now, *(member.answered for member in self.membership)])
        parts = self.training, self.membership, self.admission, self.rendezvous, self.budget
        found = yield from statistics.report(
            *parts,
            device="" if device is None else device.name,
            now=now,
            started=self._started or 0.0,
            shown=shown,
        )
        return {
            "policy": self.algorithm.name,
            "settings": self.algorithm.settings(),
            "paused": self.closure.paused,
            "warnings": list(self.warnings.given),
            **found,
            **self._shell_report(),
        }

    def state(self) -> list[Any]:
        """Return the times of the last event and the first, its end if it has one, and its pause.

        Its owners have the rest.
        """
        return [self.now, self._started, *self.closure.state()]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue with what `state` returned, before there is a model."""
        self.now, self._started, *closure = state
        self.closure.restore(closure)
        if self.closure.ending is not None:  # rows that follow have refused pushes
            self.rendezvous.stop()

    # ------------------------------------------------------------ membership

    def _joined(self, event: Joined) -> list[Effect]:
        hello, peer = event.hello, event.peer
        assert isinstance(hello, Hello)
        worker = hello.role == "worker"
        known = self.membership.find(hello.client) is not None
        member, replaced = self.membership.join(
            peer, hello.client, hello.epoch, hello.name, worker, event.traffic
        )
        effects: list[Effect] = []
        if replaced is not None:
            effects.append(Drop(replaced, f"{hello.name!r} has a newer connection"))
            effects += self.rendezvous.left(replaced, event.time)
        if replaced == peer:
            return effects
        self.membership.note_arrival("returned" if known else "joined", member)
        member.answered = event.time
        training, present = self.training, len(self.membership.present())
        effects += self.warnings.joined(present, self.options.workers)
        if training is not None:
            training.data_sets.joined(member)
            if replaced is not None:
                training.left(replaced)
        tables = training.tables.described if training else ()
        welcome = Welcome(
            id=hello.id,
            protocol=messages.PROTOCOL,
            run=self.options.run,
            proof=event.proof,
            policy=self.algorithm.name,
            settings=self.algorithm.settings(),
            plan=self._clients.for_worker(
                member.number, self.budget, max(self.options.workers or 1, present)
            ),
            version=self.version,
            model=training.store.layout.rows if training else (),
            last_seq=member.last_seq,
            tables=tables,
            intact=(LARGEST,) * (1 + len(tables)),  # a successor is told which of these survived
        )
        effects.append(Reply(peer, welcome))
        return effects + self._workers_changed(event.time)

    def _left(self, event: Left | Received) -> list[Effect]:
        peer = event.peer
        effects = self.rendezvous.left(peer, event.time)
        if self.budget is not None:
            self.budget.left(peer)
        if self.training is not None:  # also if it is no member's: it may have asked for parameters
            self.training.left(peer)
        member = self.membership.leave(peer)
        if self.training is not None:
            self.training.data_sets.left(peer, member, event.time)
        if member is None:
            return effects
        self.membership.note_arrival("left" if isinstance(event, Received) else "lost", member)
        member.forget_sent()
        return effects + self._workers_changed(event.time)

    def _workers_changed(self, now: float) -> list[Effect]:
        return self.training.updates.workers_changed(now) if self.training is not None else []

    def _tick(self, event: Tick) -> list[Effect]:
        updates = [] if self.training is None else self.training.updates.tick(event.time)
        return updates + self.rendezvous.tick(event.time)

    def _stop(self, event: Stopping) -> list[Effect]:
        self.closure.end(event)
        training = self.training
        answered = [] if training is None else training.updates.stop(event.time, kept=event.kept)
        return answered + self.rendezvous.stop()

    def _pause(self, event: Paused) -> list[Effect]:
        """Take no more pushes, or take them again; then workers have all of their time again."""
        self.closure.pause(event.why)
        training = self.training
        if training is None:
            return []
        if training.updates.maker.position is not None:
            training.updates.maker.position.pause(event.time, paused=bool(event.why))
        if event.why:
            return []
        training.data_sets.go_on(event.time)
        return training.updates.held.wait_anew(event.time)

    def _resume(self, event: Resumed) -> list[Effect]:
        """Have every client that was connected leave; a server that was ending ends no more.

        Whatever is owed to their connections is given up before the first leaves: what is decided
        then would answer the others, whose numbers are those of other clients from here on.
        """
        self.closure.end(None)
        self.rendezvous.resumed()
        if self.budget is not None:
            self.budget.resumed()
        if self.training is not None:
            self.training.go_on()
            if self.training.updates.maker.position is not None:
                self.training.updates.maker.position.resumed(event.time)
            self.training.abandon()
        effects: list[Effect] = []
        for peer in self.membership.peers():
            effects += self._left(Left(event.time, peer))
        return effects

    def _snapshot_due(self, event: SnapshotDue) -> list[Effect]:
        """Have a capture take the place of the next update; without a model there are none."""
        job = CaptureJob(event.number)
        return [] if self.training is None else self.training.updates.capture(job, event.time)

    def _budget_tick(self, event: BudgetTick) -> list[Effect]:
        if self.budget is None:
            return []
        sample = BudgetSample(
            *(event.time, event.nbytes, event.second, event.peak),
            *(event.backlog, event.busy, event.limited),
        )
        workers = len(self.membership.present())
        self.budget.paced(sample, workers)
        weights = self.budget.shares(self.version, workers)
        return [Shares(weights)] if weights else []

    # ------------------------------------------------------------ messages

    def _received(self, event: Received) -> list[Effect]:
        """Handle a message; one that cannot be served is refused."""
        message, sink, peer = event.message, event.sink, event.peer
        member = self.membership.at(peer)
        if member is not None:
            member.ledger.asked(message, sink is not None and not isinstance(sink, Discard))
        if self.budget is not None and isinstance(message, _TRANSMISSIONS):
            self.budget.transmitted(peer, self.version)
        try:
            match message:
                case Push() | Reapply() if member is not None and self.training is not None:
                    return self.training.updates.push(event, member)
                case PushRows() if member is not None and self.training is not None:
                    return self.training.push_rows(event, member)
                case Push() | Reapply() | PushRows():
                    return self._push_in_vain(event, message, member)
                case Fetch():
                    return self._defined("a worker must do it").fetch(event, member)
                case FetchRows():
                    return self._defined("a worker must do it").fetch_rows(event)
                case Describe():
                    replies = self._defined("a worker must do it").replies
                    return [replies.describe(peer, message.id)]
                case Define():
                    return self._define(event, message, member)
                case JoinRound():
                    return self._join_round(event, message, member)
                case SettleRound():
                    return self._settle_round(event, message)
                case TakeTask():
                    return self._take_task(event, message, member)
                case CoverPush():
                    return self._cover(event, message, member)
                case Stats():
                    return [Reply(peer, Report(message.id, self.report()))]
                case Ping():
                    return [Reply(peer, Pong(message.id))]
                case Pong():  # the shell has noted that the connection is alive
                    return []
                case Log():
                    if member is not None:
                        self.membership.log(event.time, member, message)
                    return []
                case Leave():
                    return self._leave(event, member)
                case _:
                    return [Drop(peer, f"{message.kind!r} is not a request")]
        except Refused as fault:
            return [Reply(peer, error_of(message.id, fault, self.version))]

    def _push_in_vain(
        self, event: Received, message: Push | Reapply | PushRows, member: Member | None
    ) -> list[Effect]:
        """Refuse a push before there is a model; drop one of a connection that was replaced.

        Its sequence number is used up unless the server is going down: repeated, it gets the same
        answer, also when there is one.
        """
        if isinstance(event.sink, PushSink):
            event.sink.free()
        if member is None:
            return []
        if message.seq <= member.last_seq:
            before = member.answers.get(message.seq)
            if isinstance(before, Error):
                return [Reply(event.peer, replace(before, id=message.id))]
            raise too_old(message.seq, member)
        fault = validation.unready(member, self.closure.why)
        fault = fault or NotReady(f"{_UNDEFINED}: define it before the first push")
        refusal = error_of(message.id, fault, self.version)
        self.membership.refuse(member, message.seq, fault, refusal)
        return [Reply(event.peer, refusal)]

    def _defined(self, remedy: str) -> Training:
        """Return what depends on the model, or refuse a request; ``remedy``: what to do."""
        if self.training is None:
            raise NotReady(f"{_UNDEFINED}: {remedy}")
        return self.training

    def _leave(self, event: Received, member: Member | None) -> list[Effect]:
        if member is not None:
            if self.training is not None:
                self.training.data_sets.gone(member)
            member.answers.clear()  # it will repeat no push, so none of its answers is needed
        return [*self._left(event), Drop(event.peer, "it said goodbye")]

    def _join_round(
        self, event: Received, message: JoinRound, member: Member | None
    ) -> list[Effect]:
        if member is None or not member.worker:
            raise Refused("an observer may not average; connect with role='worker'")
        layout = self._defined("define it before the first average").store.layout
        return self.rendezvous.join(event.peer, message, layout, event.time)

    def _settle_round(self, event: Received, message: SettleRound) -> list[Effect]:
        training = self._defined("define it before the first average")
        count = partial(training.data_sets.count_all, now=event.time)
        return self.rendezvous.settle(event.peer, message, count)

    # ------------------------------------------------------------ data sets

    def _take_task(self, event: Received, message: TakeTask, member: Member | None) -> list[Effect]:
        if member is None:
            return []
        training = self._defined("define it before the first task")
        effects = training.data_sets.take(event.peer, message, member, event.time)
        return effects + training.updates.workers_changed(event.time)

    def _cover(self, event: Received, message: CoverPush, member: Member | None) -> list[Effect]:
        """Note the examples of a push; without a model that is refused when it comes."""
        if member is None or self.training is None:
            return []
        if self.training.data_sets.cover(message, member, event.time):
            return []
        return [Drop(event.peer, "it covers more pushes than it may have under way")]

    def _data_changed(self, training: Training, now: float) -> list[Effect]:
        """Answer the workers that wait for a task, if this event has brought one."""
        effects = training.data_sets.answer(now)
        return effects + training.updates.workers_changed(now)

    # ------------------------------------------------------------ the model

    def _initialised(self, event: Initialised) -> list[Effect]:
        definition = given(event, self.algorithm, self.codecs)
        slow = self.admission.too_slow(definition.layout, tables=bool(definition.tables))
        if slow is not None:
            raise ConflictError(f"the model to begin with is too large: {slow}")
        training = self.begin(definition)
        rows, shards = given_rows(event, training.tables), self.options.table_shards
        for store, (ids, values) in zip(self.tables, rows, strict=True):
            mine = shards_of(ids, shards) == 0  # of one shard, all
            store.put(ids[mine], values[mine])
        spread = rows if shards > 1 else ()
        begun = [
            replace(effect, rows=spread) if isinstance(effect, DistributeModel) else effect
            for effect in training.begun
        ]
        return begun + training.updates.workers_changed(event.time)

    def _define(self, event: Received, message: Define, member: Member | None) -> list[Effect]:
        """Take the first model that a worker offers; compare later offers with it."""
        offer = event.sink if isinstance(event.sink, OfferSink) else None
        try:
            fault = getattr(event.sink, "fault", None)
            if isinstance(fault, Refused):
                raise fault
            if member is None or not member.worker:
                raise BadPush("only a worker may define the model; this client is an observer")
            training, effects = self.training, list[Effect]()
            created = training is None
            if training is not None:
                compare(training.store.layout, training.tables, message)
            else:
                given_by = self.algorithm, self.codecs, self.options.max_model
                model = offered(message, offer, *given_by)
                training = self.begin(model)
                effects = training.begun + training.updates.workers_changed(event.time)
            effects.append(training.replies.describe(event.peer, message.id, created))
            return effects
        finally:
            if offer is not None:
                offer.free()

    def begin(self, definition: Definition) -> Training:
        """Make everything that depends on the model."""
        self.training = training = Training(
            definition,
            *(self.algorithm, self.policy, self.options, self._clients),
            *(self.membership, self.admission, self.budget),
            *(self.machine, self.warnings, self.closure),
        )
        return training
