"""An engine whose events are journalled, and whose acknowledgements wait for the journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from aiops.common.frozen import value
from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.generations import Generations
from aiops.durable.rows import JournalRow, RowCounter, passes, row_of
from aiops.engine.capture import Capture, capture, queued_rows
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Committed,
    Effect,
    Event,
    Joined,
    JournalEnded,
    Note,
    Received,
    Reply,
    SnapshotDue,
    SnapshotWritten,
)
from aiops.engine.receive import PushSink
from aiops.engine.steady import Recorded
from aiops.errors import UsageError
from aiops.model.layout import Array
from aiops.model.parts import LARGEST
from aiops.state.directory import GenerationFile
from aiops.store.capture_job import CaptureJob
from aiops.wire.messages import Hello, Welcome
from aiops.wire.traffic import sizes

NO_GENERATIONS = GenerationFile(0)
"""Those of a run that has none."""


AT_ONCE = 4 << 20
"""Bytes of a payload: a row with more is written by a thread, so that others do not wait for it.

For less a thread costs more than it saves: an update of the same bytes takes less time than to wake
the thread, and then the loop.
"""


@value
class AppendRow:
    """Append a row to the journal, before the effects that follow are carried out.

    ``later``: a thread writes it, and `Committed` tells when that is done. ``more``: it may wait to
    be written with the next row, which will come. ``pinned``: the sink whose buffer the row's
    payload is, which waits until it is written.
    """

    number: int
    row: JournalRow
    later: bool = False
    more: bool = False
    pinned: PushSink | None = None

    @property
    def time(self) -> float:
        """The row's time, in seconds."""
        return self.row.time

    @property
    def nbytes(self) -> int:
        """The bytes of its payload."""
        return 0 if self.row.payload is None else len(self.row.payload)


@value
class Supersede:
    """End at once, and acknowledge nothing more: a server of this generation has the run now."""

    generation: int


@value
class WriteSnapshot:
    """Write a capture beside training, and release it at last, on the engine's thread.

    ``row``: it has all events up to this one. ``pause``: seconds for which updates waited for it.
    """

    capture: Capture
    row: int
    pause: float


@value
class KeepSnapshots:
    """Keep the snapshots of these rows, and remove what earlier ones alone need."""

    rows: tuple[int, ...]


WAITS = "pushes that came while there was no journal wait to be applied"
"""The reason for which a snapshot cannot be taken yet."""


@value
class BeginJournal:
    """Begin another journal with this row; it is none before a snapshot of a later row."""

    first: int


@value
class SnapshotFailed:
    """A snapshot that was due has not been captured; ``why`` is a sentence."""

    why: str


RecorderEffect: TypeAlias = (
    Effect
    | AppendRow
    | EncodedReply
    | Supersede
    | BeginJournal
    | WriteSnapshot
    | SnapshotFailed
    | KeepSnapshots
)
"""An effect of an engine with a journal."""


@dataclass(slots=True)
class _Taking:
    """A capture on its way; ``ticket`` and the rest are known once its turn has come."""

    number: int
    ticket: int = -1
    row: int = 0
    time: float = 0.0
    capture: Capture | None = None
    job: CaptureJob | None = None
    why: str = ""


class Recorder(RowCounter):
    """An engine with a journal, and captures of its state.

    A `SnapshotDue` has the engine issue a `CaptureJob`, perhaps later. At the end of the event that
    does, the state is captured (`aiops.engine.capture`), and the job is told what to copy. Its
    `Applied` then gives the effect `WriteSnapshot`, or `SnapshotFailed`.

    Parameters
    ----------
    engine
        Handles the events.
    gate
        Holds the acknowledgements.
    first
        The number of the next row.
    generations
        The generations of the run; default: none are kept.
    recording
        False: there is no journal, but there are snapshots.

    Attributes
    ----------
    recording
        Whether events are journalled at present.
    resuming
        Whether there is a journal again (`resume`), which promises nothing yet.
    ended
        The reason for which they are not any more; empty while they are.
    pending
        Whether a thread has rows to write: then it writes all that follow, in order.
    room
        Memory for the copies of captures (`Capture.room`).
    next
        The number of the next row. Without a journal only a capture uses one up, so that
        snapshots have numbers that rise.
    rolled_back
        The sequence numbers up to their last acknowledged push that clients of earlier generations
        have beyond what survived; refused and ignored ones are among them. Of clients that were
        forgotten nothing survived, and all of their numbers may be earlier: they are not counted.
    rolled_back_at_most
        The same, with those of clients that were forgotten.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("_gate", "_later", "pending", "recording")

    def __init__(
        self,
        engine: Engine,
        gate: CommitGate,
        first: int,
        generations: GenerationFile = NO_GENERATIONS,
        *,
        recording: bool = True,
    ) -> None:
        super().__init__(first)
        self.engine, self._gate = engine, gate
        self._generations = Generations(engine.options.run, generations)
        self.recording, self.ended = recording, ""
        self.rolled_back = self.rolled_back_at_most = 0
        self.resuming, self._resumed_from = False, 0
        self._taking: _Taking | None = None
        self._always_later = gate.wanted >= Acks.DURABLE
        self.pending = self._always_later
        self._later = self._committed = 0  # the last row for a thread, and the last it told of
        self._pinned: deque[tuple[int, PushSink]] = deque()  # by row, ascending
        self.room: dict[str, Array] = {}

    @property
    def holds(self) -> bool:
        """True while acknowledgements wait for the journal."""
        return self._gate.waiting > 0

    @property
    def acks(self) -> Acks:
        """The promise of an acknowledgement, at present."""
        return self._gate.level

    def lacks(self, row: int) -> bool:
        """Return whether a row is not yet in the journal as acknowledgements promise."""
        return self.recording and self._committed < min(row, self._later)

    @property
    def lag(self) -> int:
        """The number of rows that are not yet as safe as acknowledgements promise."""
        return max(0, self._later - self._committed) if self.recording else 0

    @property
    def capturing(self) -> bool:
        """True while a snapshot is due, or being captured."""
        return self._taking is not None

    def handle(self, event: Event) -> list[RecorderEffect]:
        """Handle an event; return its effects, in order, the writing of its row first."""
        if isinstance(event, Committed):
            self._committed = event.row
            self.pending = self._always_later or self._later > event.row
            self._unpin(event.row)
            return [*self._gate.committed(event.row)]
        if isinstance(event, JournalEnded):
            return self._journal_ended(event)
        if isinstance(event, SnapshotWritten):
            return [] if event.why else self._resumed()
        if isinstance(event, SnapshotDue):
            self._taking = _Taking(event.number)
        if isinstance(event, Joined) and isinstance(event.hello, Hello):
            return self._joined(event, event.hello)
        return self._handle(event)

    def _joined(self, event: Joined, hello: Hello) -> list[RecorderEffect]:
        """Welcome a client with what it has to know of this generation, unless that is over."""
        if self._generations.supersedes(hello):
            return [Supersede(hello.generation)]
        return [self._told(effect, hello) for effect in self._handle(event)]

    def _told(self, effect: RecorderEffect, hello: Hello) -> RecorderEffect:
        if not (isinstance(effect, Reply) and isinstance(effect.message, Welcome)):
            return effect
        acks = self.acks.name.lower()
        welcome = self._generations.told(effect.message, hello, acks)
        member = self.engine.membership.find(hello.client)
        more = welcome.rolled_back - member.rolled_back if member is not None else 0
        if member is not None and more > 0:  # once, if it asks again
            bound = min(self.rolled_back_at_most + more, LARGEST)  # as clients say, any number
            self.rolled_back_at_most = bound
            if welcome.last_seq:  # else it is forgotten, or all of its pushes are lost
                self.rolled_back = min(self.rolled_back + more, LARGEST)
            member.rolled_back = welcome.rolled_back
        return replace(effect, message=welcome)

    def _handle(self, event: Event) -> list[RecorderEffect]:
        if not self.recording or passes(event):
            found: list[RecorderEffect] = [*self.engine.handle(event)]
            return self._captured(event, found) if self._taking is not None else found
        leased = self.engine.freeze()
        number, self.next = self.next, self.next + 1
        append = self._append(number, row_of(event, leased), event)
        if isinstance(event, Received):
            event = Received(event.time, event.peer, event.message, event.sink, number)
        effects = self.engine.handle(event, leased)
        if append.later:
            effects = self._gate.hold(effects, number)
        elif self._taking is None and len(effects) == 1 and isinstance(effects[0], Apply):
            # Nothing is acknowledged yet, and no snapshot needs the row.
            append = AppendRow(number, append.row, more=True, pinned=append.pinned)
        found = [append, *effects]
        return self._captured(event, found) if self._taking is not None else found

    def _append(self, number: int, row: JournalRow, event: Event | None) -> AppendRow:
        """Return the effect that appends an event's row, and keep the buffer of its payload."""
        payload, later, pinned = row.payload, self.pending, None
        if payload is not None:
            sink = event.sink if isinstance(event, Received) else None
            if isinstance(sink, PushSink) and sink.pin():
                pinned = sink
                later = later or len(payload) > AT_ONCE
            elif later:  # it may be changed before it is written
                row = replace(row, payload=payload.copy())
        if later:
            self._later, self.pending = number, True
            if pinned is not None:
                self._pinned.append((number, pinned))
        return AppendRow(number, row, later, pinned=pinned)

    def _unpin(self, row: int) -> None:
        """Give back the buffers of rows up to this one."""
        while self._pinned and self._pinned[0][0] <= row:
            self._pinned.popleft()[1].unpin()

    def exchanged(
        self, time: float, flags: int, fields: tuple[int, ...], gradient: Recorded
    ) -> AppendRow:
        """Return the effect that appends a steady exchange's row, as of `exchange_row`."""
        row, number = self.exchange_row(time, flags, fields, gradient), self.next - 1
        if not self.pending:
            return AppendRow(number, row)
        self._later = number
        row = replace(row, payload=gradient.data.copy())  # the next push overwrites it
        return AppendRow(number, row, later=True)

    def hold(self, peer: int, answer: bytes) -> bool:
        """Keep the answer to the last steady exchange, if it has to wait; return whether it has."""
        last = self.next - 1
        if self._later < last or self._gate.level is Acks.APPLIED:
            return False
        self._gate.hold_reply(peer, answer, last)
        return True

    def _captured(self, event: Event, effects: list[RecorderEffect]) -> list[RecorderEffect]:
        """Take the capture that is due if its turn has come with this event; return all effects."""
        taking = self._taking
        assert taking is not None, "a capture is on its way"
        if isinstance(event, Applied) and event.ticket == taking.ticket:
            self._taking = None
            return [self._ended(taking, event.time), *effects]
        if self.engine.training is None:  # it has issued nothing, and never will
            self._taking = None
            return [*effects, SnapshotFailed("there is no model yet")]
        for effect in effects:
            if isinstance(effect, Apply) and isinstance(effect.job, CaptureJob):
                unsent = [*effects, *self._gate.held()]
                self._count_sent(unsent, 1)  # the rows behind the snapshot do not send them again
                self._begin(taking, effect.ticket, effect.job, event.time)
                self._count_sent(unsent, -1)
        return effects

    def _count_sent(self, effects: Iterable[RecorderEffect], times: int) -> None:
        """Count answers that are about to be sent, or with -1 take that back.

        Those that are encoded already were counted then.
        """
        for effect in effects:
            if isinstance(effect, Reply):
                traffic = self.engine.membership.traffic(effect.peer)
                traffic.sent(effect.message.kind, *sizes(effect.message), times)

    def _begin(self, taking: _Taking, ticket: int, job: CaptureJob, now: float) -> None:
        """Capture the state after the present event, and have its job copy the rest."""
        if job.number != taking.number:  # of an earlier server, killed before its turn came
            return
        self.next += not self.recording
        taking.ticket, taking.row, taking.time = ticket, self.next - 1, now
        try:
            found = capture(self.engine, taking.number)
        except (MemoryError, UsageError) as error:
            taking.why = f"the state cannot be captured: {str(error) or 'out of memory'}"
            return
        if self.resuming and any(row < self._resumed_from for row in queued_rows(found.owners)):
            found.release()
            taking.why = WAITS
            return
        taking.capture, taking.job, found.room = found, job, self.room
        job.row = taking.row
        job.begin(partial(found.copy, self.engine.machine.parallel_map), found.copied)

    def _ended(self, taking: _Taking, now: float) -> WriteSnapshot | SnapshotFailed:
        """Return the effect of a capture whose job is done."""
        if taking.capture is not None and taking.job is not None and taking.job.error is None:
            return WriteSnapshot(taking.capture, taking.row, now - taking.time)
        if taking.capture is not None:
            taking.capture.release()
        return SnapshotFailed(taking.why or "there is no memory for a copy of the state")

    def resume(self) -> BeginJournal:
        """Have a journal again. It promises nothing before a snapshot behind its beginning."""
        self.next += 1  # a row is missing between the journals, so that none is read as one
        self.recording = self.resuming = True
        self._resumed_from = self.next
        return BeginJournal(self.next)

    def _resumed(self) -> list[RecorderEffect]:
        """Promise again what is wanted, if the journal that was begun goes on behind a snapshot."""
        if not self.resuming:
            return []
        self.resuming, self.ended = False, ""
        self._gate.close()
        wanted = self._gate.wanted.name.lower()
        return [
            Note(f"there is a journal again: acknowledgements mean {wanted!r} from row {self.next}")
        ]

    def _journal_ended(self, event: JournalEnded) -> list[RecorderEffect]:
        """Go on without a journal; return what waited for it, after a line that says so.

        It may be told twice: by the thread that ended it, and by a row that came before that was.
        """
        if not self.recording:
            return []
        self._unpin(self._later)
        self.pending, self.recording = self._always_later, False
        if self.resuming:  # it has promised nothing
            self.resuming, self.ended = False, event.why
            return []
        self.ended = event.why
        wanted = self._gate.wanted.name.lower()
        text = f"{event.why}; acknowledgements mean 'applied' from here on, not {wanted!r}"
        return [Note(text), *self._gate.open()]
