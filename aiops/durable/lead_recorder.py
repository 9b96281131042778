"""The journal of a sharded model's lead, and recovery from it.

The journal is that of the engine, below the lead, because the lead changes the times of events and
holds pushes back. The gate is above it: what waits for rows are the lead's answers and its orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aiops.durable.commit_gate import CommitGate
from aiops.durable.recorder import (
    NO_GENERATIONS,
    AppendRow,
    KeepSnapshots,
    Recorder,
    RecorderEffect,
)
from aiops.durable.recovery import Replayer, differs, unexpected
from aiops.durable.rows import AppliedMark, check_of, passes
from aiops.durable.shard_rows import (
    DATED_ORDERS,
    lead_events,
    lead_row,
    measured_row,
    sums_of,
)
from aiops.engine.events import (
    Applied,
    Effect,
    Event,
    Order,
    Received,
    Reported,
    Resumed,
    SnapshotWritten,
    Warm,
)
from aiops.engine.restore import Captured
from aiops.engine.training import Training
from aiops.model.layout import Ints
from aiops.shards.common_moment import CommonMoment
from aiops.shards.lead import Lead
from aiops.shards.orders import CAPTURE
from aiops.shards.sharded_model import holders_in
from aiops.shards.updating import clip
from aiops.state.directory import GenerationFile
from aiops.state.file_bytes import OwnMemory
from aiops.state.frames import JournalFrame
from aiops.state.row_kinds import RowKind, row_fields
from aiops.store.delta_replica import ReplicaJob
from aiops.store.finite_guard import refused_tensor
from aiops.store.gradient import Gradient
from aiops.store.parameters import MeasureJob, UpdateJob, UpdateRound
from aiops.store.sparse_table import TableJob
from aiops.store.updater import NONE
from aiops.wire.decoding import decode
from aiops.wire.server_messages import KeepSets, RunUpdate, ShardState


class LeadRecorder(Recorder):
    """A lead with a journal.

    Parameters
    ----------
    lead
        Handles the events.
    gate, first, generations, recording
        As of `Recorder`.
    """

    def __init__(
        self,
        lead: Lead,
        gate: CommitGate,
        first: int,
        generations: GenerationFile = NO_GENERATIONS,
        *,
        recording: bool = True,
    ) -> None:
        super().__init__(lead.engine, gate, first, generations, recording=recording)
        self.lead = lead
        lead.journalled_by(self._decide, self._measured)

    def handle(self, event: Event) -> list[RecorderEffect]:
        """Handle an event, as `Recorder.handle`."""
        if isinstance(event, Reported) and isinstance(event.message, ShardState):
            self._gate.forget_orders(event.shard)
        effects, found = super().handle(event), list[RecorderEffect]()
        if isinstance(event, SnapshotWritten):
            effects += self.lead.saved(0, event.row, well=not event.why)
        for effect in effects:
            if isinstance(effect, Order) and not effect.shard:  # to this server
                assert isinstance(effect.message, KeepSets), "it is the only one"
                found.append(KeepSnapshots(effect.message.cuts))
            else:
                found.append(effect)
        return found

    def _handle(self, event: Event) -> list[RecorderEffect]:
        return self._gated(self.lead.handle(event))

    def resumed(self, event: Resumed, outstanding: Sequence[Effect]) -> list[RecorderEffect]:
        """Go on after a replay, with the engine's effects that are to be carried out still."""
        return self._gated(self.lead.resumed(event, outstanding))

    def _gated(self, effects: Sequence[Effect | AppendRow]) -> list[RecorderEffect]:
        """Return those of a lead's effects that are to be carried out now, and keep the others."""
        found = list[RecorderEffect]()
        held = list[Effect]()
        for effect in effects:
            if isinstance(effect, AppendRow):
                found.append(effect)
            else:
                held.append(self._dated(effect) if isinstance(effect, Order) else effect)
        rows = self.holds or any(append.later for append in found)  # type: ignore[union-attr]
        return [*found, *(self._gate.hold(held, self.next - 1) if rows else held)]

    def _dated(self, order: Order) -> Order:
        """Return an order with the row that it is of (`aiops.shards.common_moment`).

        While there is no journal, that is the next one: it will not be read back, unless a snapshot
        is captured there.
        """
        message = order.message
        if not isinstance(message, DATED_ORDERS):
            return order
        row = self.next - self.recording
        if isinstance(message, RunUpdate):
            row = message.work.get(CAPTURE) or row
        return replace(order, message=replace(message, row=row))

    def _decide(self, event: Event) -> list[Effect]:
        """Journal an event, and have the engine handle it."""
        if not self.recording or passes(event):
            handled: list[RecorderEffect] = [*self.engine.handle(event)]
            if self._taking is not None:
                handled = self._captured(event, handled)
            return handled  # type: ignore[return-value]
        leased = self.engine.freeze()
        number, self.next = self.next, self.next + 1
        append = self._append(number, lead_row(event, leased), event)
        if isinstance(event, Received):
            event = Received(event.time, event.peer, event.message, event.sink, number)
        found: list[RecorderEffect] = [append, *self.engine.handle(event, leased)]
        if self._taking is not None:
            found = self._captured(event, found)
        return found  # type: ignore[return-value]

    def _measured(self, ticket: int, squares: Sequence[float]) -> list[Effect]:
        if not self.recording:
            return []
        number, self.next = self.next, self.next + 1
        row = measured_row(self.engine.now, ticket, squares)
        return [self._append(number, row, None)]  # type: ignore[list-item]


class LeadReplayer(Replayer):
    """Feeds rows to the engine of a lead.

    Parameters
    ----------
    lead
        A fresh lead; followers are not connected, and receive no orders.
    warm
        As of `Replayer`.
    moment
        What the followers hold, which bounds the rows that are replayed. None: all are.
    """

    bound = "the servers of the model go back to a moment that all have"

    def __init__(
        self,
        lead: Lead,
        warm: Callable[[Warm], object] | None = None,
        moment: CommonMoment | None = None,
    ) -> None:
        super().__init__(lead.engine, warm)
        self._lead, self._moment = lead, moment

    def begins_with(self, row: int, found: Captured) -> bool:
        """Return whether the followers support the row of a snapshot."""
        holders = holders_in(found.owners, self._lead.engine.options)
        return self._moment is None or row <= self._moment.newest(holders)

    def goes_on_with(self, frame: JournalFrame) -> bool:
        """Return whether the followers support a row, after those that have been replayed."""
        moment, number = self._moment, frame.number
        if moment is not None and number > moment.end:
            return False
        if moment is None or frame.kind not in (RowKind.SPREAD, RowKind.MEASURED, RowKind.APPLIED):
            return True
        if frame.kind == RowKind.APPLIED and refused_tensor(sums_of(frame)) is not None:
            return True  # a refused update has changed nothing on followers
        found, model = row_fields(frame.kind, frame.row, f"row {number:,}"), self._lead.model
        if frame.kind == RowKind.SPREAD:
            assert model is not None, "a model comes before its pushes"
            shards = () if found["fault"] else model.spread_to(decode(found["message"]))
            return moment.has_portions(number, shards, found["number"])
        apply = self._outstanding
        if model is None or apply is None or isinstance(apply.job, TableJob | MeasureJob):
            return True  # it is the lead's alone, or the row has what all have measured
        measured = frame.kind == RowKind.MEASURED
        shards = model.placement.used[1:]
        return moment.has_done(number, shards, found["ticket"], measured=measured)

    def feed(self, frame: JournalFrame) -> None:
        """Handle a row's events, as `Replayer.feed`."""
        if frame.kind == RowKind.MEASURED:
            self._row, self._time = frame.number, frame.time
            found = row_fields(frame.kind, frame.row, f"row {frame.number:,}")
            self._measure(found["ticket"], found["squares"])
            return
        self._sums = sums_of(frame) if frame.kind == RowKind.APPLIED else None
        super().feed(frame)
        if self.room is not None:
            self.room.free(frame.payload)

    def _begun(self, training: Training) -> None:
        self._lead.restored(training)

    def _gradient_kept(self, gradient: Gradient) -> None:
        if self._lead.model is not None:
            self._lead.model.keep_gradient(gradient)

    def _events(self, frame: JournalFrame, room: OwnMemory | None) -> list[Event | AppliedMark]:
        return lead_events(self._lead, frame)

    def _measure(self, ticket: int, squares: Sequence[float]) -> None:
        """Run the first round of an update that is clipped."""
        apply = self._outstanding
        if apply is None or apply.ticket != ticket or not isinstance(apply.job, UpdateJob):
            raise unexpected(self._row)
        apply.job.round = UpdateRound.MEASURE
        apply.run()
        clip(apply.job, squares)

    def _applied(self, mark: AppliedMark) -> Applied:
        """Run the lead's part of the outstanding update, and compare it with the result of all."""
        apply, self._outstanding = self._outstanding, None
        if apply is None or mark.ticket != apply.ticket or self._sums is None:
            raise unexpected(self._row)
        job, mine = apply.job, NONE
        if isinstance(job, UpdateJob) and refused_tensor(self._sums) is not None:
            job.store.updater.drop_sum()
        else:
            if isinstance(job, UpdateJob):
                job.round = UpdateRound.STEP  # it was made, so its result was finite on all
            mine = NONE if isinstance(job, MeasureJob) else apply.run()
            if isinstance(job, UpdateJob | ReplicaJob) and self._lead.model is not None:
                self._lead.model.updated()
        if check_of(apply.ticket, self._sums) != mark.check or not self._agrees(job, mine):
            raise differs(self._row)
        self._capture_done(apply)
        return Applied(mark.time, apply.ticket, self._sums)

    def _agrees(self, job: object, mine: Ints) -> bool:
        """Return whether sums that were computed here are in the recorded ones.

        Of the last tensor the lead may hold a piece.
        """
        assert self._sums is not None
        whole = len(mine) - isinstance(job, UpdateJob)
        return bool((mine[:whole] == self._sums[:whole]).all()) if whole > 0 else True

    def _note(self, effects: list[Effect]) -> None:
        super()._note(effects)
        self._lead.replayed(effects)
