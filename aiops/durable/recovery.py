"""Bring an engine to the state that a journal describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from aiops.common.frozen import value
from aiops.durable.rows import LEASED, AppliedMark, JournalRow, check_of, events_of
from aiops.engine.buffer_pool import BufferPool, unbounded
from aiops.engine.capture import Capture, capture, settings_of
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Copied,
    Effect,
    Event,
    Joined,
    Received,
    Reply,
    Warm,
)
from aiops.engine.restore import Captured, ReadArray, check_settings, restore
from aiops.engine.training import Training
from aiops.errors import DamagedState
from aiops.model.parts import LARGEST
from aiops.state.file_bytes import OwnMemory
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import STRUCTS, RowKind, row_fields
from aiops.store.capture_job import CaptureJob
from aiops.store.gradient import Gradient
from aiops.wire.messages import Message
from aiops.wire.traffic import sizes

SMALL = 4 << 20
"""Bytes that an update touches: for less it is as well done without its kernel."""


@value
class Recovered:
    """The end of a journal.

    Attributes
    ----------
    row
        The last row's number.
    snapshot
        The row of the snapshot that it began with, or 0.
    nbytes
        The bytes of the rows since.
    time
        The engine's time then, in seconds.
    outstanding
        The effects that are still to be carried out: the compiling of kernels, the update that was
        under way.
    """

    row: int
    snapshot: int
    nbytes: int
    time: float
    outstanding: tuple[Effect, ...]


class Replayer:
    """Feeds rows to a fresh engine, and compares its updates with what the rows say of them.

    Parameters
    ----------
    engine
        The engine; its clients' answers are thrown away.
    warm
        Begins to compile kernels on another thread. None: that is left to `Recovered.outstanding`.
    back_to
        The row to go back to: of later ones none is replayed. None: all are.

    Attributes
    ----------
    lost
        The number of queued rows that the journal does not have.
    taken
        Called with each capture that the rows ask for, and the row that it is of. None: rows are
        replayed that have their snapshots already.
    room
        Where large payloads are read, if they are; their memory may be taken. None: it is not.
    kernels
        Called once, before the first row of a model that is not small: waits for its kernels, if
        that is of use. Without them an update takes several times as long. None: nothing waits.
    bound
        The reason for which later moments are not taken, as half a sentence.
    """

    bound = "an administrator has this server go back"

    def __init__(
        self,
        engine: Engine,
        warm: Callable[[Warm], object] | None = None,
        back_to: int | None = None,
    ) -> None:
        self._engine, self._warm, self.lost = engine, warm, 0
        self._newest = LARGEST if back_to is None else back_to
        self._outstanding: Apply | None = None
        self._row = self._snapshot = self._nbytes = 0
        self._time, self._effects = engine.now, list[Effect]()
        self._bounds: dict[BufferPool, int] = {}
        self.taken: Callable[[Capture, int], object] | None = None
        self._captured: tuple[Capture, int] | None = None  # being copied
        self._steady = False  # the row is of a steady exchange
        self._steady_sizes = dict[str, tuple[int, int]]()  # of its messages
        self.room: OwnMemory | None = None
        self.kernels: Callable[[], object] | None = None

    def restore(
        self, row: int, found: Captured, read: ReadArray, queued: Mapping[int, JournalFrame]
    ) -> None:
        """Begin after a snapshot.

        Parameters
        ----------
        row
            It has all events up to this one.
        found, read
            As of `aiops.engine.restore.restore`.
        queued
            The rows that its queue refers to (`aiops.engine.capture.needed_rows`), as far as the
            journal has them.

        Raises
        ------
        UsageError, DamagedState
            When the snapshot is of a server with other settings; when a row is not what it was.
        """

        def received(number: int) -> Received | None:
            self._bounds.update(unbounded(self._engine.pools))
            frame = queued.get(number)
            if frame is None:
                self.lost += 1
                return None
            event = self._events(frame, OwnMemory())[0]
            if not isinstance(event, Received):
                raise DamagedState(f"row {number:,} is no push, and was queued", row=number)
            return event

        hooks = self._begun, self._gradient_kept
        self._note(restore(self._engine, found, read, received, None, *hooks))
        self._row = self._snapshot = row
        self._time = self._engine.now

    def _begun(self, training: Training) -> None:
        """Note that there is a model, before anything is queued."""

    def _gradient_kept(self, gradient: Gradient) -> None:
        """Note a gradient that may be applied again."""

    def begins_with(self, row: int, found: Captured) -> bool:
        """Return whether the state may be that of a snapshot, of this row, or later."""
        return row <= self._newest

    def goes_on_with(self, frame: JournalFrame) -> bool:
        """Return whether a row is to be replayed; else the one before it is the last."""
        return frame.number <= self._newest

    def begin(self, frame: JournalFrame) -> None:
        """Begin after a state's first row, which has no events."""
        self._row, self._time = frame.number, frame.time

    @property
    def large(self) -> bool:
        """True if an update of the model takes long enough for other work beside it."""
        return self._engine.store is not None and self._engine.store.cost > SMALL

    def feed(self, frame: JournalFrame) -> None:
        """Handle a row's events.

        Raises
        ------
        DamagedState
            When the row is not what a server writes, or its update gives another result.
        """
        if self.kernels is not None and self.large:
            self.kernels()
            self.kernels = None
        # On the server there was room; here the history of the buffers is another.
        self._bounds.update(unbounded(self._engine.pools))
        self._row, self._time = frame.number, frame.time
        self._nbytes += frame.end - frame.at
        leased = bool(frame.flags & LEASED)
        self._steady = frame.kind == RowKind.STEADY
        exchanged = frame.kind in STRUCTS
        for event in self._events(frame, self.room):
            if isinstance(event, AppliedMark):
                # An exchange's updates are handled with what it left: a version without readers.
                kept = leased and not exchanged
                self._handle(self._applied(event), kept)
            else:
                self._handle(event, leased)

    def finish(self) -> Recovered:
        """Return where the journal ended; the engine may serve from here on."""
        self._bounds.update(unbounded(self._engine.pools))  # the last row may define the model
        for pool, bound in self._bounds.items():
            pool.bound = bound
        if self._captured is not None:  # its snapshot will not be written
            self._captured[0].release()
            self._captured = None
        applied = () if self._outstanding is None else (self._outstanding,)
        # Steady exchanges are no events, but each is noted with its member.
        answered = (member.answered for member in self._engine.membership)
        time = max([self._time, self._engine.now, *answered])
        effects = *self._effects, *applied
        return Recovered(self._row, self._snapshot, self._nbytes, time, effects)

    def _events(self, frame: JournalFrame, room: OwnMemory | None) -> list[Event | AppliedMark]:
        return events_of(self._engine, frame, room)

    def _handle(self, event: Event, leased: bool) -> None:
        """Handle an event, and count the bytes in which it came, as its connection did.

        Messages without a row (pings, requests of statistics) are not counted again.
        """
        if isinstance(event, Joined):
            event.traffic.received(event.hello.kind, *sizes(event.hello))
        elif isinstance(event, Received):
            traffic = self._engine.membership.traffic(event.peer)
            traffic.received(event.message.kind, *self._sizes(event.message))
        self._note(self._engine.handle(event, leased))

    def _sizes(self, message: Message) -> tuple[int, int]:
        """Return a message's sizes; those of a model's steady exchanges are all the same."""
        if not self._steady:
            return sizes(message)
        found = self._steady_sizes.get(message.kind)
        if found is None:
            found = self._steady_sizes[message.kind] = sizes(message)
        return found

    def _applied(self, mark: AppliedMark) -> Applied:
        """Run the outstanding update, and compare its result."""
        apply, self._outstanding = self._outstanding, None
        if apply is None or mark.ticket not in (-1, apply.ticket):
            raise unexpected(self._row)
        sums = apply.run()
        if check_of(apply.ticket, sums) != mark.check:
            raise differs(self._row)
        self._capture_done(apply)
        return Applied(mark.time, apply.ticket, sums)

    def _capture_done(self, apply: Apply) -> None:
        """Give a capture that is complete to `taken`, if this is its job."""
        if self._captured is None or not isinstance(apply.job, CaptureJob):
            return
        (found, row), self._captured = self._captured, None
        if apply.job.error is None and self.taken is not None:
            self.taken(found, row)
        else:
            found.release()

    def _capture(self, job: CaptureJob) -> None:
        """Capture the state after the present event, and have a job copy the rest."""
        try:
            found = capture(self._engine, job.number)
        except MemoryError:
            return
        job.begin(partial(found.copy, self._engine.machine.parallel_map), found.copied)
        self._captured = found, self._row

    def _note(self, effects: list[Effect]) -> None:
        """Keep an update that is to be run; count answers, and release their leases and rows."""
        for effect in effects:
            if isinstance(effect, Reply):
                traffic = self._engine.membership.traffic(effect.peer)
                traffic.sent(effect.message.kind, *self._sizes(effect.message))
            if isinstance(effect, Apply):
                self._outstanding = effect
                if self.taken is not None and isinstance(effect.job, CaptureJob):
                    self._capture(effect.job)
            elif isinstance(effect, Warm) and self._warm is not None:
                self._warm(effect)
            elif isinstance(effect, Warm):
                self._effects.append(effect)
            elif isinstance(effect, Copied | Reply) and effect.lease is not None:
                effect.lease.release()
            elif isinstance(effect, Reply) and effect.rows is not None:
                effect.rows.free()


def unexpected(row: int) -> DamagedState:
    """Return the error of a row of an update that was not issued."""
    text = f"row {row:,} is of an update that the rows before it do not lead to"
    return DamagedState(text, row=row)


def differs(row: int) -> DamagedState:
    """Return the error of a replay that departs from the record."""
    return DamagedState(
        f"row {row:,} gives other numbers than the recorded ones: this code or this machine's"
        " mathematics is not what wrote it; go on where it was written",
        row=row,
    )


def begin_row(time: float, policy: str, engine: Engine, run: str, agent: str) -> JournalRow:
    """Return the first row of a state: what its server was started with."""
    settings, options = engine.algorithm.settings(), engine.options.deciding()
    return JournalRow(RowKind.BEGIN, time, 0, pack([policy, settings, options, run, agent, ""]))


def check_begin(frame: JournalFrame, policy: str, engine: Engine, where: str) -> None:
    """Check that a server goes on with the settings that a state was begun with.

    Parameters
    ----------
    frame
        The first row of the state.
    policy, engine
        The policy's name and the engine, as the server is started now.
    where
        The state's folder, for errors.

    Raises
    ------
    UsageError
        When a setting that decides is another; the text names it.
    DamagedState
        When the row is no such row.
    """
    if frame.kind != RowKind.BEGIN:
        raise DamagedState(f"{where} is damaged: its first row is not the beginning of a state")
    found = row_fields(frame.kind, frame.row, f"row {frame.number:,}")
    name = engine.algorithm.name if found["policy"] == policy else found["policy"]
    kept = {"algorithm": {"policy": name, **found["settings"]}, "options": found["options"]}
    check_settings(kept, settings_of(engine))
