"""Bring an engine to the state that a directory has at a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.algorithms import find
from aiops.cli.state_folder import StateFolder
from aiops.durable.recovery import Replayer
from aiops.engine.capture import needed_rows
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import DamagedState, UsageError
from aiops.state.directory import journal_name
from aiops.state.frames import JournalFrame
from aiops.state.row_kinds import RowKind, row_fields


def engine_at(
    folder: StateFolder, row: int, kernels: str = "auto", *, oldest: bool = False
) -> tuple[Engine, int]:
    """Return an engine in the state after a row, and the number of rows that were replayed.

    It is that of the newest snapshot before, or of the ``oldest``, and the rows since.

    Raises
    ------
    UsageError
        When the directory does not have that row, or not those before it.
    DamagedState
        When it is damaged.
    """
    identity = folder.identity()
    if identity.shards > 1:
        raise UsageError(
            f"{folder.path} holds shard {identity.shard} of {identity.shards}: only all servers"
            " together bring the model back (aiops serve with the same --state)"
        )
    order = -1 if oldest else 1
    for base in folder.listing.snapshots[::order]:
        if base <= row and not (oldest and 1 in folder.listing.segments):
            try:
                with folder.snapshot(base) as file:
                    file.verify()
                    engine = _engine(file.header.settings, kernels)
                    replayer = Replayer(engine)
                    queued = _rows(folder, needed_rows(file.header.owners))
                    replayer.restore(base, file.header, file.array, queued)
                    return _replayed(folder, engine, replayer, base, row)
            except DamagedState:
                if base == folder.listing.snapshots[-order]:
                    raise
    try:
        with folder.segment(1) as scan:
            first = next(iter(scan), None)
    except UsageError:
        first = None
    if first is None or first.kind != RowKind.BEGIN:
        raise UsageError(f"{folder.path} has no snapshot of row {row:,} or an earlier one")
    found = row_fields(first.kind, first.row, "row 1")
    settings = {"policy": found["policy"], **found["settings"]}
    engine = _engine({"algorithm": settings, "options": found["options"]}, kernels)
    replayer = Replayer(engine)
    replayer.begin(first)
    return _replayed(folder, engine, replayer, 1, row)


def _engine(settings: Any, kernels: str) -> Engine:
    """Return a fresh engine of a state's settings."""
    try:
        algorithm: Mapping[str, Any] = settings["algorithm"]
        chosen = {key: value for key, value in algorithm.items() if key != "policy"}
        return Engine(
            find(algorithm["policy"]).make(chosen), Options(**settings["options"], backend=kernels)
        )
    except (KeyError, TypeError) as error:
        raise DamagedState(f"the state's settings are damaged: {error!r}") from None


def _replayed(
    folder: StateFolder, engine: Engine, replayer: Replayer, base: int, row: int
) -> tuple[Engine, int]:
    """Feed the rows after a base, up to one; return the engine and the number of rows."""
    last = base
    if last < row:
        for frame in _frames(folder, base + 1):
            if frame.number > base:
                replayer.feed(frame)
                last = frame.number
            if last == row:
                break
    if last < row:
        raise UsageError(f"the journal of {folder.path} ends at row {last:,}")
    replayer.finish()
    return engine, last - base


def _frames(folder: StateFolder, row: int) -> Any:
    """Yield the rows from the segment of a row on."""
    for first in folder.listing.segments_after(row - 1):
        with folder.segment(first) as scan:
            yield from scan
            if scan.short:
                return


def _rows(folder: StateFolder, rows: list[int]) -> dict[int, JournalFrame]:
    """Return some rows, as far as the journal has them."""
    found = dict[int, JournalFrame]()
    first = folder.listing.segment_of(rows[0]) if rows else None
    if first is None or journal_name(first) not in folder.sizes:
        return found
    for frame in _frames(folder, rows[0]):
        if frame.number in rows:
            found[frame.number] = frame
        if frame.number >= rows[-1]:
            break
    return found
