"""Bring an engine to the state that a journal describes."""

from __future__ import annotations

from collections.abc import Sequence

from aiops.common.frozen import value
from aiops.durable.rows import LEASED, AppliedMark, JournalRow, check_of, events_of
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.capture import settings_of
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Effect, Event, Reply, Warm
from aiops.engine.restore import check_settings
from aiops.errors import DamagedState
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import RowKind, row_fields

_UNBOUNDED = 1 << 62  # bytes


@value
class Recovered:
    """The end of a journal.

    Attributes
    ----------
    row
        The last row's number.
    time
        The engine's time then, in seconds.
    outstanding
        The effects that are still to be carried out: the compiling of kernels, the update that was
        under way.
    """

    row: int
    time: float
    outstanding: tuple[Effect, ...]


class Replayer:
    """Feeds rows to a fresh engine, and compares its updates with what the rows say of them.

    Parameters
    ----------
    engine
        The engine; its clients' answers are thrown away.
    row, effects
        The row of the snapshot that it was restored from, and the effects of that.
    """

    def __init__(self, engine: Engine, row: int = 0, effects: Sequence[Effect] = ()) -> None:
        self._engine = engine
        self._outstanding: Apply | None = None
        self._row, self._time, self._effects = row, engine.now, [*effects]
        self._bounds: dict[BufferPool, int] = {}

    def begin(self, frame: JournalFrame) -> None:
        """Begin after a state's first row, which has no events."""
        self._row, self._time = frame.number, frame.time

    def feed(self, frame: JournalFrame) -> None:
        """Handle a row's events.

        Raises
        ------
        DamagedState
            When the row is not what a server writes, or its update gives another result.
        """
        self._unbind()  # on the server there was room; here the history of the buffers is another
        self._row, self._time = frame.number, frame.time
        leased = bool(frame.flags & LEASED)
        for event in events_of(self._engine, frame):
            if isinstance(event, AppliedMark):
                # An exchange's update is handled with what it left: a version without readers.
                kept = leased and frame.kind != RowKind.STEADY
                self._handle(self._applied(event), kept)
            else:
                self._handle(event, leased)

    def finish(self) -> Recovered:
        """Return where the journal ended; the engine may serve from here on."""
        self._unbind()  # the last row may have defined the model, which sets the bounds
        for pool, bound in self._bounds.items():
            pool.bound = bound
        applied = () if self._outstanding is None else (self._outstanding,)
        # Steady exchanges are no events, but each is noted with its member.
        answered = (member.answered for member in self._engine.membership)
        time = max([self._time, self._engine.now, *answered])
        return Recovered(self._row, time, (*self._effects, *applied))

    def _unbind(self) -> None:
        """Let the pools have as many buffers as they take, and note the bounds that they had."""
        for pool in self._engine.pools:
            if pool.bound != _UNBOUNDED:
                self._bounds[pool] = pool.bound
                pool.bound = _UNBOUNDED

    def _handle(self, event: Event, leased: bool) -> None:
        self._note(self._engine.handle(event, leased))

    def _applied(self, mark: AppliedMark) -> Applied:
        """Run the outstanding update, and compare its result."""
        apply, self._outstanding = self._outstanding, None
        if apply is None or mark.ticket not in (-1, apply.ticket):
            raise DamagedState(
                f"row {self._row:,} is of an update that the rows before it do not lead to",
                row=self._row,
            )
        sums = apply.run()
        if check_of(apply.ticket, sums) != mark.check:
            raise DamagedState(
                f"row {self._row:,} gives other numbers than the recorded ones: this code or this"
                " machine's mathematics is not what wrote it; go on where it was written",
                row=self._row,
            )
        return Applied(mark.time, apply.ticket, sums)

    def _note(self, effects: list[Effect]) -> None:
        """Keep an update that is to be run; release the leases and rows of answers."""
        for effect in effects:
            if isinstance(effect, Apply):
                self._outstanding = effect
            elif isinstance(effect, Warm):
                self._effects.append(effect)
            elif isinstance(effect, Reply) and effect.lease is not None:
                effect.lease.release()
            elif isinstance(effect, Reply) and effect.rows is not None:
                effect.rows.free()


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
