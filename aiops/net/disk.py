"""The file system as a server with a state uses it; tests and the simulator have others.

Every call may take as long as a disk takes. All of them may be made on any thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from aiops.common import forks
from aiops.net.direct_file import DirectFile
from aiops.net.mapped_file import MappedFile

_PRIVATE = 0o600  # a model is its owner's
_MOST_BUFFERS = 512  # of one system call; Linux takes 1,024
_FILLED = 1 << 20  # bytes of zeros that are written at a time


class DiskFile(Protocol):
    """An open file.

    All calls raise `OSError` when the disk refuses. After a failed `write` or `sync` the file's
    content is unknown from there on: the system may have dropped what it could not write, and a
    second `sync` would succeed all the same.
    """

    def write(self, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> None:
        """Write all buffers of bytes, one after the other, from an offset on."""

    def sync(self) -> None:
        """Return when all that was written would survive a loss of power."""

    def read(self, into: memoryview, at: int) -> int:
        """Read from an offset; return the number of bytes, less than asked for at the end only."""

    def written(self, at: int) -> tuple[int, int]:
        """Return the next range of bytes, from ``at`` on, that may not be zeros.

        Bytes before it were never written; so were those after it, as far as the system knows.
        """

    def size(self) -> int:
        """Return its length in bytes."""

    def fill(self) -> None:
        """Have the zeros of a new file in the system's cache, before they are written over."""

    def bypass(self) -> bool:
        """Have long writes go past the system's cache from here on; return whether it can do that.

        They are to begin at multiples of 4096. What was written is safe after a `sync`, as ever.
        """

    def map(self) -> None:
        """Have short writes cost less from here on, where the system can do that.

        They are as safe as others. After a sync the next ones cost more, so it is for files that
        are rarely synced. The file must not get shorter.
        """

    def descriptor(self) -> int:
        """Return the descriptor by which compiled code may write it, too; -1: `write` alone may."""

    def lend(self, at: int, nbytes: int) -> tuple[memoryview, int] | None:
        """Return the file's memory, to be stored into instead of `write`, which then costs less.

        Parameters
        ----------
        at, nbytes
            The bytes that are needed.

        Returns
        -------
        tuple or None
            The memory of the whole file, and the offset up to which it may be stored into, from
            ``at`` on and for `aiops.net.mapped_file.LENT` seconds: to store elsewhere, or later,
            may end the process. None: there is `write` alone (`map` was not called, or the disk
            has no room).
        """

    def close(self) -> None:
        """Close it; may be called twice."""


class DiskLock(Protocol):
    """A lock that this process holds on a folder."""

    def release(self) -> None:
        """Release it."""


class DiskThread(Protocol):
    """A thread for calls that take long."""

    def is_alive(self) -> bool:
        """Return whether it has not ended."""

    def join(self) -> None:
        """Return when it has ended."""


class DiskQueue(Protocol):
    """Work for such a thread, in order."""

    def put(self, item: Any) -> None:
        """Add an item."""

    def get(self) -> Any:
        """Return the first item, as soon as there is one."""

    def get_nowait(self) -> Any:
        """Return the first item; raise `queue.Empty` if there is none."""


class Disk(Protocol):
    """A file system.

    Attributes
    ----------
    segment
        The bytes for which room is made at a time, in a file that grows.
    """

    segment: int

    def make_folder(self, folder: Path) -> None:
        """Make a folder, and those above it, if they are missing; only this user may look in."""

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, sorted."""

    def create(self, path: Path, nbytes: int = 0) -> DiskFile:
        """Make a new file, with room for a number of bytes, which read as zeros."""

    def open(self, path: Path) -> DiskFile:
        """Open a file to read and write."""

    def rename(self, path: Path, to: Path, *, synced: bool = True) -> None:
        """Rename a file, replacing another.

        ``synced``: return when the name would survive a loss of power.
        """

    def sync_names(self, folder: Path) -> None:
        """Return when the names of a folder's files would survive a loss of power."""

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""

    def lock(self, path: Path, text: str) -> DiskLock | str:
        """Lock a file, and write a text into it; return the holder's text if it is locked."""

    def free(self, folder: Path) -> int:
        """Return the bytes that this user may still write there."""

    def thread(self, run: Callable[[], None], name: str) -> DiskThread:
        """Begin a thread for calls that take long; it does not keep the process alive."""

    def queue(self) -> DiskQueue:
        """Return a queue that such a thread may wait for: a simulated one has no other waits."""


class _SystemFile:
    """A `DiskFile` of the operating system."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: MappedFile | None = None
        self._direct: DirectFile | None = None
        forks.note(self)

    def write(self, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> None:
        if self._mapped is not None and self._mapped.write(buffers, at):
            return
        if self._direct is not None and (count := self._direct.write(buffers, at)):
            at, buffers = at + count, _behind(buffers, count)
            if not buffers:
                return
        count = os.pwritev(self._descriptor, buffers[:_MOST_BUFFERS], at)
        if count == sum(map(len, buffers)):  # nearly always
            return
        while True:
            at, buffers = at + count, _behind(buffers, count)
            if not buffers:
                return
            count = os.pwritev(self._descriptor, buffers[:_MOST_BUFFERS], at)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def read(self, into: memoryview, at: int) -> int:
        got = 0
        while got < len(into):
            count = os.preadv(self._descriptor, [into[got:]], at + got)
            if not count:
                break
            got += count
        return got

    def written(self, at: int) -> tuple[int, int]:
        size = self.size()
        try:
            # The system takes what it has read ahead for written.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            begin = os.lseek(self._descriptor, at, os.SEEK_DATA)
            return begin, os.lseek(self._descriptor, begin, os.SEEK_HOLE)
        except AttributeError:  # not on every system
            return at, size
        except OSError as error:  # no data follows; or the file system cannot tell
            return (size, size) if error.errno == errno.ENXIO else (at, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def fill(self) -> None:
        zeros, size = memoryview(bytes(_FILLED)), self.size()
        for at in range(0, size, _FILLED):
            self.write([zeros[: size - at]], at)

    def bypass(self) -> bool:
        if self._direct is None:
            with contextlib.suppress(OSError):
                self._direct = DirectFile(self._descriptor)
        return self._direct is not None

    def map(self) -> None:
        if self._mapped is None:
            with contextlib.suppress(OSError, ValueError):
                self._mapped = MappedFile(self._descriptor)

    def descriptor(self) -> int:
        return self._descriptor

    def lend(self, at: int, nbytes: int) -> tuple[memoryview, int] | None:
        return None if self._mapped is None else self._mapped.lend(at, nbytes)

    def _unmap(self) -> None:
        if self._mapped is not None:
            mapped, self._mapped = self._mapped, None
            mapped.close()

    def close(self) -> None:
        self._unmap()
        if self._direct is not None:
            self._direct.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def forked(self) -> None:
        """Let go of it in a fork: the parent goes on writing."""
        self._unmap()
        if self._direct is not None:
            forks.blank(self._direct.descriptor)
        if self._descriptor >= 0:
            forks.blank(self._descriptor)


def _behind(
    buffers: Sequence[bytes | bytearray | memoryview], count: int
) -> list[bytes | bytearray | memoryview]:
    """Return what is left of some buffers behind their first bytes."""
    left = list(buffers)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if left:
        left[0] = memoryview(left[0])[count:]
    return left


class _FileLock:
    """A lock of the operating system; it ends with the process."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors
        forks.note(self)

    def release(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()

    def forked(self) -> None:
        """Let go of it in a fork, which would hold the lock of a server that has died."""
        for descriptor in self._descriptors:
            forks.blank(descriptor)


def _locked(descriptor: int, *, optional: bool = False) -> bool:
    """Lock an open file; return whether it is locked, or with ``optional`` cannot be."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return optional and not isinstance(error, BlockingIOError)
    return True


class SystemDisk:
    """The `Disk` of the operating system."""

    segment = 16 << 20

    def make_folder(self, folder: Path) -> None:
        """Make a folder, and those above it, if they are missing; only this user may look in."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, sorted."""
        return sorted(os.listdir(folder))

    def create(self, path: Path, nbytes: int = 0) -> DiskFile:
        """Make a new file, with room for a number of bytes, which read as zeros."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        try:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return _SystemFile(descriptor)

    def open(self, path: Path) -> DiskFile:
        """Open a file to read and write."""
        return _SystemFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def rename(self, path: Path, to: Path, *, synced: bool = True) -> None:
        """Rename a file, replacing another."""
        os.rename(path, to)
        if synced:
            self.sync_names(to.parent)

    def sync_names(self, folder: Path) -> None:
        """Return when the names of a folder's files would survive a loss of power."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def lock(self, path: Path, text: str) -> DiskLock | str:
        """Lock a file, and write a text into it; return the holder's text if it is locked.

        Its folder is locked too, where the system can do that: the file may be removed by a person
        who takes it for one that was left behind.
        """
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
        except OSError:
            os.close(folder)
            raise
        if not (_locked(descriptor) and _locked(folder, optional=True)):
            os.close(folder)
            with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
                return file.read(1000).strip() or "another process"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        return _FileLock(descriptor, folder)

    def free(self, folder: Path) -> int:
        """Return the bytes that this user may still write there."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def thread(self, run: Callable[[], None], name: str) -> DiskThread:
        """Begin a thread for calls that take long; it does not keep the process alive."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def queue(self) -> DiskQueue:
        """Return a queue that such a thread may wait for."""
        return queue.SimpleQueue()
