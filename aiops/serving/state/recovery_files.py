"""Recover from the files of ``--state DIR``: the newest whole snapshot, and the rows since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from aiops.durable.follower_recorder import FollowerReplayer, check_follower
from aiops.durable.recovery import Recovered, Replayer, check_begin
from aiops.engine.capture import needed_rows
from aiops.engine.engine import Engine
from aiops.errors import DamagedState, UsageError
from aiops.kernels.parallel import ParallelMap, beside
from aiops.model.parts import LARGEST
from aiops.net.disk import Disk, DiskFile
from aiops.shards.follower import Follower
from aiops.state import directory
from aiops.state.directory import StateListing
from aiops.state.file_bytes import FileBytes, Room
from aiops.state.frames import JournalFrame
from aiops.state.journal_scan import JournalScan
from aiops.state.row_kinds import RowKind
from aiops.state.snapshot_file import SnapshotFile

_log = logging.getLogger("aiops.server")


@dataclass(slots=True)
class FoundFiles:
    """The findings of a recovery, for the start that follows it.

    Attributes
    ----------
    base
        The row of the snapshot that was begun with; 0: there is none.
    void
        The first rows of the segments that are no part of the journal.
    earlier
        The first and last rows of those that are.
    useless
        The rows of the snapshots that are to be removed: they are not whole, or of lost moments.
    longest
        Bytes of the longest row that was read.
    nbytes
        Bytes of the files of ``earlier``.
    """

    base: int = 0
    void: tuple[int, ...] = ()
    earlier: list[tuple[int, int]] = field(default_factory=list)
    useless: list[int] = field(default_factory=list)
    longest: int = 0
    nbytes: int = 0


class RecoveryFiles:
    """Reads the files of a state, once.

    Parameters
    ----------
    folder, disk
        The state's directory, which is locked, and its file system.
    origin
        The run whose state it is, the number of the shard and that of all shards.
    check
        Called often; what it raises ends the reading.
    loading
        Returns whether kernels are being loaded on another thread, which a start waits for.

    Attributes
    ----------
    found
        What was found.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        origin: tuple[str, int, int],
        check: Callable[[], object],
        loading: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._disk, self._origin = folder, disk, origin
        self._check, self._loading = check, loading
        self.found = FoundFiles()
        self._listing = StateListing(disk.names(folder))
        self._later: list[int] = []  # snapshots that are not begun with, perhaps of lost moments
        self._reading: list[DiskFile] = []  # segments
        self._sizes: dict[str, int] = {}  # of segments

    def recover(self, engine: Engine, policy: str, replayer: Replayer) -> Recovered | None:
        """Bring a fresh engine to the state; parameters and errors as of `StateFiles.recover`."""
        listing, parallel_map = self._listing, engine.machine.parallel_map
        try:
            base = self._restored(replayer, parallel_map)
            self._check_beginning(base)
            segments = self._segments_after(base)
            self._tell(base, segments)
            replayer.room = room = Room()
            read = partial(self._segment, room=room)
            scan = JournalScan(read, listing, base, segments, self._origin, passed=base)
            if replayer.lost:  # then what follows was lost too, or is of no use
                self._end_with_snapshot(base, segments, replayer.lost)
                return replayer.finish()
            check = partial(check_begin, policy=policy, engine=engine, where=str(self._folder))
            last = self._replay(scan, base, replayer, check, parallel_map)
            self._read_to(base, scan, last)
        finally:
            self._close()
        return replayer.finish() if last else None

    def recover_follower(self, follower: Follower, replayer: FollowerReplayer) -> Recovered | None:
        """Bring a fresh follower to the state, as `recover`."""
        parallel_map = follower.machine.parallel_map
        check = partial(check_follower, follower=follower, where=str(self._folder))
        try:
            base = self._restored(replayer, parallel_map)
            self._check_beginning(base)
            segments = self._segments_after(base)
            self._tell(base, segments)
            given = self._segment, self._listing, base, segments, self._origin
            scan = JournalScan(*given, passed=base)
            last = self._replay(scan, base, replayer, check, parallel_map)
            self._read_to(base, scan, last)
        finally:
            self._close()
        recovered = replayer.finish()
        return recovered if last else None

    def _tell(self, base: int, segments: Sequence[int]) -> None:
        """Say that rows are repeated, before that takes its time."""
        if segments:
            rows = f"since its snapshot at row {base:,}" if base else "of its journal"
            _log.info("%s: the rows %s are repeated before it is served", self._folder, rows)

    def _close(self) -> None:
        while self._reading:
            self._reading.pop().close()

    # ------------------------------------------------------------ its snapshot

    def _restored(self, replayer: Replayer | FollowerReplayer, parallel_map: ParallelMap) -> int:
        """Restore the newest snapshot that is whole; return its row, 0 if there is none."""
        parallel_map = beside(self._loading, parallel_map)
        for row in self._listing.snapshots:
            name = directory.snapshot_name(row)
            file = self._disk.open(self._folder / name)
            try:
                try:
                    snapshot = SnapshotFile(partial(self._read_at, file), file.size(), name)
                    snapshot.verify(parallel_map)
                except DamagedState as error:
                    _log.error("%s; the one before it is taken", error)
                    self.found.useless.append(row)
                    continue
                why = directory.foreign(name, snapshot.header.origin, self._origin)
                if why:
                    raise DamagedState(f"{why}: put back the file that was there", file=name)
                if not replayer.begins_with(row, snapshot.header):
                    _log.warning("%s is not taken: %s", name, replayer.bound)
                    self._later.append(row)
                    continue
                queued = self._queued(needed_rows(snapshot.header.owners))
                read = partial(snapshot.array, parallel_map=parallel_map)
                replayer.restore(row, snapshot.header, read, queued)
                return row
            finally:
                file.close()
        return 0

    def _queued(self, rows: Sequence[int]) -> dict[int, JournalFrame]:
        """Return these rows, as far as the journal has them: it may have ended before."""
        wanted, found, listing = {*rows}, dict[int, JournalFrame](), self._listing
        first = listing.segment_of(rows[0]) if rows else None
        if first is None:
            return found
        segments = [each for each in listing.segments if each >= first]
        passed = rows[0] - 1
        for row in JournalScan(self._segment, listing, rows[-1], segments, self._origin, passed):
            if row.number in wanted:
                found[row.number] = row
            if row.number >= rows[-1]:
                break
        return found

    def _end_with_snapshot(self, base: int, segments: Sequence[int], lost: int) -> None:
        """Have the state be that of its snapshot: pushes that it refers to are lost."""
        found = self.found
        found.base, found.void = base, tuple(each for each in segments if each > base)
        found.useless += [row for row in self._later if row > base]
        _log.error(
            "%s: %d pushes that were queued at row %d are lost, as the system ended before it"
            " had written them to the disk, and so are the rows after it",
            *(self._folder, lost, base),
        )

    # ------------------------------------------------------------ its rows

    def _check_beginning(self, base: int) -> None:
        """Check that there is a snapshot or a row to begin with, or that there never was one.

        Raises
        ------
        DamagedState
            When all snapshots are damaged and there is no journal.
        """
        if self.found.useless and not (base or self._listing.segments):
            raise DamagedState(f"{self._folder} is damaged: no snapshot in it is whole")

    def _segments_after(self, base: int) -> tuple[int, ...]:
        listing = self._listing
        if self._later and not (base or listing.segments):
            # Snapshots alone are kept, and the servers ended before all had their first.
            _log.error(
                "%s: no snapshot of one moment is on all servers of the model, so they begin"
                " without it; clients are told what that has lost",
                self._folder,
            )
            return ()
        if self._later and not (base or 1 in listing.segments):
            raise DamagedState(
                f"{self._folder} begins with a moment that another server of the model has lost, so"
                " they have none together any more: put back copies that were taken at one time, or"
                " begin with a --save"
            )
        return listing.segments_after(base)

    def _replay(
        self,
        scan: JournalScan,
        base: int,
        replayer: Replayer | FollowerReplayer,
        check: Callable[[JournalFrame], None],
        parallel_map: ParallelMap,
    ) -> int:
        """Replay the rows after a row; return the last one's number.

        Of a large model the next row is read while one is replayed.
        """
        last, kind, rows = base, 0, _Rows(self._rows_of(scan, base))
        rows.read()
        while (found := rows.taken()) is not None:
            self._check()
            if found.number > base and not replayer.goes_on_with(found):
                scan.end_before(found.number)
                self._undone(scan.lost, replayer.bound)
                break
            last, kind = max(last, found.number), found.kind
            self.found.longest = max(self.found.longest, found.end - found.at)
            if found.number == 1:
                check(found)
                if not base:
                    replayer.begin(found)
            elif found.number > base and replayer.large:
                parallel_map([partial(replayer.feed, found), rows.read])
                continue
            elif found.number > base:
                replayer.feed(found)
            rows.read()
        if kind == RowKind.END:  # of a release whose file `identity` does not say so
            raise UsageError(record_text(self._folder))
        return last

    def _rows_of(self, scan: JournalScan, base: int) -> Iterator[JournalFrame]:
        """Return a journal's rows, up to its end or up to rows that a damaged snapshot has covered.

        A journal may have ended, and may have been taken up again behind a snapshot. If that is
        damaged, there is no way over the gap, and the rows before it are the newest whole state.

        Raises
        ------
        DamagedState
            When other rows are damaged, or there is none before.
        """
        row = base
        try:
            for found in scan:
                row = max(row, found.number)
                yield found
        except DamagedState as error:
            at = error.details.get("row", LARGEST)
            if not row or at > max(self.found.useless, default=0):
                raise
            scan.end_before(at)
            _log.error(
                "%s: the newest snapshot is damaged, and the journal before it ended with row %d:"
                " the state after that row is taken, which is the newest whole one; all that"
                " followed is lost, and clients are told",
                *(self._folder, row),
            )

    def _undone(self, rows: int, why: str) -> None:
        """Say that rows are no part of the journal any more."""
        _log.error(
            "%s: its last %d rows are undone: %s, and clients are told", self._folder, rows, why
        )

    def _read_to(self, base: int, scan: JournalScan, last: int) -> None:
        """Note where the journal ends, and say what is missing of it."""
        found = self.found
        found.base, found.void = base, scan.void
        found.useless += [row for row in self._later if row > last]
        kept = [each for each in self._listing.segments_after(base) if each not in scan.void]
        found.earlier = [(one, other - 1) for one, other in pairwise([*kept, last + 1])]
        found.nbytes = sum(self._sizes.get(directory.journal_name(first), 0) for first in kept)
        if scan.torn:
            _log.warning("%s: %d bytes at its end are not a whole row", *scan.torn)
        if scan.void and not scan.cut:  # else it has been told already
            _log.error(
                "%s: %d rows are lost, as they were not written to the disk before the system or"
                " the journal ended; the segments of the journal from %s on, which follow them, are"
                " removed",
                *(self._folder, scan.lost, directory.journal_name(scan.void[0])),
            )

    def _read_at(self, file: DiskFile, at: int, into: memoryview) -> int:
        """Read from a file, on any thread, unless the reading is to end."""
        self._check()
        return read_at(file, at, into)

    def _segment(self, name: str, *, room: Room | None = None) -> FileBytes:
        """Return the bytes of a segment; the file stays open until all have been read."""
        file = self._disk.open(self._folder / name)
        self._reading.append(file)
        self._sizes[name] = size = file.size()
        return FileBytes(partial(self._read_at, file), size, room, file.written)


class _Rows:
    """Takes rows from an iterator one by one, on whichever thread `read` is called."""

    def __init__(self, rows: Iterator[JournalFrame]) -> None:
        self._rows = rows
        self._next: JournalFrame | None = None
        self._error: Exception | None = None

    def read(self) -> None:
        """Read the next row, or find that there is none, or that it is damaged."""
        self._next = None
        try:
            self._next = next(self._rows, None)
        except Exception as error:
            self._error = error

    def taken(self) -> JournalFrame | None:
        """Return the row that was read; None: there is none. Raises what its reading raised."""
        if self._error is not None:
            raise self._error
        return self._next


def read_at(file: DiskFile, at: int, into: memoryview) -> int:
    """Read from a file, as `aiops.state.blocks.Read`."""
    return file.read(into, at)


def record_text(folder: Path) -> str:
    """Return the reason for which no server goes on with a record, and what to do."""
    return (
        f"{folder} is the record of a run (--record), which a server would write into: write its"
        f" model with `aiops replay {folder} --save FILE`, and begin another --state with --init"
        " FILE (one with --keep-journal can be replayed as a record can)"
    )
