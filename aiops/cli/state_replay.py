"""Bring an engine to the state that a directory has at a row."""

from __future__ import annotations

from collections.abc import Iterator

from aiops.cli.state_folder import StateFolder
from aiops.durable.recovery import Replayer
from aiops.durable.run_record import Replayed, engine_of, replay, replay_on
from aiops.engine.capture import needed_rows
from aiops.engine.engine import Engine
from aiops.errors import DamagedState, UsageError
from aiops.state.directory import journal_name
from aiops.state.frames import JournalFrame


def engine_at(folder: StateFolder, row: int, kernels: str = "auto") -> Engine:
    """Return an engine in the state after a row: that of the newest snapshot before, and the rows.

    Raises
    ------
    UsageError
        When the directory does not have that row, or not those before it.
    DamagedState
        When it is damaged.
    """
    _check_whole(folder)
    bases = [base for base in folder.listing.snapshots if base <= row]
    for base in bases:
        try:
            found = _replayed_from(folder, base, kernels, until=row)
            break
        except DamagedState:
            if base == bases[-1] and 1 not in folder.listing.segments:
                raise
    else:
        if 1 not in folder.listing.segments:
            raise UsageError(f"{folder.path} has no snapshot of row {row:,} or an earlier one")
        found = replay(_frames(folder, 1, until=row), kernels)
    if found.last < row:
        raise UsageError(f"the journal of {folder.path} ends at row {found.last:,}")
    return found.engine


def replay_all(folder: StateFolder, kernels: str = "auto") -> tuple[Replayed, DamagedState | None]:
    """Replay all rows: from the first, or from the oldest snapshot if that is gone.

    Returns
    -------
    The end of the replay, and the damage that it ended at, or None.

    Raises
    ------
    UsageError, DamagedState
        When it has no beginning; when the replay departs from the record.
    """
    _check_whole(folder)
    listing, damage = folder.listing, list[DamagedState]()
    if 1 in listing.segments:
        return replay(_frames(folder, 1, damage), kernels), damage[0] if damage else None
    if not listing.snapshots:
        raise UsageError(f"{folder.path} has no beginning: neither its first row nor a snapshot")
    found = _replayed_from(folder, listing.snapshots[-1], kernels, damage)
    return found, damage[0] if damage else None


def _check_whole(folder: StateFolder) -> None:
    identity = folder.identity()
    if identity.shards > 1:
        raise UsageError(
            f"{folder.path} holds shard {identity.shard} of {identity.shards}: only all servers"
            " together bring the model back (aiops serve with the same --state)"
        )


def _replayed_from(
    folder: StateFolder,
    base: int,
    kernels: str,
    damage: list[DamagedState] | None = None,
    until: int | None = None,
) -> Replayed:
    """Replay the rows after a snapshot."""
    with folder.snapshot(base) as file:
        file.verify()
        engine = engine_of(file.header.settings, kernels)
        replayer = Replayer(engine)
        queued = _rows(folder, needed_rows(file.header.owners))
        replayer.restore(base, file.header, file.array, queued)
        rows = iter(()) if base == until else _frames(folder, base + 1, damage, until)
        return replay_on(engine, replayer, rows, base)


def _frames(
    folder: StateFolder,
    row: int,
    damage: list[DamagedState] | None = None,
    until: int | None = None,
) -> Iterator[JournalFrame]:
    """Yield the rows from the segment of a row on, up to ``until``.

    ``damage``: where to put the error of a damaged row, which is then the end.
    """
    try:
        for frame in _segment_rows(folder, row):
            yield frame
            if frame.number == until:  # the one behind it may be damaged
                return
    except DamagedState as error:
        if damage is None:
            raise
        damage.append(error)


def _segment_rows(folder: StateFolder, row: int) -> Iterator[JournalFrame]:
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
    for frame in _frames(folder, rows[0], until=rows[-1]):
        if frame.number in rows:
            found[frame.number] = frame
    return found
