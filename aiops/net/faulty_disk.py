"""A disk with faults: it is full or slow, a sync fails, the process or the power ends.

A `FaultyDisk` stands between a server and its `Disk`, so the server's own code has no places for
faults. How a program or a process gets one is in `aiops.net.faults`.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from aiops.errors import UsageError, nearest
from aiops.net.disk import Disk, DiskFile, DiskLock, DiskQueue, DiskThread, SystemDisk
from aiops.net.power_loss import flip_bit, reach

Buffers = Sequence[bytes | bytearray | memoryview]

_POINTS: Mapping[str, str] = {
    "identity.named": "a new folder has its identity, and nothing else",
    "generation.named": "this start is on the disk; nothing was journalled in it",
    "segment.named": "a new segment of the journal has its name and no row; with --acks durable the"
    " one before it is synced",
    "journal.torn": "the first half of a row is in the journal's file",
    "journal.written": "a row is in the journal's file, neither synced nor acknowledged",
    "journal.synced": "rows are synced, and not yet acknowledged with --acks durable",
    "snapshot.written": "a piece of a snapshot is in a file that does not have its name yet",
    "snapshot.synced": "and is synced",
    "snapshot.named": "a snapshot is complete; what it covers is still there",
    "covered.removed": "a file that the snapshots cover is gone, others are still there",
}


def points() -> Mapping[str, str]:
    """Return the points at which a process can be ended, and what is true at each.

    >>> points()["journal.torn"]
    "the first half of a row is in the journal's file"
    """
    return _POINTS


class FaultyDisk:
    """A disk with faults, before another disk.

    Parameters
    ----------
    disk
        The disk that keeps the files; default: that of the operating system.
    seed
        Of all that is random.
    full_at
        Bytes of the files that were made through this disk, at which it is full: what needs more
        raises ``ENOSPC``. It may be changed at any time; None: there is room.
    slow
        Seconds that each sync takes longer.
    sync_fails_at
        The number of a sync, from 1: it and all later ones raise ``EIO``.
    lose_unsynced
        Whether a loss of power loses what was written and not synced: all of it, none, its end, or
        any sectors of 512 bytes.
    tear
        Whether of such a sector a part may be written.
    flip
        The probability that a loss of power flips a bit in a file, synced or not.
    pause
        Waits a number of seconds.

    Attributes
    ----------
    reached
        How often each point (`points`) was reached.
    segment
        As of the other disk.
    off
        True once the power or the process is gone: every call raises ``EIO``.
    """

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        seed: int = 0,
        full_at: int | None = None,
        slow: float = 0.0,
        sync_fails_at: int | None = None,
        lose_unsynced: bool = False,
        tear: bool = False,
        flip: float = 0.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.full_at, self.slow, self.sync_fails_at = full_at, slow, sync_fails_at
        self.lose_unsynced, self.tear, self.flip = lose_unsynced, tear, flip
        self.reached: dict[str, int] = dict.fromkeys(_POINTS, 0)
        self.off = False
        self._disk, self._pause, self._rng = disk or SystemDisk(), pause, Random(seed)
        self.segment = self._disk.segment
        self._guard = threading.RLock()
        self._crash: tuple[str, int, Callable[[], object]] = "", 0, end_process
        self._files: dict[Path, FileRecord] = {}  # those made or opened here
        self._locks: list[DiskLock] = []
        self._syncs = 0

    def crash_at(
        self, point: str, count: int = 1, then: Callable[[], object] | None = None
    ) -> None:
        """End the process when a point is reached for the ``count``-th time from now on.

        Parameters
        ----------
        point
            One of `points`.
        count
            1: the next time.
        then
            Called instead of the end of the process (SIGKILL); afterwards the disk is `off`.

        Raises
        ------
        UsageError
            When there is no such point, or the count is not positive.
        """
        if point not in _POINTS:
            raise UsageError(f"no point is called {point!r}; {nearest(point, _POINTS)}")
        if count < 1:
            raise UsageError(f"a point is reached for the first time, not the {count}th: give 1")
        self._crash = point, self.reached[point] + count, then or end_process

    def spare(self) -> None:
        """Crash at no point."""
        self._crash = "", 0, end_process

    def end(self) -> None:
        """Answer no call any more, as the process is gone; what was written stays."""
        with self._guard:
            self.off = True
            locks, self._locks = self._locks, []
        for lock in locks:
            lock.release()

    def cut_power(self) -> None:
        """Lose what a disk loses without power, and answer no call any more."""
        with self._guard:
            if not self.off:
                self._lose()
            self.end()

    def _lose(self) -> None:
        """Leave of the unsynced writes what reached the disk, and flip bits."""
        for path in sorted(self._files):
            writes = self._files[path].unsynced
            if not (writes or self.flip):
                continue
            try:
                file = self._disk.open(path)
            except FileNotFoundError:
                continue
            try:
                data = bytearray(file.size())
                file.read(memoryview(data), 0)
                for at, old, _new in reversed(writes):
                    data[at : at + len(old)] = old
                reach(data, [(at, new) for at, _old, new in writes], self._rng, tear=self.tear)
                if self._rng.random() < self.flip:
                    flip_bit(data, self._rng)
                file.write([data], 0)
                file.sync()
            finally:
                file.close()

    # ------------------------------------------------------------ for its files

    def check(self) -> None:
        """Raise the error of a machine that is gone."""
        if self.off:
            raise OSError(errno.EIO, "the machine is off")

    def arrive(self, point: str) -> None:
        """Count a point, and crash if that is due."""
        if not point:
            return
        with self._guard:
            self.reached[point] += 1
            due, count, then = self._crash
            if point == due and self.reached[point] == count and not self.off:
                then()
                self.cut_power()
                self.check()

    def torn(self) -> bool:
        """Count a row that is about to be written; return whether its writing is cut in two."""
        with self._guard:
            point, count, _then = self._crash
            if point == "journal.torn" and self.reached[point] + 1 == count:
                return True
            self.reached["journal.torn"] += 1
            return False

    def grow(self, record: FileRecord, size: int) -> None:
        """Take the room that a file needs.

        Raises
        ------
        OSError
            When there is not enough.
        """
        with self._guard:
            if size <= record.size:
                return
            if self.full_at is not None and self._used() + size - record.size > self.full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            record.size = size

    def _used(self) -> int:
        return sum(record.size for record in self._files.values())

    def begin_sync(self) -> None:
        """Wait as a slow disk does, and fail if that is due."""
        if self.slow:
            self._pause(self.slow)
        self.check()
        with self._guard:
            self._syncs += 1
            if self.sync_fails_at is not None and self._syncs >= self.sync_fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    # ------------------------------------------------------------ a disk

    def make_folder(self, folder: Path) -> None:
        """Make a folder."""
        self.check()
        self._disk.make_folder(folder)

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, sorted."""
        self.check()
        return self._disk.names(folder)

    def create(self, path: Path, nbytes: int = 0) -> DiskFile:
        """Make a new file, with room for a number of bytes."""
        self.check()
        record = FileRecord(path)
        self.grow(record, nbytes)
        file = self._disk.create(path, nbytes)
        self._files[path] = record
        return FaultyFile(self, record, file)

    def open(self, path: Path) -> DiskFile:
        """Open a file to read and write."""
        self.check()
        file = self._disk.open(path)
        return FaultyFile(self, self._files.setdefault(path, FileRecord(path)), file)

    def rename(self, path: Path, to: Path, *, synced: bool = True) -> None:
        """Rename a file, replacing another."""
        self.check()
        self._disk.rename(path, to, synced=synced)
        with self._guard:
            self._files.pop(to, None)
            if path in self._files:
                record = self._files[to] = self._files.pop(path)
                record.path = to
        self.arrive(_point("named", to))

    def sync_names(self, folder: Path) -> None:
        """Return when the names of a folder's files would survive a loss of power."""
        self.check()
        self._disk.sync_names(folder)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        self.check()
        self._disk.remove(path)
        self._files.pop(path, None)
        self.arrive(_point("removed", path))

    def lock(self, path: Path, text: str) -> DiskLock | str:
        """Lock a file; return the holder's text if it is locked."""
        self.check()
        lock = self._disk.lock(path, text)
        if not isinstance(lock, str):
            self._locks.append(lock)
        return lock

    def free(self, folder: Path) -> int:
        """Return the bytes that may still be written there."""
        self.check()
        free = self._disk.free(folder)
        if self.full_at is None:
            return free
        return max(0, min(free, self.full_at - self._used()))

    def thread(self, run: Callable[[], None], name: str) -> DiskThread:
        """Begin a thread of the disk behind this one."""
        return self._disk.thread(run, name)

    def queue(self) -> DiskQueue:
        """Return a queue of the disk behind this one."""
        return self._disk.queue()


class FileRecord:
    """A file, as far as a `FaultyDisk` knows it.

    Attributes
    ----------
    path
        Its name by now.
    size
        Its bytes, as far as they were written here.
    unsynced
        Its writes since it was synced: the offset, the bytes there before, and those written.
    """

    __slots__ = ("path", "size", "unsynced")

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.unsynced: list[tuple[int, bytes, bytes]] = []


class FaultyFile:
    """A file of a `FaultyDisk`."""

    def __init__(self, disk: FaultyDisk, record: FileRecord, file: DiskFile) -> None:
        self._disk, self._record, self._file = disk, record, file

    def write(self, buffers: Buffers, at: int) -> None:
        """Write all buffers of bytes, one after the other, from an offset on."""
        disk, record = self._disk, self._record
        disk.check()
        data = b"".join(buffers)
        disk.grow(record, at + len(data))
        point = _point("written", record.path)
        if point == "journal.written" and disk.torn():
            data, point = data[: len(data) // 2], "journal.torn"
        if disk.lose_unsynced:
            old = bytearray(len(data))
            self._file.read(memoryview(old), at)
            record.unsynced.append((at, bytes(old), data))
        self._file.write([data], at)
        disk.arrive(point)

    def sync(self) -> None:
        """Return when all that was written would survive a loss of power."""
        disk, record = self._disk, self._record
        disk.check()
        count = len(record.unsynced)  # another thread may write meanwhile
        disk.begin_sync()
        self._file.sync()
        del record.unsynced[:count]
        disk.arrive(_point("synced", record.path))

    def read(self, into: memoryview, at: int) -> int:
        """Read from an offset; return the number of bytes."""
        self._disk.check()
        return self._file.read(into, at)

    def written(self, at: int) -> tuple[int, int]:
        """Return the next range of bytes, from ``at`` on, that may not be zeros."""
        self._disk.check()
        return self._file.written(at)

    def size(self) -> int:
        """Return its length in bytes."""
        self._disk.check()
        return self._file.size()

    def fill(self) -> None:
        """Do nothing: it has its zeros."""

    def bypass(self) -> bool:
        """Return False: there is no cache that matters."""
        return False

    def map(self) -> None:
        """Do nothing: each write is one that may fail."""

    def descriptor(self) -> int:
        """Return -1: each write is one that may fail."""
        return -1

    def lend(self, at: int, nbytes: int) -> None:
        """Return None: what is stored into memory cannot fail."""

    def close(self) -> None:
        """Close it; may be called twice."""
        self._file.close()


def _point(what: str, path: Path) -> str:
    """Return the point that is reached when something was done to a file; empty: none."""
    kind, part = path.name.partition("-")[0].removesuffix(".part"), path.suffix == ".part"
    if what == "named" and (kind == "spare" or path.name == "snapshot.part"):
        return "covered.removed"  # its file is used again
    if what == "removed":
        return "covered.removed" if kind in ("journal", "snapshot", "spare") and not part else ""
    if kind == "journal":
        return "" if part else "segment.named" if what == "named" else f"journal.{what}"
    found = f"{kind}.{what}"
    return found if found in _POINTS else ""


def end_process() -> None:
    """End this process as a loss of power or the out-of-memory killer does: by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
