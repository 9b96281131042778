"""The record of a run: a journal of which all rows are kept, and its replay.

Each row is written before the engine handles its event. Nothing waits for a sync, and there are no
snapshots: it is not there to go on from, but to run the same run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aiops.algorithms import find
from aiops.common.frozen import value
from aiops.durable.lead_recorder import LeadReplayer
from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import Replayer
from aiops.durable.rows import JournalRow, RowCounter, passes, row_of
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import Event, Options
from aiops.errors import DamagedState, UsageError
from aiops.shards.lead import Lead
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import RowKind, row_fields


class RunRecord(RowCounter):
    """The rows of an engine's events, after the first one (`aiops.durable.recovery.begin_row`).

    Parameters
    ----------
    engine
        The engine that handles the events.
    append
        Appends a row, at once: its payload may be overwritten later.

    Raises
    ------
    UsageError
        When the engine's reads are relaxed.
    """

    def __init__(self, engine: Engine, append: Callable[[AppendRow], object]) -> None:
        if engine.options.relaxed:
            raise UsageError(
                "relaxed reads cannot be recorded: which versions they mix depends on the moment;"
                " drop --record or --consistency relaxed"
            )
        super().__init__(2)
        self._engine, self._append = engine, append

    def note(self, event: Event) -> bool | None:
        """Append an event's row; return what `Engine.handle` takes with the event."""
        if passes(event):
            return None
        leased = self._engine.freeze()
        self._put(row_of(event, leased))
        return leased

    def last(self, time: float) -> AppendRow:
        """Return the last row, with the parameters' digest if the engine is idle."""
        total = digest(self._engine) if self._engine.idle else ""
        return AppendRow(self.next, JournalRow(RowKind.END, time, 0, pack([total])))

    def _put(self, row: JournalRow) -> None:
        number, self.next = self.next, self.next + 1
        self._append(AppendRow(number, row))


@value
class Replayed:
    """The end of a replay: the engine, the rows since its beginning, and the last one's number.

    ``complete``: the last row is that of a server that has ended. ``stopping``: its last start was
    asked to stop.
    """

    engine: Engine
    rows: int
    last: int
    complete: bool
    stopping: bool


def replay(frames: Iterable[JournalFrame], kernels: str = "auto") -> Replayed:
    """Run a journal again from its first row.

    Parameters
    ----------
    frames
        All rows.
    kernels
        The kernels to use; all give the same bits.

    Raises
    ------
    UsageError
        When the first row is not the beginning of a run.
    DamagedState
        As `replay_on`.
    """
    rows = iter(frames)
    first = next(rows, None)
    if first is None or first.kind != RowKind.BEGIN:
        raise UsageError("the journal has no beginning: its first row is missing")
    found = row_fields(first.kind, first.row, "row 1")
    settings = {"policy": found["policy"], **found["settings"]}
    engine = engine_of({"algorithm": settings, "options": found["options"]}, kernels)
    replayer = replayer_of(engine)
    replayer.begin(first)
    return replay_on(engine, replayer, rows, first.number)


def replay_on(
    engine: Engine, replayer: Replayer, frames: Iterable[JournalFrame], base: int
) -> Replayed:
    """Go on with a replay from the row ``base`` on.

    Raises
    ------
    DamagedState
        When the replay departs from the record: a row gives another result, or the parameters at
        the end are others.
    """
    last, complete, stopping = base, False, False
    for frame in frames:
        if frame.number > last:
            replayer.feed(frame)
            if frame.kind in (RowKind.STOPPING, RowKind.RESUMED):
                stopping = frame.kind == RowKind.STOPPING
            last, complete = frame.number, frame.kind == RowKind.END
            if complete:
                _check_end(engine, frame)
    replayer.finish()
    return Replayed(engine, last - base, last, complete, stopping)


def engine_of(settings: Any, kernels: str) -> Engine:
    """Return a fresh engine of a state's settings.

    Raises
    ------
    DamagedState
        When they are none.
    """
    try:
        algorithm = settings["algorithm"]
        chosen = {key: value for key, value in algorithm.items() if key != "policy"}
        return Engine(
            find(algorithm["policy"]).make(chosen), Options(**settings["options"], backend=kernels)
        )
    except (KeyError, TypeError) as error:
        raise DamagedState(f"the state's settings are damaged: {error!r}") from None


def replayer_of(engine: Engine) -> Replayer:
    """Return what replays rows to a fresh engine; to a lead's, without its followers."""
    followers = engine.options.shards - 1
    if not followers:
        return Replayer(engine)
    return LeadReplayer(Lead(engine, [("", 0)] * followers, kept=True))


def _check_end(engine: Engine, frame: JournalFrame) -> None:
    """Compare the digest of the parameters with the recorded one, if there is one."""
    recorded = row_fields(frame.kind, frame.row, f"row {frame.number:,}")["digest"]
    if recorded and digest(engine) != recorded:
        raise DamagedState(
            f"the replay's parameters at version {engine.version} are not those that the recorded"
            " run ended with: the record was changed, or made by other code",
            row=frame.number,
        )
