"""The files of ``--state DIR``: open them, recover from them, and append to the journal."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiops._version import __version__
from aiops.durable.commit_gate import Acks
from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import Recovered, Replayer, begin_row, check_begin
from aiops.engine.engine import Engine
from aiops.engine.events import Committed, Effect, Event, JournalEnded
from aiops.engine.restore import restore
from aiops.errors import DamagedState, UsageError
from aiops.net.disk import Disk, DiskFile, DiskLock
from aiops.state import directory
from aiops.state.directory import GenerationFile, StateIdentity, StateListing
from aiops.state.frames import END, HEAD, SegmentHead, SegmentScan, frame, frame_bytes
from aiops.state.snapshot_file import SnapshotFile

_log = logging.getLogger("aiops.server")

SEGMENT = 64 << 20
"""Bytes of a segment, if its rows are small."""

_ROWS = 4
"""Rows as long as the first that a segment has room for, at least."""


class StateFiles:
    """A server's state directory, locked by this process.

    Parameters
    ----------
    folder
        The directory; it is made if it is missing.
    disk
        The file system.
    holder
        What another server is told that finds it locked.
    new_run
        The name of the run, if there is no state yet.
    salt
        Draws a segment's salt.

    Attributes
    ----------
    folder, disk
        The directory, and the file system.
    run
        The name of the run whose state it holds.
    generation
        That of the last start; 0 for a new state.

    Raises
    ------
    UsageError
        When another process has it, or it cannot be read or written, or is no state's.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        holder: str,
        new_run: str,
        salt: Callable[[], int],
    ) -> None:
        self.folder = folder
        self.disk, self._salt = disk, salt
        try:
            self.disk.make_folder(folder)
            lock = disk.lock(folder / directory.LOCK, holder)
        except OSError as error:
            raise UsageError(f"--state {folder}: {error.strerror}") from None
        if isinstance(lock, str):
            raise UsageError(
                f"{folder} is in use by {lock}: end that server first, or name another --state"
            )
        self._lock: DiskLock = lock
        try:
            self._open(new_run)
        except OSError as error:
            self.close()
            raise UsageError(f"--state {folder}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, new_run: str) -> None:
        listing = StateListing(self.disk.names(self.folder))
        if listing.foreign:
            raise UsageError(
                f"{self.folder} holds {listing.foreign[0]!r}, which no state has: name a folder of"
                " its own with --state"
            )
        for part in listing.parts:
            self.disk.remove(self.folder / part)
        names = self.disk.names(self.folder)
        if directory.IDENTITY_FILE in names:
            identity = StateIdentity.unpack(self._read(directory.IDENTITY_FILE))
            if identity.shards != 1:
                raise UsageError(f"{self.folder} holds shard {identity.shard} of {identity.shards}")
            self.run = identity.run
        elif listing.segments or listing.snapshots:
            raise DamagedState(f"{self.folder} is damaged: it has a journal and no identity")
        else:
            self.run = new_run
            identity = StateIdentity(self.run, 0, 1, time.time())
            self._replace(directory.IDENTITY_FILE, identity.pack())
        self._generations = GenerationFile(0)
        if directory.GENERATION_FILE in names:
            self._generations = GenerationFile.unpack(self._read(directory.GENERATION_FILE))
        self.generation = self._generations.generation

    def recover(self, engine: Engine, policy: str) -> Recovered | None:
        """Bring a fresh engine to the state of the directory.

        Returns
        -------
        Recovered or None
            Where the journal ended; None: this is a new state.

        Raises
        ------
        DamagedState
            When it is damaged.
        UsageError
            When the server was started with other settings.
        """
        listing = StateListing(self.disk.names(self.folder))
        base, effects = self._restored(listing, engine)
        replayer, last = Replayer(engine, base, effects), None
        for first in listing.segments_after(base):
            name, until = directory.journal_name(first), listing.until(first)
            scan = SegmentScan(self._read(name), name, first=first, until=until)
            if scan.head.run != self.run:
                raise DamagedState(f"{name} is of another run ({scan.head.run})", file=name)
            for found in scan:
                last = found
                if found.number == 1:
                    check_begin(found, policy, engine, str(self.folder))
                    if not base:
                        replayer.begin(found)
                elif found.number > base:
                    replayer.feed(found)
            if scan.torn:
                _log.warning("%s: %d bytes at its end are not a whole row", name, scan.torn)
        return None if last is None and not base else replayer.finish()

    def _restored(self, listing: StateListing, engine: Engine) -> tuple[int, list[Effect]]:
        """Restore the newest snapshot that is whole; return its row, 0 if there is none."""
        for row in listing.snapshots:
            name = directory.snapshot_name(row)
            file = self.disk.open(self.folder / name)
            try:
                try:
                    snapshot = SnapshotFile(partial(_read_at, file), file.size(), name)
                    snapshot.verify()
                except DamagedState as error:
                    _log.error("%s; the one before it is taken", error)
                    continue
                if snapshot.header.run != self.run:
                    raise DamagedState(f"{name} is of another run ({snapshot.header.run})")
                return row, restore(engine, snapshot.header, snapshot.array)
            finally:
                file.close()
        return 0, []

    def begin(
        self,
        engine: Engine,
        policy: str,
        recovered: Recovered | None,
        now: float,
        acks: Acks,
        post: Callable[[Event], object],
    ) -> JournalWriter:
        """Begin this start's generation, and its journal.

        Parameters
        ----------
        engine, policy
            As of `recover`.
        recovered
            What that returned.
        now
            The time, in seconds.
        acks
            The level of acknowledgements: with ``DURABLE`` all that is written is synced.
        post
            Posts an event, on any thread.

        Raises
        ------
        UsageError
            When the directory cannot be written.
        """
        row = 0 if recovered is None else recovered.row
        try:
            self._generations = self._generations.started(row, [engine.version])
            self._replace(directory.GENERATION_FILE, self._generations.pack())
            self.generation = self._generations.generation
            writer = JournalWriter(
                self.disk, self.folder, self.run, self.generation, row + 1, acks, self._salt, post
            )
        except OSError as error:
            raise UsageError(f"--state {self.folder}: {error.strerror}") from None
        if recovered is None:
            first = begin_row(now, policy, engine, self.run, f"aiops {__version__}")
            writer.append(AppendRow(1, first))
        return writer

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def _read(self, name: str) -> memoryview:
        file = self.disk.open(self.folder / name)
        try:
            data = memoryview(bytearray(file.size()))
            return data[: file.read(data, 0)]
        finally:
            file.close()

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a small file: at any moment it is the old one or the new one."""
        part = self.folder / f"{name}{directory.PART}"
        self.disk.remove(part)
        file = self.disk.create(part)
        try:
            file.write([data], 0)
            file.sync()
        finally:
            file.close()
        self.disk.rename(part, self.folder / name)


def _read_at(file: DiskFile, at: int, into: memoryview) -> int:
    return file.read(into, at)


class Clock:
    """A server's time.

    A machine's clock begins again when it boots, but deadlines and rates are kept as times of
    events, which must not go backwards. So the time of a start is never before that of the last.

    Parameters
    ----------
    now
        The system's time since it was booted, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._ahead = now, 0.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now() + self._ahead

    def go_on(self, time: float) -> None:
        """Be at this time at least; the clock never goes back."""
        self._ahead = max(self._ahead, time - self._now())


class JournalWriter:
    """Appends rows to the segments of a journal.

    A row is in the file when `append` returns. What is to be synced is synced on a thread, all that
    was written meanwhile at once. After an error nothing more is written: what a file holds after a
    failed call is unknown.

    Parameters
    ----------
    disk, folder
        Where the segments are.
    run, generation
        For their heads.
    first
        The number of the first row.
    acks, salt, post
        As of `StateFiles`.

    Raises
    ------
    OSError
        When the first segment cannot be made.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        run: str,
        generation: int,
        first: int,
        acks: Acks,
        salt: Callable[[], int],
        post: Callable[[Event], object],
    ) -> None:
        self._disk, self._folder, self._run, self._generation = disk, folder, run, generation
        self._new_salt, self._post = salt, post
        self._size = self._at = 0
        self._synced = first - 1  # the newest row known to be synced
        self.why, self._closed = "", False
        self._file = self._segment(first, 0)
        self._wanted: queue.SimpleQueue[tuple[DiskFile, int, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if acks >= Acks.DURABLE:
            self._thread = threading.Thread(target=self._sync, name="aiops-journal", daemon=True)
            self._thread.start()

    def append(self, effect: AppendRow) -> JournalEnded | None:
        """Append a row; return the event that the journal has ended, if it has just ended."""
        row = effect.row
        payload = b"" if row.payload is None else row.payload.data
        return self.write(effect.number, row.kind, row.time, row.flags, row.row, payload)

    def write(
        self,
        number: int,
        kind: int,
        time: float,
        flags: int,
        row: bytes,
        payload: bytes | memoryview,
    ) -> JournalEnded | None:
        """Append a row, given in parts, as `append`."""
        if self.why or self._closed:
            return None
        length = len(payload)
        nbytes = frame_bytes(len(row), length)
        try:
            if self._at + nbytes + len(END) > self._size:
                self._roll(number, nbytes)
            before, after = frame(
                *(number, kind, time, flags, row, length, zlib.crc32(payload) if length else 0),
                salt=self._salt,
                unsynced=number - self._synced,
            )
            self._file.write((before, payload, after, END), self._at)
        except OSError as error:
            return self._ended(time, error)
        self._at += nbytes
        if self._thread is not None:
            self._wanted.put((self._file, number, time))
        return None

    def end(self) -> None:
        """Sync and close the journal, in which nothing is written from here on."""
        self._closed = True
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
        if not self.why:
            try:
                self._file.sync()
            except OSError as error:
                self._ended(0.0, error)
        self._file.close()

    def _ended(self, now: float, error: OSError) -> JournalEnded:
        self.why = f"the journal in {self._folder} has ended: {error.strerror or error}"
        return JournalEnded(now, self.why)

    def _segment(self, first: int, nbytes: int) -> DiskFile:
        """Begin a segment with room for a row of ``nbytes``."""
        self._size = max(SEGMENT, HEAD + _ROWS * nbytes + len(END))
        self._salt = self._new_salt()
        path = self._folder / directory.journal_name(first)
        part = path.with_name(path.name + directory.PART)
        self._disk.remove(part)
        file = self._disk.create(part, self._size)
        try:
            head = SegmentHead(first, self._generation, self._run, self._salt)
            file.write([head.pack()], 0)
            file.sync()
            self._disk.rename(part, path)
        except BaseException:
            file.close()
            raise
        self._at = HEAD
        return file

    def _roll(self, first: int, nbytes: int) -> None:
        """Go on in a new segment; the rows of the old one are synced before it has a name."""
        self._file.sync()
        self._synced = first - 1
        old, self._file = self._file, self._segment(first, nbytes)
        if self._thread is not None:
            self._wanted.put((old, -1, 0.0))  # to be closed, once it is synced no more
        else:
            old.close()

    def _sync(self) -> None:
        """Sync what was written, again and again, and post up to which row that is."""
        while (wanted := self._wanted.get()) is not None:
            over = False
            while True:  # all that waits, at once
                file, number, now = wanted
                if number < 0:
                    file.close()
                try:
                    following = self._wanted.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    over = True
                    break
                wanted = following
            if number >= 0:
                try:
                    file.sync()
                except OSError as error:
                    self._post(self._ended(now, error))
                    return
                self._synced = number
                self._post(Committed(now, number))
            if over:
                return
