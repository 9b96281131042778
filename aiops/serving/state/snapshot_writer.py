"""Write snapshots of a server's state beside training, and remove the files that they cover."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aiops.engine.capture import Capture, needed_rows
from aiops.errors import DamagedState, UsageError
from aiops.model.parts import LARGEST
from aiops.net.disk import Disk, DiskFile, DiskThread
from aiops.serving.repeated_error import RepeatedError
from aiops.serving.state.segment_files import NO_ROOM, SegmentFiles
from aiops.state.directory import PART, StateListing, journal_name, snapshot_name
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader, SnapshotPlan

_log = logging.getLogger("aiops.server")

_SPARE = f"snapshot{PART}"

_LARGE = 16 << 20
"""Bytes from which a snapshot is not kept in the system's cache: training needs the memory's time,
and a start reads from the disk nearly as fast."""

_REST = 4.0
"""The pause after each piece of a snapshot that is paced, in times that the piece took: training
then has the memory to itself for most of the time, at 0.9 of its rate or more."""

_JOURNAL = "journal-"  # the beginning of the names of its segments, also of those that are hidden

KEPT = 2
"""Snapshots that stay: if the newest is damaged, the one before it and the journal are as good."""


class SnapshotWriter:
    """Writes one snapshot at a time, on a thread.

    Parameters
    ----------
    disk, folder
        Where they go.
    segments
        The files of the journal.
    last
        The last row of the journal, if it is written no more. None: it goes on.
    alone
        Whether what its own snapshots cover can go. Else `keep` says so.
    now
        Returns the time, in seconds.

    Attributes
    ----------
    why
        The reason for which the last one was not written; empty if it was.
    fed
        Returns the first row that is still needed for a standby. Called on the thread.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        segments: SegmentFiles,
        last: int | None = None,
        *,
        alone: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now, self._error = now, RepeatedError()
        self._hurry = threading.Event()  # the snapshot is waited for: pause no more
        self._alone, self._writing = alone, False
        self._disk, self._folder, self._segments, self._last = disk, folder, segments, last
        self._thread: DiskThread | None = None
        self._has_spare = False  # a snapshot that is not needed any more, to be overwritten
        self._needed: dict[int, int] = {}  # by snapshot, the first row that it refers to
        self.why = ""
        self.fed: Callable[[], int] = lambda: LARGEST

    @property
    def busy(self) -> bool:
        """True while a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        capture: Capture,
        header: SnapshotHeader,
        done: Callable[[int], object],
        *,
        paced: bool = False,
    ) -> None:
        """Begin to write a capture that is complete.

        Parameters
        ----------
        capture, header
            What is written.
        done
            Called on the thread, at last, with the number of bytes written.
        paced
            Whether a large one is written with pauses, until it is waited for: where there is
            no journal whose replay grows meanwhile.
        """
        self.wait()
        self._writing = True
        self._hurry.clear()
        run = partial(self._run, capture, header, done, paced)
        self._thread = self._disk.thread(run, "aiops-snapshot")

    def keep(self, rows: Sequence[int]) -> None:
        """Begin to remove what these snapshots and later ones do not need, rising.

        While one is being written nothing is removed.
        """
        if not self._writing:
            self.wait()
            self._thread = self._disk.thread(partial(self._remove_beside, rows), "aiops-snapshot")

    def reveal(self) -> None:
        """Have the new journal count, now that the snapshot before it is there."""
        if not self.why:
            try:
                self._segments.reveal()
            except OSError as error:
                self.why = f"the journal cannot go on: {error.strerror or error}"

    def wait(self) -> None:
        """Return when nothing is being written."""
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Remove the file that the next one would have been written over."""
        if self._has_spare:
            self._has_spare = False
            with contextlib.suppress(OSError):
                self._disk.remove(self._folder / _SPARE)

    def write(
        self, capture: Capture, header: SnapshotHeader, *, last: bool = False, paced: bool = False
    ) -> int:
        """Write a snapshot, and remove what it covers; return its bytes.

        Errors are logged, as `RepeatedError`, and are in `why`. ``last``: the server ends.
        ``paced``: as in `begin`.
        """
        name, nbytes = snapshot_name(header.row), 0
        part = self._folder / f"{name}{PART}"
        try:
            plan = SnapshotPlan(header, capture.contents)
            nbytes = plan.length
            self._disk.remove(part)
            file = self._again(part, nbytes) or self._create(part, nbytes)
            try:
                cached = nbytes < _LARGE or not file.bypass()
                for at, buffers in plan.pieces():
                    began = self._now()
                    file.write(buffers, at)
                    if cached:  # in steps, so that the journal's rows do not wait for all of it
                        file.sync()
                    elif paced:
                        self._hurry.wait(_REST * (self._now() - began))
                file.sync()
            finally:
                file.close()
            if not self._alone:
                self._sync_journal()
            self._disk.rename(part, self._folder / name)
            self._needed[header.row] = _first_needed(header)
            if self._alone:
                self._clean()
            self.why = ""
            self._error.over()
        except (OSError, MemoryError, UsageError) as error:
            why = getattr(error, "strerror", None) or str(error) or "there is no memory for it"
            self.why = f"{self._folder / name} was not written: {why}"
            if last:
                _log.error("%s", self.why)
            else:
                goes_on = "; training goes on, and the next one is tried as usual"
                self._error.log(self._now(), why, self.why + goes_on)
            with contextlib.suppress(OSError):
                self._disk.remove(part)
        return nbytes

    def _sync_journal(self) -> None:
        """Sync the rows so far: a moment that all servers of a model have needs what it refers to.

        A server alone lets queued pushes be lost with their rows (`Replayer.lost`), but of a push
        on several shards all have to lose their portions.
        """
        for name in self._disk.names(self._folder):
            if name.startswith(_JOURNAL):
                with contextlib.suppress(FileNotFoundError):  # it has another name now
                    file = self._disk.open(self._folder / name)
                    try:
                        file.sync()
                    finally:
                        file.close()
        self._disk.sync_names(self._folder)

    def _again(self, part: Path, nbytes: int) -> DiskFile | None:
        """Return the last snapshot that was not needed, to be overwritten, if it is as long.

        To write over the pages of a file takes a fraction of the time that a new one takes.
        """
        spare = self._folder / _SPARE
        if not self._has_spare:
            return None
        self._has_spare = False
        file = self._disk.open(spare)
        if file.size() == nbytes:
            self._disk.rename(spare, part)
            return file
        file.close()
        self._disk.remove(spare)
        return None

    def _create(self, part: Path, nbytes: int) -> DiskFile:
        """Make a file, in place of spare segments if there is no other room."""
        try:
            return self._disk.create(part, nbytes)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._segments.remove_spares():
                raise
        return self._disk.create(part, nbytes)

    def _run(
        self,
        capture: Capture,
        header: SnapshotHeader,
        done: Callable[[int], object],
        paced: bool,
    ) -> None:
        nbytes = 0
        try:
            nbytes = self.write(capture, header, paced=paced)
        finally:
            self._writing = False
            done(nbytes)

    def _clean(self) -> None:
        """Remove what the last snapshots do not need."""
        listing = StateListing(self._disk.names(self._folder))
        kept = listing.snapshots[:KEPT]
        needed = min([self.fed(), *map(self._first_needed, kept)])
        removal = listing.removable(KEPT, needed)
        segments = removal.segments
        if self._last is not None and len(kept) == KEPT and needed > self._last:
            segments = listing.segments
        self._remove(removal.snapshots, segments)

    def _remove_beside(self, rows: Sequence[int]) -> None:
        """Remove what these snapshots and later ones do not need."""
        try:
            listing = StateListing(self._disk.names(self._folder))
            needed = min([self.fed(), *map(self._first_needed, rows)])
            removal, last = listing.beside(rows, needed), self._last
            covered = last is not None and needed > last
            self._remove(removal.snapshots, listing.segments if covered else removal.segments)
        except (OSError, MemoryError) as error:
            _log.error("%s: old files were not removed: %s", self._folder, error)

    def _remove(self, snapshots: Sequence[int], segments: Sequence[int]) -> None:
        for row in snapshots:
            path = self._folder / snapshot_name(row)
            if self._has_spare:
                self._disk.remove(path)
            else:
                self._disk.rename(path, self._folder / _SPARE)
                self._has_spare = True
            self._needed.pop(row, None)
        if self._last is None:
            self._segments.retire(segments)
            return
        for first in segments:
            self._disk.remove(self._folder / journal_name(first))

    def _first_needed(self, row: int) -> int:
        """Return the first row that a snapshot refers to, which an earlier server has written."""
        if row not in self._needed:
            name = snapshot_name(row)
            file = self._disk.open(self._folder / name)
            try:
                header = SnapshotFile(
                    lambda at, into: file.read(into, at), file.size(), name
                ).header
                self._needed[row] = _first_needed(header)
            except DamagedState:
                self._needed[row] = 0  # all that there is may be needed
            finally:
                file.close()
        return self._needed[row]


def _first_needed(header: SnapshotHeader) -> int:
    return min([*needed_rows(header.owners), header.row + 1])
