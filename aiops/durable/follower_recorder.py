"""The journal of a sharded model's follower, and recovery from it.

A follower's state is a function of the orders that it has carried out and of the portions that
have come. Its reports say that it has them, so they wait for its journal as acknowledgements do:
then an acknowledgement of the lead's, which needs the reports of all, holds for all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from aiops.common.frozen import value
from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.lead_recorder import LeadReplayer
from aiops.durable.recorder import WAITS, AppendRow, BeginJournal, KeepSnapshots, WriteSnapshot
from aiops.durable.recovery import SMALL, Recovered, differs, unexpected
from aiops.durable.rows import AppliedMark, JournalRow, check_of, events_of, row_of
from aiops.durable.shard_rows import (
    KEPT_ORDERS,
    done_row,
    order_of,
    order_row,
    portion_of,
    portion_row,
)
from aiops.engine.buffer_pool import unbounded
from aiops.engine.capture import Capture
from aiops.engine.events import (
    Applied,
    Apply,
    Committed,
    Effect,
    Event,
    JournalEnded,
    Left,
    Note,
    Received,
    Reply,
    SnapshotWritten,
    Warm,
)
from aiops.engine.receive import PushSink
from aiops.engine.restore import Captured, ReadArray, check_settings
from aiops.errors import DamagedState
from aiops.model.layout import Array
from aiops.model.parts import LARGEST
from aiops.shards.follower import Follower
from aiops.shards.follower_rows import joined
from aiops.shards.shard_capture import capture_shard, restore_shard
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import RowKind, row_fields
from aiops.store.capture_job import CaptureJob
from aiops.store.updater import NONE
from aiops.wire.decoding import decode
from aiops.wire.messages import Error, TableRows
from aiops.wire.server_messages import KeepSets, LoadShard, RollBack, ShardParts, SnapshotSaved


@value
class BeginShard:
    """Begin the state of a follower that has none: its model has come."""

    run: str
    shard: int
    shards: int


@value
class NoteLead:
    """Keep the generation of a lead: an earlier one is to be refused after a restart, too."""

    generation: int


@value
class GoBack:
    """End, and begin again at the newest moment that is no later than a row of the lead's journal.

    The orders of later rows are undone (`aiops.shards.common_moment`).
    """

    row: int


FollowerEffect: TypeAlias = (
    Effect
    | AppendRow
    | EncodedReply
    | BeginShard
    | BeginJournal
    | WriteSnapshot
    | KeepSnapshots
    | NoteLead
    | GoBack
)
"""An effect of a follower with a journal."""


@value
class _ShardTaking:
    """A capture on its way."""

    ticket: int
    row: int
    time: float
    capture: Capture
    job: CaptureJob


class FollowerRecorder:
    """A follower with a journal, and captures of its state.

    A capture's number is the row of the lead's journal that it is of (`Follower.snapshots`).

    Parameters
    ----------
    follower
        Handles the events.
    gate
        Holds its reports.
    first
        The number of the next row; 1: there is no state yet, and it begins with the model.
    recording
        False: there is no journal, but there are snapshots.

    Attributes
    ----------
    next
        The number of the next row.
    recording, resuming, ended, room
        As of `aiops.durable.recorder.Recorder`.
    writing
        The capture that is being written.
    """

    def __init__(
        self, follower: Follower, gate: CommitGate, first: int, *, recording: bool = True
    ) -> None:
        self.follower, self._gate, self.next = follower, gate, first
        self.recording, self.ended = recording, ""
        self._journalled = recording  # unless the journal has ended
        self.resuming = False
        self._taking: _ShardTaking | None = None  # until its job is done
        self.writing: WriteSnapshot | None = None
        self._due: WriteSnapshot | None = None  # until the journal has all of its rows
        self._committed = first - 1
        self.room: dict[str, Array] = {}
        self._known: set[int] = set()  # connections whose clients the journal knows of
        self._led_by = follower.led_by  # as it is kept
        self._later = gate.wanted >= Acks.DURABLE  # a thread writes rows, and syncs them

    @property
    def holds(self) -> bool:
        """True while reports wait for the journal."""
        return self._gate.waiting > 0

    @property
    def acks(self) -> Acks:
        """The promise of a report, at present."""
        return self._gate.level

    def hold(self, peer: int, answer: bytes) -> bool:
        """Return False: a follower has no steady exchanges."""
        return False

    def handle(self, event: Event) -> list[FollowerEffect]:
        """Handle an event; return its effects, in order, the writing of its row first."""
        if isinstance(event, Committed):
            self._committed = event.row
            return [*self._gate.committed(event.row), *self._write()]
        if isinstance(event, JournalEnded):
            return [*self._journal_ended(event), *self._write()]
        if isinstance(event, SnapshotWritten):
            return [*self._written(event)]
        if isinstance(event, Received) and isinstance(event.message, RollBack):
            return [GoBack(event.message.row)] if event.peer == self.follower.lead else []
        if self.next == 1:
            return self._handle_first(event)
        begin = self._introduced(event)
        row = self._row(event) if self.recording else None
        if row is None:
            found = self._captured(event, self._answered(self.follower.handle(event)))
            return [*begin, *self._led(), *self._kept(event), *found]
        number, self.next = self.next, self.next + 1
        if self._later and row.payload is not None:  # it may be changed before it is written
            row = replace(row, payload=row.payload.copy())
        portion = self.follower.portion_of(event) if isinstance(event, Received) else None
        if portion is not None:
            portion.row = number
        elif isinstance(event, Received):
            event = replace(event, row=number)
        effects = self._captured(event, self.follower.handle(event))
        if self._later or self.holds:
            effects = self._gate.hold(effects, number)  # type: ignore[arg-type,assignment]
        return [*begin, AppendRow(number, row, self._later), *effects]

    def _answered(self, effects: list[Effect]) -> list[Effect]:
        """Return the effects of an event without a row that are to be carried out now.

        Answers about rows of tables wait for the rows of the journal before them. The refusal of a
        connection does not: a lead that is superseded is to learn of it.
        """
        behind = self.recording and self._committed < self.next - 1
        if not behind or not (self._later or self.holds):
            return effects
        messages = (effect.message for effect in effects if type(effect) is Reply)
        rows = any(
            isinstance(each, TableRows) or (isinstance(each, Error) and not each.fatal)
            for each in messages
        )
        return self._gate.hold(effects, self.next - 1) if rows else effects

    def _introduced(self, event: Event) -> list[AppendRow]:
        """Return the row of a client's joining, before its first push of rows on a connection."""
        if isinstance(event, Left):
            self._known.discard(event.peer)
        hello = self.follower.hello_of(event)
        if hello is None or not self.recording or not isinstance(event, Received):
            return []
        if event.peer in self._known:
            return []
        self._known.add(event.peer)
        number, self.next = self.next, self.next + 1
        row = row_of(joined(event.time, event.peer, hello), leased=False)
        return [AppendRow(number, row, self._later)]

    def _led(self) -> list[NoteLead]:
        """Return the effect that keeps the generation of a lead, if one has just come."""
        if self.follower.led_by == self._led_by:
            return []
        self._led_by = self.follower.led_by
        return [NoteLead(self._led_by)]

    # ------------------------------------------------------------ snapshots

    def _captured(self, event: Event, effects: list[Effect]) -> list[FollowerEffect]:
        """Capture the state if that was just ordered; return all effects of an event."""
        taking = self._taking
        if taking is not None and isinstance(event, Applied) and event.ticket == taking.ticket:
            self._taking = None
            self._due = WriteSnapshot(taking.capture, taking.row, event.time - taking.time)
            if taking.job.error is not None:
                taking.capture.release()
                self._due = None
                why = "there is no memory for a copy of the state"
                return [*effects, *self._report(taking.capture.number, why)]
            return [*effects, *self._write()]
        for effect in effects:
            if isinstance(effect, Apply) and isinstance(effect.job, CaptureJob) and effect.job.row:
                return [*effects, *self._begin_capture(effect.ticket, effect.job, event.time)]
        return [*effects]

    def _begin_capture(self, ticket: int, job: CaptureJob, now: float) -> Sequence[FollowerEffect]:
        """Capture the state after the present event, and have its job copy the rest."""
        follower = self.follower
        assert follower.shard is not None, "it has the job"
        if self._due is not None or self.writing is not None:
            return self._report(job.row, "an earlier snapshot is being written")
        if self.ended and any(not (each.row or each.kept) for each in follower.portions):
            return self._report(job.row, WAITS)
        if (
            follower.reached > job.row
        ):  # it was away, and the lead has made its state the present one
            return self._report(job.row, "it has carried out orders of a later moment")
        try:
            found = capture_shard(follower, follower.shard, job.row, ticket)
        except MemoryError:
            return self._report(job.row, "there is no memory for a capture of the state")
        found.room = self.room
        begin = list[FollowerEffect]()
        if not self._journalled:
            self.next += 1  # so that snapshots have numbers that rise
        elif not self.recording:
            begin.append(self._resume())
        job.begin(partial(found.copy, follower.machine.parallel_map), found.copied)
        self._taking = _ShardTaking(ticket, self.next - 1, now, found, job)
        return begin

    def _resume(self) -> BeginJournal:
        """Have a journal again, which promises nothing before there is this snapshot before it."""
        self.next += 1  # a row is missing between the journals, so that none is read as one
        self._committed = self.next - 1
        self.recording = self.resuming = True
        return BeginJournal(self.next)

    def _write(self) -> list[Effect | WriteSnapshot]:
        """Return the effect that writes a capture, once the journal has all of its rows."""
        due = self._due
        if due is None or (self._later and self.recording and self._committed < due.row):
            return []
        self._due, self.writing = None, due
        return [due]

    def _written(self, event: SnapshotWritten) -> list[FollowerEffect]:
        """Report a snapshot that is on the disk, or is not."""
        notes = self._resumed(event)
        written, self.writing = self.writing, None
        if written is None:
            return notes
        written.capture.release()
        if not event.why:
            self.follower.snapshots[written.capture.number] = written.row
        return [*notes, *self._report(written.capture.number, event.why)]

    def _resumed(self, event: SnapshotWritten) -> list[FollowerEffect]:
        """Promise again what is wanted, if the journal that was begun goes on behind a snapshot."""
        if not self.resuming:
            return []
        if event.why:
            return self._journal_ended(JournalEnded(event.time, event.why))
        self.resuming, self.ended = False, ""
        self._gate.close()
        wanted = self._gate.wanted.name.lower()
        return [Note(f"there is a journal again: its reports mean {wanted!r} from row {self.next}")]

    def _report(self, cut: int, why: str) -> list[Effect]:
        lead = self.follower.lead
        return [] if lead is None else [Reply(lead, SnapshotSaved(cut, why))]

    def _kept(self, event: Event) -> list[KeepSnapshots]:
        """Return the effect that removes snapshots, if that is what an event orders."""
        if not isinstance(event, Received) or event.peer != self.follower.lead:
            return []
        if not isinstance(event.message, KeepSets):
            return []
        known = self.follower.snapshots
        rows = tuple(known[cut] for cut in event.message.cuts if cut in known)
        if not rows or len(rows) < len(event.message.cuts):
            return []
        for cut in [cut for cut, row in known.items() if row < rows[-1] and row not in rows]:
            del known[cut]
        return [KeepSnapshots(rows)]

    # ------------------------------------------------------------ rows

    def _row(self, event: Event) -> JournalRow | None:
        """Return the row of an event; None: it changes nothing that outlives a connection."""
        if isinstance(event, Applied):
            return done_row(event) if event.ticket > 0 else None  # else of rows of tables
        if not isinstance(event, Received):
            return None
        if self.follower.hello_of(event) is not None:
            return row_of(event, leased=False)
        message = event.message
        if event.peer == self.follower.lead and isinstance(message, KEPT_ORDERS):
            return order_row(event)
        portion = self.follower.portion_of(event)
        if portion is None or not isinstance(message, ShardParts):
            return None
        assert isinstance(portion.sink, PushSink), "it can be used"
        return portion_row(event.time, portion.number, message, portion.sink)

    def _handle_first(self, event: Event) -> list[FollowerEffect]:
        """Handle an event while there is no state, which begins when the lead has sent a model.

        Nothing before that is kept, nor a model that the follower refuses.
        """
        follower, order = self.follower, event.message if isinstance(event, Received) else None
        if not isinstance(order, LoadShard) or not isinstance(event, Received):
            return [*self._with_lead(follower.handle(event))]
        row = order_row(event)
        if self._later and row.payload is not None:
            row = replace(row, payload=row.payload.copy())
        number = 2 if self.recording else 0
        effects = follower.handle(replace(event, row=number) if number else event)
        if follower.shard is None:
            return [*self._with_lead(effects)]
        begin = BeginShard(follower.run, order.shard, len(order.shards) + 1)
        self.next = 1 + max(1, number)
        if not self.recording:
            return [begin, *self._with_lead(effects)]
        if self._later or self.holds:
            effects = self._gate.hold(effects, number)
        first = AppendRow(1, follower_begin_row(event.time, follower), self._later)
        return [begin, first, AppendRow(number, row, self._later), *effects]

    def _with_lead(self, effects: Sequence[Effect]) -> list[FollowerEffect]:
        return [*self._led(), *effects]

    def _journal_ended(self, event: JournalEnded) -> list[FollowerEffect]:
        self.recording, self.ended = False, event.why
        if self.resuming:  # it has promised nothing
            self.resuming = False
            return []
        wanted = self._gate.wanted.name.lower()
        text = f"{event.why}; its reports mean 'applied' from here on, not {wanted!r}"
        return [Note(text), *self._gate.open()]


class FollowerReplayer:
    """Feeds rows to a fresh follower.

    Parameters
    ----------
    follower
        The follower; its reports are thrown away.
    run
        The run whose state it is.
    warm
        Begins to compile kernels on another thread. None: that is left to `Recovered.outstanding`.
    back_to
        The row of the lead's journal of which the newest order may be. None: all are replayed.

    Attributes
    ----------
    lost, taken
        As of `Replayer`.
    """

    bound = LeadReplayer.bound

    def __init__(
        self,
        follower: Follower,
        run: str,
        warm: Callable[[Warm], object] | None = None,
        back_to: int | None = None,
    ) -> None:
        self._follower, self._row, self._nbytes, self._time = follower, 0, 0, 0.0
        self._warm = warm
        self._newest = LARGEST if back_to is None else back_to
        self.taken: Callable[[Capture, int], object] | None = None
        self._effects: list[Effect] = []
        self._checks: dict[int, int] = {}  # by ticket, of the last update
        self._bounds = unbounded(follower.pools)
        self._snapshot, self.lost = 0, 0
        self._run = run
        follower.replaying(run)

    def restore(
        self, row: int, found: Captured, read: ReadArray, queued: Mapping[int, JournalFrame]
    ) -> None:
        """Begin after a snapshot; parameters and errors as of `Replayer.restore`."""
        follower, owners = self._follower, found.owners
        shard = restore_shard(follower, found, read)
        self._bounds.update(unbounded(follower.pools))
        for kind, (portion, *_more) in owners["queue"]:
            if kind == "rows":
                self.lost += portion not in queued
                continue
            frame = queued.get(portion)
            if frame is not None:
                self._restore_portion(frame, row_fields(frame.kind, frame.row, f"row {portion:,}"))
            elif portion:
                self.lost += 1
        effects = self._restore_rows(owners["rows"], read, queued)
        ticket: Any = owners["ticket"]
        self._checks = {ticket: check_of(ticket, NONE)}
        self._row = self._snapshot = row
        self._note([Warm(shard.store.warming()), *effects])

    def _restore_rows(
        self, owners: Any, read: ReadArray, queued: Mapping[int, JournalFrame]
    ) -> list[Effect]:
        """Continue with the rows of tables that lie here, if any do."""
        rows = self._follower.rows
        if rows is None or owners is None:
            return []

        def event_of(row: int) -> Received | None:
            frame = queued.get(row)
            event = None if frame is None else events_of(rows.engine, frame)[0]
            return event if isinstance(event, Received) else None

        jobs = rows.restore(owners, read, event_of)
        return [*rows.begun, *jobs]

    def _restore_portion(self, frame: JournalFrame, fields: dict[str, Any]) -> None:
        number, message = portion_of(fields)
        assert isinstance(message, ShardParts), "a portion comes with its header"
        self._follower.restore_portion(number, message.parts, frame.payload, frame.number)

    def begins_with(self, row: int, found: Captured) -> bool:
        """Return whether the state may be that of a snapshot, or later."""
        return bool(found.owners["cut"] <= self._newest)

    def goes_on_with(self, frame: JournalFrame) -> bool:
        """Return whether a row is to be replayed; else the one before it is the last."""
        if frame.kind != RowKind.ORDER or self._newest == LARGEST:
            return True
        order = decode(row_fields(frame.kind, frame.row, f"row {frame.number:,}")["order"])
        return not isinstance(order, KEPT_ORDERS) or order.row <= self._newest

    def begin(self, frame: JournalFrame) -> None:
        """Begin after a state's first row."""
        self._row, self._time = frame.number, frame.time

    @property
    def large(self) -> bool:
        """True if an update of the shard takes long enough for other work beside it."""
        shard = self._follower.shard
        return shard is not None and shard.store.cost > SMALL

    def feed(self, frame: JournalFrame) -> None:
        """Handle a row.

        Raises
        ------
        DamagedState
            When the row is not what a follower writes, or its update gives another result.
        """
        self._row, self._time = frame.number, frame.time
        self._nbytes += frame.end - frame.at
        self._bounds.update(unbounded(self._follower.pools))
        fields = row_fields(frame.kind, frame.row, f"row {frame.number:,}")
        try:
            if frame.kind == RowKind.ORDER:
                self._note(self._follower.handle(order_of(frame, fields)))
            elif frame.kind == RowKind.PORTION:
                self._restore_portion(frame, fields)
            elif frame.kind == RowKind.APPLIED:
                self._check(fields["ticket"], fields["check"])
            elif frame.kind in (RowKind.JOINED, RowKind.RECEIVED):
                self._feed_rows(frame)
        except (ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
            what = f"{type(error).__name__}: {error}"
            text = f"row {self._row:,} is damaged ({what:.300})"
            raise DamagedState(text, row=self._row) from error

    def _feed_rows(self, frame: JournalFrame) -> None:
        """Handle the joining of a client that pushes rows of tables, or its push."""
        rows = self._follower.rows
        assert rows is not None, "rows of tables lie here"
        for event in events_of(rows.engine, frame):
            assert not isinstance(event, AppliedMark), "it is an event of the engine"
            self._note(rows.replay(event))

    def go_on(self) -> None:
        """Take further rows, after `finish`: no lead has connected."""
        self._follower.replaying(self._run)

    def finish(self) -> Recovered:
        """Return where the journal ended; the follower may be led from here on."""
        self._bounds.update(unbounded(self._follower.pools))
        for pool, bound in self._bounds.items():
            pool.bound = bound
        self._follower.replayed()
        effects = tuple(self._effects)
        return Recovered(self._row, self._snapshot, self._nbytes, self._time, effects)

    def _note(self, effects: Sequence[Effect]) -> None:
        """Carry out the updates among some effects: here nothing happens beside them."""
        for effect in effects:
            if isinstance(effect, Apply):
                captured = self._capture(effect) if self.taken is not None else None
                sums = effect.run()
                if effect.ticket > 0:
                    self._checks = {effect.ticket: check_of(effect.ticket, sums)}
                self._note(self._follower.handle(Applied(self._time, effect.ticket, sums)))
                if captured is not None and self.taken is not None:
                    self.taken(captured, self._row)
            elif isinstance(effect, Warm) and self._warm is not None:
                self._warm(effect)
            elif isinstance(effect, Warm):
                self._effects.append(effect)

    def _capture(self, effect: Apply) -> Capture | None:
        """Capture the state that an order asks for; None: it asks for none, or has no memory."""
        job, follower = effect.job, self._follower
        if not (isinstance(job, CaptureJob) and job.row and follower.shard is not None):
            return None
        try:
            found = capture_shard(follower, follower.shard, job.row, effect.ticket)
        except MemoryError:
            return None
        try:
            found.copy(follower.machine.parallel_map)
        except MemoryError:
            found.release()
            return None
        return found

    def _check(self, ticket: int, check: int) -> None:
        if ticket not in self._checks:
            raise unexpected(self._row)
        if self._checks[ticket] != check:
            raise differs(self._row)


def follower_begin_row(time: float, follower: Follower) -> JournalRow:
    """Return the first row of a follower's state."""
    name, settings = follower.algorithm.name, follower.algorithm.settings()
    return JournalRow(RowKind.BEGIN, time, 0, pack([name, settings, {}, follower.run, "", ""]))


def check_follower(frame: JournalFrame, follower: Follower, where: str) -> None:
    """Check that a follower goes on with the algorithm that its state was begun with.

    Raises
    ------
    UsageError
        When it is another.
    DamagedState
        When the row is not the first of a follower's state.
    """
    if frame.kind != RowKind.BEGIN:
        raise DamagedState(f"{where} is damaged: its first row is not the beginning of a state")
    found = row_fields(frame.kind, frame.row, "row 1")
    kept = {"policy": found["policy"], **found["settings"]}
    mine = {"policy": follower.algorithm.name, **follower.algorithm.settings()}
    check_settings({"algorithm": kept, "options": {}}, {"algorithm": mine, "options": {}})
