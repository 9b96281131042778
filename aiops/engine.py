"""The engine: events in, effects out. It decides everything, and does nothing by itself.

The server, replay, the simulator and a unit test all drive this one class::

    for effect in engine.handle(event):
        ...carry it out; run an Apply, and come back with Applied...

Every event carries its time, and the list of events is the journal: the same events give the same
effects and, because the kernels are deterministic, the same parameters to the last bit. One `Apply`
is outstanding at a time; everything about it is fixed when it is issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops import gates, messages
from aiops.algorithms.base import Algorithm
from aiops.answers import Answers, Pending
from aiops.arena import Arena, aligned
from aiops.codecs.choice import Choice
from aiops.controller import Controller, Crossing
from aiops.crew import Crew, Member
from aiops.errors import (
    BadPush,
    ConflictError,
    NotReady,
    Refused,
    StaleGradient,
    Unavailable,
    UsageError,
)
from aiops.events import (
    Applied,
    Drop,
    Effect,
    Event,
    Initialised,
    Joined,
    Left,
    Options,
    Paced,
    Received,
    Reply,
    Shares,
    Stopping,
    Tick,
    Warm,
)
from aiops.incoming import Incoming
from aiops.intake import Intake, Offer
from aiops.kernels.rule import Rule
from aiops.layout import Array, Ints, Layout
from aiops.meeting import Meeting
from aiops.messages import (
    Again,
    Define,
    Describe,
    Fetch,
    FetchRows,
    Leave,
    Meet,
    Message,
    Ping,
    Pong,
    Push,
    PushRows,
    Report,
    Stats,
    Welcome,
)
from aiops.rows import TableStore
from aiops.rowsdesk import RowsDesk
from aiops.rowsintake import RowsIncoming, RowsIntake
from aiops.shadow import Shadow
from aiops.shadowing import Shadowing
from aiops.store import Store
from aiops.tables import ID_BYTES, NamedTable, Tables
from aiops.updates import Updates
from aiops.versions import Wanted
from aiops.wire import Discard, Sink


class Engine:
    """One server's decisions.

    Parameters
    ----------
    algorithm
        Policy, rule and client plan.
    options
        See `Options`.

    Raises
    ------
    ConflictError
        When the algorithm and the options cannot work together.
    """

    def __init__(self, algorithm: Algorithm, options: Options | None = None) -> None:
        self.algorithm, self.options = algorithm, options or Options()
        workers, deadline = self.options.workers, self.options.worker_deadline
        algorithm.check(workers, self.options.relaxed)
        told = {"patience": deadline, "heartbeat": self.options.heartbeat}
        self.plan = {**algorithm.plan(workers), **told}
        recall = self._plan_gate()
        self.codecs = Choice.of(self.options.push_codec), Choice.of(self.options.fetch_codec)
        self._check_codecs()
        for key, choice in zip(("push_codec", "fetch_codec"), self.codecs, strict=True):
            if choice:
                self.plan[key] = choice.announced
        self.store: Store | None = None
        self.rows: RowsDesk | None = None
        self.stopping = False
        self._effects: list[Effect] = []
        self.crew = Crew(workers, deadline)
        self.intake = Intake(self.options.max_model, self.options.backend)
        self.answers = Answers(self._effects)
        self.updates = Updates(algorithm, workers, self.crew, self.answers, self._effects)
        self.updates.recall.bound = recall
        self.meeting = Meeting(self.plan.get("average"), self._effects)
        budget, each = self.options.budget, self.options.worker_budget
        self.budget = Controller.beside(self.plan.get("gate"), budget, each)
        self.answers.budget = self.budget
        self.intake.budget = min(filter(None, (budget, each)), default=None)
        self.now = self.started = 0.0
        self._fresh = True  # nothing has happened yet
        self._tables = Tables({})
        self._seconds: deque[tuple[float, int]] = deque(maxlen=12)  # (time, version then)

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
        if pushed and not self.algorithm.saved_up:
            name = self.algorithm.name
            raise ConflictError(
                f"{name} squares each gradient, and {min(pushed)} leaves most of one out, to add it"
                f" to a later one: {name} diverges on what has been saved up so. Push with fp16,"
                " bf16 or int8, or choose another policy, such as fasgd"
            )

    def handle(self, event: Event) -> list[Effect]:
        """Take in an event; return what is to be done, in order."""
        self.now = self.answers.now = self.updates.now = event.time
        if self._fresh:
            self.started, self._fresh = event.time, False
        _HANDLERS[type(event)](self, event)
        effects = self._effects.copy()
        self._effects.clear()
        for effect in effects:
            if type(effect) is Reply:
                member = self.crew.at(effect.peer)
                if member is not None:
                    member.ledger.answered(effect.message)
        return effects

    @property
    def tables(self) -> Sequence[TableStore]:
        """The model's tables."""
        return self.rows.stores if self.rows else ()

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding and nothing queued."""
        return self.updates.idle

    # ------------------------------------------------------------ who is there

    def _on_joined(self, event: Joined) -> None:
        hello = event.hello
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
        """Return what a client is told now: under a budget also how long its bytes may take."""
        if self.budget is None:
            return self.plan
        workers = max(self.options.workers or 1, len(self.crew.present()))
        return {**self.plan, "seconds_per_byte": self.budget.seconds_per_byte(workers)}

    def _on_paced(self, event: Paced) -> None:
        if self.budget is None:
            return
        crossing = Crossing(
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
        if not self._seconds or self.now - self._seconds[-1][0] >= 1:
            self._seconds.append((self.now, self.answers.version))
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
        """It is alive; that is all."""

    def _on_leave(self, event: Received) -> None:
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
        assert isinstance(event.message, Meet)
        member = self.crew.at(event.peer)
        if member is None or not member.worker:
            raise Refused("an observer may not average; connect with role='worker'")
        if self.store is None:
            raise NotReady("nobody has defined the model yet: define it before the first average")
        self.meeting.meet(event.peer, event.message, self.store.layout, self.now)

    # ------------------------------------------------------------ the model

    def _on_initialised(self, event: Initialised) -> None:
        layout = Layout(event.rows, empty=bool(event.tables))
        slow = self.intake.too_slow(layout)
        if slow is not None:
            raise ConflictError(f"the model to begin with is too large: {slow}")
        tables = Tables.told((row for row, _count in event.tables), layout.index)
        why = self.algorithm.tables() if tables else None
        if why is not None:
            raise ConflictError(f"the model to begin with has tables, but {why}")
        self._define(layout, event.data[: layout.nbytes], tables)
        counts = {row[0]: count for row, count in event.tables}
        place = layout.nbytes
        for store in self.tables:  # in the order of their names, as everywhere
            count, width = counts[store.named.name], store.table.width
            ends = place + count * ID_BYTES, place + count * (ID_BYTES + store.table.row_bytes)
            ids = np.frombuffer(event.data[place : ends[0]].tobytes(), np.int64)
            rows = np.frombuffer(event.data[ends[0] : ends[1]].tobytes(), store.dtype)
            store.put(ids, rows.reshape(count, width))
            place = ends[1]

    def _on_define(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, Define)
        offer = sink if isinstance(sink, Offer) else None
        try:
            fault = getattr(sink, "fault", None)
            if isinstance(fault, Refused):
                raise fault
            member = self.crew.at(event.peer)
            if member is None or not member.worker:
                raise BadPush("only a worker may define the model; this client is an observer")
            created = self.store is None
            if self.store is not None:
                _compare(self.store.layout, self._tables, message)
            else:
                self._define_offered(message, offer)
            self.answers.describe(event.peer, message.id, created)
        finally:
            if offer is not None:
                offer.free()

    def _define_offered(self, message: Define, offer: Offer | None) -> None:
        tables = _tables_of(message)
        if tables:
            why, limit = self.algorithm.tables(), self.options.max_model
            if why is not None:
                raise BadPush(f"this server's model cannot have the table {min(tables)!r}: {why}")
            nbytes = sum(named.table.nbytes for named in tables.values())
            if nbytes > limit:
                raise BadPush(
                    f"tables of {nbytes} bytes, all rows counted, are larger than this server takes"
                    f" ({limit}): start it with a larger --max-model"
                )
        if offer is not None:
            self._define(offer.layout, offer.buffer, tables)
        elif tables and not message.tensors:
            self._define(Layout((), empty=True), aligned(0), tables)
        else:
            raise BadPush("the offered model has no values: send all tensors")

    def _define(
        self, layout: Layout, data: npt.NDArray[np.uint8], tables: Tables | None = None
    ) -> None:
        options = self.options
        tables = tables or Tables({})
        stores = _table_stores(tables, self.algorithm.rule(), options.backend)
        self.store = Store(
            layout,
            self.algorithm.rule(),
            backend=options.backend,
            live=options.live,
            relaxed=options.relaxed,
            arena=Arena(layout, data),
        )
        self.store.read_packed({codec.name for _pattern, codec in self.codecs[0].pairs})
        self.intake.defined(layout)
        self.crew.defined(layout)
        self.answers.store = self.store
        self.updates.begin(self.store)
        if self.codecs[1]:
            shadow = Shadow(self.store.current, self.codecs[1], options.backend, options.fetch_lag)
            queue = partial(self.updates.work, first=True)
            self.answers.shadowing = Shadowing(self.store, shadow, self._effects, queue)
        self._tables = tables
        self.answers.tables = self._tables.described
        self.rows = RowsDesk(
            self.algorithm, options.workers, stores, self.answers, self.updates.work
        )
        rows_intake = RowsIntake(self._tables, self.intake, options.backend)
        self.intake.place_rows = rows_intake.place
        self._effects.append(Warm(partial(_warm, (self.store, *stores))))

    # ------------------------------------------------------------ pushes

    def _on_push(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, Push)
        member = self.crew.at(event.peer)
        fault: Refused | None = None
        if member is not None and not self.answers.repeated(event, member):
            member.last_seq = message.seq
            fault = self._fault(member, message, sink)
            if fault is None:
                assert isinstance(sink, Incoming)
                self.updates.push(Pending(event.peer, message, sink, member))
                return
            self.answers.refuse_at_once(event, member, fault)
        if isinstance(sink, Incoming):
            sink.free()

    def _on_again(self, event: Received) -> None:
        """Apply a worker's last gradient again; that it is not kept any more is no error."""
        message = event.message
        assert isinstance(message, Again)
        member = self.crew.at(event.peer)
        if member is None or self.answers.repeated(event, member):
            return
        member.last_seq = message.seq
        fault = self._unfit(member) or self._beyond(message)
        if fault is not None:
            self.answers.refuse_at_once(event, member, fault)
            return
        recalled = self.updates.recall.find(member.number)
        self.updates.push(Pending(event.peer, message, recalled, member))

    def _unfit(self, member: Member) -> Refused | None:
        """Return why nothing can be taken from this client now, or None."""
        if not member.worker:
            return BadPush("an observer may not push; connect with role='worker'")
        if self.stopping:
            return Unavailable("the server is shutting down and takes no more pushes")
        if self.store is None:
            return NotReady("nobody has defined the model yet: define it before the first push")
        return None

    def _fault(self, member: Member, message: Push | PushRows, sink: Sink | None) -> Refused | None:
        """Return why a push cannot be taken whatever the policy, or None."""
        unfit = self._unfit(member)
        if unfit is not None:
            return unfit
        assert self.store is not None
        if isinstance(sink, Discard) and isinstance(sink.fault, Refused):
            return sink.fault
        if not isinstance(sink, Incoming):
            return BadPush("the push holds no tensor: push at least one")
        if sink.fault is not None or isinstance(message, PushRows):
            return sink.fault
        return _ahead(self.store, sink) or self._beyond(message)

    def _beyond(self, message: Push | Again) -> Refused | None:
        """Refuse to look for tensors that the model does not have."""
        assert self.store is not None
        if not message.wants:
            return None
        try:
            Wanted(message.have, message.wants).known(0, len(self.store.layout.tensors))
        except Refused as fault:
            return fault
        return None

    def _on_fetch_rows(self, event: Received) -> None:
        if isinstance(event.sink, Discard) and isinstance(event.sink.fault, Refused):
            raise event.sink.fault
        if self.rows is None:
            raise NotReady("nobody has defined the model yet: a worker must do it")
        self.rows.fetch(event)

    def _on_push_rows(self, event: Received) -> None:
        message, sink, rows = event.message, event.sink, self.rows
        assert isinstance(message, PushRows)
        member = self.crew.at(event.peer)
        if member is not None and not (rows and rows.repeated(event, member)):
            member.last_seq = message.seq
            fault = self._fault(member, message, sink)
            if fault is None and rows is not None and isinstance(sink, RowsIncoming):
                fault = rows.fault(sink, message)
            if fault is None and rows is not None:
                rows.push(event, member)
                return
            self.answers.refuse_at_once(event, member, fault or BadPush("it pushes no row"))
        if isinstance(sink, Incoming):
            sink.free()

    # ------------------------------------------------------------ statistics

    def report(self) -> dict[str, Any]:
        """Return the statistics that ``aiops stats`` shows."""
        store, staleness = self.store, self.updates.staleness
        pool, rows = self.intake.pool, self.intake.answers
        used = sum(staleness.values())
        return {
            "policy": self.algorithm.name,
            "settings": self.algorithm.settings(),
            "version": self.answers.version,
            "seconds": round(self.now - self.started, 3),
            "updates_per_second": round(self._rate(), 3),
            "gradients": used,
            "refused": dict(self.answers.refused),
            "ignored": self.updates.ignored,
            "wasted": self.updates.ignored + self.answers.refused[StaleGradient.code],
            "staleness": {str(tau): n for tau, n in sorted(staleness.items())},
            "mean_staleness": self.updates.total_staleness / max(used, 1),
            "vbar": store.vbar() if store else None,
            "parameters": store.layout.parameters if store else 0,
            "tensors": len(store.layout.tensors) if store else 0,
            "tables": [table.report() for table in self.tables],
            "kernels": store.backend if store else "",
            "versions_alive": store.alive if store else 0,
            "versions_copied": store.copies if store else 0,
            "receive_bytes": pool.out,
            "receive_bytes_peak": pool.peak,
            "rows_bytes": rows.out,
            "rows_bytes_peak": rows.peak,
            "waiting": len(self.updates.held),
            "waited_for": sorted(self.crew.waited_for()),
            "shadow": self.answers.shadowing.shadow.report() if self.answers.shadowing else None,
            "averages": self.meeting.report(),
            "ledger": self.crew.ledger(),
            "budget": self.budget.report(store.vbar() if store else None) if self.budget else None,
            "workers": [member.report(self.now) for member in self.crew],
        }

    def _rate(self) -> float:
        """Return updates per second over the last ten seconds or so."""
        if not self._seconds:
            return 0.0
        since, version = self._seconds[0]
        return (self.answers.version - version) / max(self.now - since, 1e-9)


def _ahead(store: Store, sink: Incoming) -> BadPush | None:
    """Refuse a gradient of a version that does not exist yet."""
    cover, current = sink.cover, store.current
    if cover.level is not None and current.level is not None and cover.level <= current.level:
        return None
    versions = current.tensor_versions[cover.tensors]
    ahead = np.flatnonzero(cover.bases > versions)
    if not len(ahead):
        return None
    row = int(ahead[0])
    name = store.layout.tensors[int(cover.tensors[row])].name
    return BadPush(
        f"{name!r} was computed at version {cover.bases[row]}, but the server is at"
        f" {versions[row]}: fetch the parameters again (was the server restarted?)",
        tensor=name,
    )


def _table_stores(tables: Tables, rule: Rule, backend: str) -> tuple[TableStore, ...]:
    """Make room for the rows of tables, of which none takes memory yet."""
    try:
        return tuple(TableStore(named, rule, backend) for named in tables.each)
    except (MemoryError, OSError) as error:
        nbytes = sum(named.table.nbytes for named in tables.each)
        raise BadPush(
            f"tables of {nbytes} bytes, and the rule's state for them, are larger than this"
            f" server's address space: {error}"
        ) from None


def _warm(stores: Sequence[Store | TableStore]) -> None:
    for store in stores:
        store.warm()


def _tables_of(message: Define) -> Tables:
    """Return the tables of an offer."""
    try:
        return Tables.told(message.tables, (name for name, _dtype, _shape in message.tensors))
    except UsageError as error:
        raise BadPush(str(error)) from None


def _compare(layout: Layout, tables: Tables, message: Define) -> None:
    """Refuse an offer of another model than the server's."""
    offered = _tables_of(message)
    try:
        difference = layout.difference(Layout.shared(message.tensors, empty=bool(offered)))
        difference = difference or tables.difference(offered)
    except UsageError as error:
        difference = str(error)
    if difference:
        raise BadPush(f"the server's model is another one: {difference}")


_HANDLERS: dict[type, Callable[[Engine, Any], None]] = {
    Initialised: Engine._on_initialised,
    Joined: Engine._on_joined,
    Received: Engine._on_received,
    Left: Engine._on_left,
    Tick: Engine._on_tick,
    Applied: Engine._on_applied,
    Stopping: Engine._on_stopping,
    Paced: Engine._on_paced,
}

_TRANSMISSIONS = (Push, Again, Fetch, PushRows, FetchRows)
"""What a gate lets through, or not."""

_MESSAGES: dict[type[Message], Callable[[Engine, Received], None]] = {
    Push: Engine._on_push,
    Again: Engine._on_again,
    Fetch: Engine._on_fetch,
    FetchRows: Engine._on_fetch_rows,
    PushRows: Engine._on_push_rows,
    Define: Engine._on_define,
    Describe: Engine._on_describe,
    Stats: Engine._on_stats,
    Ping: Engine._on_ping,
    Pong: Engine._on_pong,
    Leave: Engine._on_leave,
    Meet: Engine._on_meet,
}
