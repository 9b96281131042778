"""Bring an engine to the state that a directory has at a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from aiops.cli.state_folder import StateFolder
from aiops.durable.run_record import Replayed, engine_of, replay, replay_on, replayer_of
from aiops.engine.capture import needed_rows
from aiops.engine.engine import Engine
from aiops.errors import DamagedState, UsageError
from aiops.state.directory import foreign, journal_name, snapshot_name
from aiops.state.frames import JournalFrame
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader

T = TypeVar("T")


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
    return replayed_to(folder, row, kernels)


def replayed_to(folder: StateFolder, row: int, kernels: str = "auto") -> Engine:
    """Return the same, of a folder that may be a lead's: its engine has its part of the model."""
    found = from_newest(
        folder,
        [base for base in folder.listing.snapshots if base <= row],
        lambda base: _replayed_from(folder, base, kernels, until=row),
        lambda: replay(frames_of(folder, 1, until=row), kernels),
        f"row {row:,}",
    )
    if found.last < row:
        raise UsageError(f"the journal of {folder.path} ends at row {found.last:,}")
    return found.engine


def from_newest(
    folder: StateFolder,
    bases: Sequence[int],
    from_snapshot: Callable[[int], T],
    from_first: Callable[[], T],
    moment: str,
) -> T:
    """Return what a replay gives that begins with the newest snapshot that is whole.

    Parameters
    ----------
    folder
        Has the snapshots.
    bases
        The rows of those that will do, the newest first.
    from_snapshot, from_first
        The replay, which raises `DamagedState` if the snapshot or a row since is damaged; and that
        of a journal that is there from its first row on, if no snapshot will do.
    moment
        What the snapshots are to be of, for errors.

    Raises
    ------
    UsageError
        When there is nothing to begin with.
    DamagedState
        When all of it is damaged.
    """
    for base in bases:
        try:
            return from_snapshot(base)
        except DamagedState:
            if base == bases[-1] and 1 not in folder.listing.segments:
                raise
    if 1 not in folder.listing.segments:
        raise UsageError(f"{folder.path} has no snapshot of {moment} or an earlier one")
    return from_first()


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
    return all_rows(folder, kernels)


def all_rows(folder: StateFolder, kernels: str = "auto") -> tuple[Replayed, DamagedState | None]:
    """Replay the same, of a folder that may be a lead's: its engine has its part of the model."""
    listing, damage = folder.listing, list[DamagedState]()
    if 1 in listing.segments:
        return replay(frames_of(folder, 1, damage), kernels), damage[0] if damage else None
    if not listing.snapshots:
        raise UsageError(f"{folder.path} has no beginning: neither its first row nor a snapshot")
    found = _replayed_from(folder, listing.snapshots[-1], kernels, damage)
    return found, damage[0] if damage else None


def _check_whole(folder: StateFolder) -> None:
    identity = folder.identity()
    if identity.shards > 1:
        raise UsageError(
            f"{folder.path} holds shard {identity.shard} of {identity.shards}: only all servers"
            " together bring the model back (`aiops replay` or `aiops state export --at` of the"
            " folder with those of all shards, or aiops serve with the same --state)"
        )


def _replayed_from(
    folder: StateFolder,
    base: int,
    kernels: str,
    damage: list[DamagedState] | None = None,
    until: int | None = None,
) -> Replayed:
    """Replay the rows after a snapshot."""
    with own_snapshot(folder, base) as file:
        engine = engine_of(file.header.settings, kernels)
        replayer = replayer_of(engine)
        queued = queued_rows(folder, file.header)
        replayer.restore(base, file.header, file.array, queued)
        rows = iter(()) if base == until else frames_of(folder, base + 1, damage, until)
        return replay_on(engine, replayer, rows, base)


@contextmanager
def own_snapshot(folder: StateFolder, row: int) -> Iterator[SnapshotFile]:
    """Open a snapshot that is whole, and is one of the folder's server.

    Raises
    ------
    DamagedState
        When it is not.
    """
    with folder.snapshot(row) as file:
        _check_own(folder, snapshot_name(row), file.header.origin)
        file.verify()
        yield file


def _check_own(folder: StateFolder, name: str, origin: tuple[str, int, int]) -> None:
    why = foreign(name, origin, folder.identity().origin)
    if why:
        raise DamagedState(f"{why}: put back the file that was there", file=name)


def frames_of(
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
            _check_own(folder, journal_name(first), scan.head.origin)
            yield from scan
            if scan.short:
                return


def queued_rows(folder: StateFolder, header: SnapshotHeader) -> dict[int, JournalFrame]:
    """Return the rows that the queue of a snapshot refers to, as far as the journal has them."""
    rows, found = needed_rows(header.owners), dict[int, JournalFrame]()
    first = folder.listing.segment_of(rows[0]) if rows else None
    if first is None or journal_name(first) not in folder.sizes:
        return found
    for frame in frames_of(folder, rows[0], until=rows[-1]):
        if frame.number in rows:
            found[frame.number] = frame
    return found
