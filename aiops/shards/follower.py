"""Carry out a lead's orders on a part of a sharded model.

A follower decides only where an update is written (in place if no reader holds the version here).
Here are its connections and the portions of pushes; its `Shard` has what needs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.bandwidth.gate_controller import HEAVIEST
from aiops.common.generations import generation_text, term
from aiops.engine.admission import Admission
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.events import (
    Applied,
    Apply,
    BudgetTick,
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
    SetBudget,
    Shares,
    Warm,
)
from aiops.engine.receive import CopiedIncoming
from aiops.engine.steady import Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.errors import Kicked, Refused, RemoteProtocolError, Unavailable
from aiops.model.arena import aligned
from aiops.model.layout import Bytes
from aiops.model.parts import Parts
from aiops.model.row_shards import GIVEN_ROWS
from aiops.shards.common_moment import History
from aiops.shards.follower_rows import FollowerRows, rows_given, tables_of
from aiops.shards.receive import ExpectedPortion, ShardBuffers
from aiops.shards.reports import LOST, OWN_GENERATION, PLACE, PROMOTED, write_fault
from aiops.shards.shard import LoadSink, Shard
from aiops.shards.shard_clients import ShardClients
from aiops.store.capture_job import CaptureJob
from aiops.store.parameters import UpdateRound
from aiops.store.resources import Resources
from aiops.store.warmup import Warmup
from aiops.wire.connection import Connection, SinkFor
from aiops.wire.handshake import proves_generation
from aiops.wire.messages import (
    PROTOCOL,
    Error,
    FetchRows,
    Leave,
    Message,
    Ping,
    Pong,
    Push,
    PushRows,
)
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
    TrafficCounted,
    UpdateDone,
)
from aiops.wire.sinks import Discard, Sink

REPLAYED = 0
"""The number of the lead's connection while its orders are replayed: no other has it."""


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
    kept
        Whether it keeps a state. Then it outlives its lead, and goes on under one that comes back.

    Attributes
    ----------
    machine
        As given.
    shard
        Everything that needs a model; None until the lead sends it.
    rows
        The rows of tables that lie here; None unless the lead spreads them.
    lead
        The connection of its lead; None: it has none.
    run
        The run of its lead.
    reached
        The row of the lead's journal that its last order is of, among those that it journals.
    history
        The generations of its lead up to the one of that order (`aiops.shards.common_moment`).
    snapshots
        By row of the lead's journal, the row of its own after which there is a snapshot of it.
    state_report
        Returns what statistics tell of the state that it keeps.
    led_by
        The generation of the last lead of its run; 0: it has had none, or none with a state.
    place
        The number of its place, which it has taken as a standby; 0: it is the first that has it.
    generation
        Returns that of its own state; 0: it keeps none.
    secret
        That of its run, with which a lead has to prove that it is the lead. Empty: it has had no
        lead with a state yet.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        options: Options,
        machine: Resources | None = None,
        *,
        kept: bool = False,
    ) -> None:
        self.algorithm, self.options, self.kept = algorithm, options, kept
        self.machine = machine or Resources()
        parallel_map = self.machine.parallel_map
        make = self.machine.memory.buffer
        self.admission = Admission(
            options.max_model, options.backend, parallel_map=parallel_map, make=make
        )
        self.admission.incoming = CopiedIncoming  # a portion stays until the lead lets it go
        self._rows_admission = Admission(options.max_model, options.backend)
        self._buffers = ShardBuffers(self.admission)
        self._clients = ShardClients()
        self.shard: Shard | None = None
        self.rows: FollowerRows | None = None
        self._rows_full = False  # the message that has no room now is one about rows
        self._before_model: list[Callable[[], bool]] = []  # connections that wait for the model
        self.lead: int | None = None
        self.run = ""
        self.state_report: Callable[[], dict[str, Any]] = dict
        self.snapshots: dict[int, int] = {}
        self.reached, self.history = 0, History()
        self.secret = b""
        self.led_by = self.place = 0
        self.generation: Callable[[], int] = lambda: 0
        self._recovered = False  # there was a state of its run
        self._replayed = False  # the clients of its rows are those of the journal

    # ------------------------------------------------------------ the shell's calls

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        match event:
            case Received():
                return self._on_received(event)
            case Applied() if event.ticket < 0 and self.rows is not None:
                return self.rows.applied(event)
            case Applied() if self.shard is not None:
                report = self.shard.applied(event)
                effects = [] if report is None else self._report(report)
                return effects + ([] if self.rows is None else self.rows.captured(event))
            case Joined():
                return self._on_joined(event)
            case Left():
                return self._on_left(event)
            case BudgetTick():
                counted = event.nbytes, event.second, event.backlog, event.busy, event.limited
                return self._report(BudgetUsed(0, *counted))
            case _:  # as for `Stopping`: the lead learns of it when the connection ends
                return []

    @property
    def idle(self) -> bool:
        """True if no update is outstanding."""
        rows_idle = self.rows is None or self.rows.engine.idle
        return rows_idle and (self.shard is None or self.shard.idle)

    @property
    def led(self) -> bool:
        """True if a lead is connected."""
        return self.lead is not None

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return None: only an engine that holds the whole model has a short way."""
        return None

    def steady_rows(self, peer: int, wire: Connection) -> SteadyRows | None:
        """Return the short way of a client's messages about the rows that lie here."""
        return None if self.rows is None else self.rows.engine.steady_rows(peer, wire)

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        rule = self.algorithm.rule() if self.machine.device is None else None
        warmup = Warmup(rule, self.options.backend)
        return Warm(warmup.steps(), warmup.over)

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections to drop: none, since the shell applies its deadlines itself."""
        return []

    @property
    def pools(self) -> Sequence[BufferPool]:
        """The pools that portions get their buffers from."""
        return (*self.admission.pools, *self._rows_admission.pools)

    def sinks_of(self, peer: int) -> SinkFor:
        """Return the function that gives a connection's messages sinks: `sink_for`."""
        return partial(self.sink_for, peer)

    def sink_for(self, peer: int, message: Message) -> Sink | None:
        """Return the sink of a message's payloads, or None if there is no room now: call `wait`."""
        if peer == self.lead and isinstance(message, LoadShard):
            lengths = [part.nbytes for part in message.parts]
            try:
                rows = rows_given(message)[1]
            except ValueError as error:
                raise RemoteProtocolError(f"load_shard: {error}") from None
            if sum(lengths) > self.options.max_model + rows:
                raise RemoteProtocolError(
                    f"load_shard: {sum(lengths)} bytes, more than --max-model"
                    f" {self.options.max_model}"
                )
            return LoadSink(lengths)
        key = self._clients.key(peer)
        self._rows_full = isinstance(message, FetchRows | PushRows)
        if key is not None and isinstance(message, FetchRows | PushRows):
            return self._rows_sink(message)
        if key is None or not isinstance(message, ShardParts):
            return Discard()
        return self._buffers.sink_for(*key, message)

    def _rows_sink(self, message: FetchRows | PushRows) -> Sink | None:
        if self.shard is None:  # the lead has announced the model already, and it is on its way
            return None
        return Discard() if self.rows is None else self.rows.sink_for(message)

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it returns whether there was."""
        if not self._rows_full:
            self._buffers.wait(again)
        elif self.rows is None:
            self._before_model.append(again)
        else:
            self.rows.engine.wait(again)

    # ------------------------------------------------------------ its journal

    def replaying(self, run: str) -> None:
        """Have a lead of this run, without a connection, whose orders are replayed."""
        self.lead, self.run, self._recovered = REPLAYED, run, True

    def replayed(self) -> None:
        """Wait for the lead, or for further rows: a standby has the clients of its primary."""
        self.lead, self._replayed = None, True

    def hello_of(self, event: Event) -> ShardHello | None:
        """Return how the client introduced itself whose push of rows is taken here, else None."""
        if self.rows is None or self.rows.closed or not isinstance(event, Received):
            return None
        pushes = isinstance(event.message, PushRows)
        return self._clients.hellos.get(event.peer) if pushes else None

    def portion_of(self, event: Received) -> ExpectedPortion | None:
        """Return the portion that a message completes, if it can be used and is waited for."""
        key = self._clients.key(event.peer)
        if key is None or not isinstance(event.message, ShardParts):
            return None
        return self._buffers.awaited(*key, event.message)

    def restore_portion(
        self, number: int, parts: Parts, payload: memoryview, row: int = 0, *, keep: bool = False
    ) -> None:
        """Have a complete portion again, from a row of a journal; ValueError if it is none.

        ``keep``: its gradient alone, whose room is free.
        """
        self._buffers.restore(number, parts, payload, row)
        if keep:
            self._buffers.forget(number, keep=True)

    def load(self, order: LoadShard, data: Bytes) -> Shard:
        """Make the shard that an order describes, of these bytes; ValueError if it cannot be."""
        given = self.algorithm, self.options, self.machine, self._buffers
        counts, nbytes = rows_given(order)
        own, rest = data[: len(data) - nbytes], data[len(data) - nbytes :]
        if nbytes:  # what a shard keeps must not keep the rows in memory, too
            own = aligned(len(own))
            own[:] = data[: len(own)]
        plan = {key: value for key, value in order.plan.items() if key != GIVEN_ROWS}
        self.shard = shard = Shard(replace(order, plan=plan), own, *given)
        tables = tables_of(order)
        if tables is not None:
            self.rows = FollowerRows(tables, *given[:3], self._rows_admission, shard.shards)
            self.rows.put(counts, rest)
        return shard

    @property
    def portions(self) -> list[ExpectedPortion]:
        """The portions that are complete, and have no fault."""
        return self._buffers.usable

    # ------------------------------------------------------------ connections

    def _on_joined(self, event: Joined) -> list[Effect]:
        """Welcome the lead or a client, or refuse it."""
        hello, effects = event.hello, list[Effect]()
        welcome = Reply(event.peer, ShardWelcome(hello.id, PROTOCOL, event.proof))
        try:
            if isinstance(hello, LeadHello):
                self._check_proof(hello)
            if isinstance(hello, LeadHello) and hello.standby:
                return [welcome, Reply(event.peer, self._promoted(hello))]
            if isinstance(hello, LeadHello):
                effects = self._take_lead(event, hello)
                return [*effects, welcome, Reply(event.peer, self.state())]
            if isinstance(hello, ShardHello):
                effects = self._take_client(event, hello)
                last = 0 if self.rows is None else self.rows.last_push_of(hello.client)
                welcome = Reply(event.peer, ShardWelcome(hello.id, PROTOCOL, event.proof, last))
        except ValueError as error:
            return _refusal(event.peer, hello.id, str(error))
        except Unavailable as error:  # the client tries again
            return _refusal(event.peer, hello.id, str(error), Unavailable.code)
        except Kicked as error:
            return _refusal(event.peer, hello.id, str(error), Kicked.code)
        return [*effects, welcome]

    def _check_proof(self, hello: LeadHello) -> None:
        """Check that a lead is one of the run, unless this follower is to begin with it.

        Raises
        ------
        ValueError
            When its word is all that there is for it.
        """
        facts = self.secret, hello.run, hello.generation
        if not self.secret or hello.run != self.run:
            return
        if not proves_generation(hello.lead_proof, *facts, lead=True):
            raise ValueError(
                f"a lead of run {hello.run} (generation {generation_text(hello.generation)}) has"
                " said that it is one, without a proof of it that is right, so this follower is not"
                " led by it: start the lead with the state that it wrote"
            )

    def _take_lead(self, event: Joined, hello: LeadHello) -> list[Effect]:
        effects = list[Effect]()
        if self.lead is not None and (not self.kept or hello.run != self.run):
            raise ValueError("this follower has its lead already")
        if hello.run != self.run and (self.shard is not None or self._recovered):
            raise ValueError(
                f"this follower holds a shard of run {self.run}, and its lead is of run"
                f" {hello.run}: give both the states of one run, or begin both with new ones"
            )
        if hello.run == self.run and hello.generation < self.led_by:
            raise ValueError(
                f"a later start of this lead (generation {generation_text(self.led_by)}) has"
                " taken this follower over; this one is generation"
                f" {generation_text(hello.generation)}"
            )
        if hello.run == self.run and hello.place > self.place:
            raise ValueError(
                "another server has taken the place of this follower, which was lost to its lead:"
                " start it as the standby of that one, with --standby and --shard"
            )
        name, settings = self.algorithm.name, self.algorithm.settings()
        if (name, settings) != (hello.policy, dict(hello.settings)):
            raise ValueError(
                f"the lead's policy is {hello.policy} {dict(hello.settings)}, this follower's"
                f" {name} {settings}: start both with the same"
            )
        if self.lead is not None:  # its connection is gone, which was not noticed here yet
            lost = self.lead
            effects = [*self._lose_lead(), Drop(lost, "its lead has a newer connection")]
        if hello.run != self.run:
            self.secret = b""
        self.lead, self.run, self.led_by = event.peer, hello.run, hello.generation
        if self.rows is not None:
            self.rows.close("")
            if self._replayed:
                self.rows.end_replay()
        self._replayed = False
        return effects

    def state(self) -> ShardState:
        """Return what a lead needs to know of the state that is held here."""
        shard = self.shard
        if shard is None:
            lost = {"reached": self.reached, "history": self.history} if self._recovered else {}
            lost |= self._numbers()
            return ShardState(0, self.kept, "", 0, 0, 0, 0, False, lost)
        report, reached = shard.done or (UpdateDone(0, b"", b""), UpdateRound.STEP)
        holds = {
            "portions": tuple(self._buffers.complete),
            "versions": tuple(shard.held),
            "snapshots": tuple(sorted(self.snapshots)),
            "reached": self.reached,
            "history": self.history,
            **self._numbers(),
        }
        numbers = shard.shard, shard.shards, shard.version, report.id
        only_begun = reached is not UpdateRound.STEP
        return ShardState(0, self.kept, self.run, *numbers, only_begun, holds)

    def _numbers(self) -> dict[str, int]:
        """Return the numbers by which the lead knows later servers in this place from earlier."""
        found = {PLACE: self.place, OWN_GENERATION: self.generation()}
        return {key: number for key, number in found.items() if number}

    def _promoted(self, hello: LeadHello) -> ShardState:
        """Return what the standby of a lead is told: this is no standby any more.

        Raises
        ------
        ValueError
            When it was none: it has no state, or was led in the term of the standby's primary, or
            before. What it was given in that term has other rows than the standby, or may have.
            Unless it has taken its place, which no other has taken since: it has all rows then.
        """
        stateless = not self.kept or (self.shard is None and not self._recovered)
        placed = self.place and self.place >= hello.place
        earlier = self.led_by and term(self.led_by) <= term(hello.generation)
        if stateless or (earlier and not placed):
            raise ValueError("this follower is no standby: start it with --standby and --shard")
        found = self.state()
        return replace(found, holds={**found.holds, PROMOTED: True})

    def _take_client(self, event: Joined, hello: ShardHello) -> list[Effect]:
        """Add a client's connection; drop its earlier ones."""
        if self.lead is None:
            raise Unavailable("this follower has no lead yet: see that its lead runs")
        if hello.run != self.run:
            raise ValueError(f"this follower is of run {self.run}, and its client of {hello.run}")
        effects: list[Effect] = []
        for earlier in self._clients.join(event.peer, hello, event.traffic):
            effects += self._on_left(Left(event.time, earlier))
            effects.append(Drop(earlier, f"{hello.name!r} has a newer connection"))
        return effects

    def _on_left(self, event: Left) -> list[Effect]:
        if event.peer == self.lead and self.kept:
            return [Note("its lead is gone: it waits for it"), *self._lose_lead()]
        if event.peer == self.lead:
            return [End("its lead is gone")]
        if self.rows is not None:
            self.rows.left(event.time, event.peer)
        key = self._clients.leave(event.peer)
        return [] if key is None else self._lose_portions(*key)

    def _lose_lead(self) -> list[Effect]:
        """Drop the lead's clients, and what they were sending; what is complete stays."""
        self.lead, effects = None, list[Effect]()
        for peer in self._clients.present:
            self._clients.leave(peer)
            if self.rows is not None:
                self.rows.left(self.rows.engine.now, peer)
            effects.append(Drop(peer, "its lead is gone"))
        self._buffers.forget_incomplete()
        if self.shard is not None:
            self.shard.lose_lead()
        return effects

    def _lose_portions(self, client: str, epoch: int) -> list[Effect]:
        """Report the pushes whose portions will not come, because their connection was lost."""
        return [
            effect
            for number in self._buffers.left(client, epoch)
            for effect in self._report(PushArrived(number, {"code": LOST}))
        ]

    # ------------------------------------------------------------ messages

    def _on_received(self, event: Received) -> list[Effect]:
        message, peer = event.message, event.peer
        match message:
            case Ping():
                return [Reply(peer, Pong(message.id))]
            case Pong():
                return []
            case ShardParts():
                return self._on_parts(peer, message)
            case FetchRows() | PushRows():
                return self._on_rows(event, message)
        if peer == self.lead:
            try:
                return self._carry_out(event)
            except (ValueError, RemoteProtocolError) as error:
                refusal = _refusal(peer, message.id, f"{message.kind}: {error}")
                return [Note(f"its lead's order makes no sense: {error}"), *refusal]
        return [_not_for_followers(event)]

    def _on_parts(self, peer: int, message: ShardParts) -> list[Effect]:
        key = self._clients.key(peer)
        came = None if key is None else self._buffers.arrived(*key, message)
        if came is None:
            return []
        sample = b"", b""
        if self.shard is not None and came.fault is None and came.gradient is not None:
            sample = self.shard.measured(came.gradient)
        arrived = PushArrived(came.number, write_fault(came.fault), came.largest, *sample)
        return self._report(arrived)

    def _on_rows(self, event: Received, message: FetchRows | PushRows) -> list[Effect]:
        hello = self._clients.hellos.get(event.peer)
        if hello is not None and self.rows is not None:
            return self.rows.received(event, hello)
        if event.sink is not None:
            event.sink.abandoned()
        if hello is None:
            return [_not_for_followers(event)]
        text = "no rows of tables lie on this server: ask its lead"
        return [Reply(event.peer, Error(message.id, Refused.code, text, {}, False))]

    def _report(self, message: Message) -> list[Effect]:
        """Send a message to the lead, if there is one."""
        return [] if self.lead is None else [Reply(self.lead, message)]

    # ------------------------------------------------------------ orders

    def _carry_out(self, event: Received) -> list[Effect]:
        """Carry out an order, or raise ValueError or RemoteProtocolError if it makes no sense."""
        order = event.message
        if isinstance(order, LoadShard | RunUpdate | HoldVersion | FinishPush):
            self.reached = max(self.reached, order.row)
        match order:
            case ShareSecret():
                self._learn(order.secret)
                return []
            case LoadShard():
                return self._load(order, event.sink)
            case ExpectPush():
                return self._expect(order)
            case FinishPush():
                self._buffers.forget(order.id, keep=order.keep)
                return []
            case RunUpdate():
                return self._run_update(order, event.time)
            case SendParams():
                peer = self._clients.peer(order.client, order.epoch) if order.client else self.lead
                return self._loaded.send_params(order, peer)
            case SendIncrements():
                peer = self._clients.peer(order.client, order.epoch)
                return self._loaded.send_increments(order, peer)
            case HoldVersion():
                self._loaded.hold(order)
                return []
            case NoteHistory():
                self.history = tuple(zip(order.generations, order.began, strict=True))
                return []
            case KeepSets():
                return []
            case CountTraffic():
                rows = {} if self.rows is None else self.rows.counts()
                counted = self._clients.counted(), self.state_report(), rows
                return self._report(TrafficCounted(order.id, *counted))
            case SendRows() if self.rows is not None and self.lead is not None:
                return self.rows.send_all(order.id, self.lead, event.time)
            case ClosePushes():
                if self.rows is not None:
                    self.rows.close(order.why)
                return []
            case PaceClients():
                return self._pace(order)
            case SendAway():
                return self._send_away(order, event.time)
            case Leave():
                self.lead = None
                return [End()]
            case _:
                return [_not_for_followers(event)]

    def _send_away(self, order: SendAway, time: float) -> list[Effect]:
        """Drop a client, and what it was sending."""
        effects: list[Effect] = []
        for peer in self._clients.send_away(order.client, order.why):
            effects += [*self._on_left(Left(time, peer)), Drop(peer, order.why)]
        return effects

    def _pace(self, order: PaceClients) -> list[Effect]:
        """Apply new shares of the budgets, and new weights of the clients."""
        if not order.total and not order.each:
            raise ValueError("it limits nothing")
        weights = order.weights
        if not all(type(each) is float and 0 < each <= HEAVIEST for each in weights.values()):
            raise ValueError(f"a client's weight is a number above 0, at most {HEAVIEST:g}")
        keys = ((peer, self._clients.key(peer)) for peer in self._clients.present)
        weighed = tuple((peer, weights[key[0]]) for peer, key in keys if key and key[0] in weights)
        paced = SetBudget(order.total or None, order.each or None)
        return [paced, Shares(weighed)] if weighed else [paced]

    def _learn(self, secret: bytes) -> None:
        if self.secret not in (b"", secret):
            raise ValueError("this follower knows another secret of the run")
        self.secret = secret

    def _run_update(self, order: RunUpdate, time: float) -> list[Effect]:
        found = self._loaded.run_update(order)
        if self.rows is not None and isinstance(found, Apply) and isinstance(found.job, CaptureJob):
            return self.rows.capture(found, time)
        if isinstance(found, UpdateDone):
            return self._report(found)
        return [] if found is None else [found]

    @property
    def _loaded(self) -> Shard:
        if self.shard is None:
            raise ValueError("the model has not begun")
        return self.shard

    def _load(self, order: LoadShard, sink: Sink | None) -> list[Effect]:
        if self.shard is not None:
            raise ValueError("it has begun already")
        data = sink.data if isinstance(sink, LoadSink) else aligned(0)
        warm = Warm(self.load(order, data).store.warming())
        waiting, self._before_model = self._before_model, []
        for again in waiting:
            again()
        return [warm, *(() if self.rows is None else self.rows.begun)]

    def _expect(self, order: ExpectPush) -> list[Effect]:
        broken = self._buffers.expect(order)
        peer = self._clients.peer(order.client, order.epoch)
        effects = list[Effect]()
        if broken:  # the lead drops a client whose portion will not come, and frees the push
            effects = self._report(PushArrived(order.id, {"code": LOST}))
        if peer is None:
            # A client attaches to all shards before it pushes. This one is not attached, so its
            # connection was lost, and the portion with it.
            effects += self._lose_portions(order.client, order.epoch)
        elif broken:
            effects.append(Drop(peer, broken))
        return effects


def _refusal(peer: int, id: int, text: str, code: str = "protocol") -> list[Effect]:
    """Return the end of a connection, with the reason."""
    return [Reply(peer, Error(id, code, text, {}, True)), Drop(peer, text)]


def _not_for_followers(event: Received) -> Drop:
    return Drop(event.peer, f"{event.message.kind!r} is not for a follower")
