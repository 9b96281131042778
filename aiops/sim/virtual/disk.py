"""A disk in memory, whose power can be cut between any two operations.

It keeps what was done to it, in order, so that one run gives the disk after each of its operations,
as the end of a process leaves it, or as a loss of power does: without a sync nothing is sure. What
survives is chosen by a seed, sector by sector, and name by name.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

from aiops.common.frozen import value
from aiops.errors import UsageError
from aiops.net.disk import DiskFile, DiskLock, DiskQueue, DiskThread
from aiops.net.power_loss import flip_bit, reach
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.threads import InlineThread, VirtualQueue, VirtualThread

Action: TypeAlias = Literal["create", "write", "sync", "rename", "remove", "sync_folder"]


@value
class DiskOperation:
    """One change of a disk.

    Attributes
    ----------
    action
        Its kind.
    file
        The number of the file, 0 of a folder.
    path, to
        The file's name; the new name of a renamed one.
    at
        Where bytes were written; the length of a new file.
    data
        Those bytes.
    """

    action: Action
    file: int
    path: Path
    at: int = 0
    data: bytes = b""
    to: Path = Path()


@dataclass(slots=True)
class _Content:
    """The bytes of a file: those after ``data`` are zeros."""

    length: int = 0
    data: bytearray = field(default_factory=bytearray)
    synced_length: int = 0
    unsynced: list[tuple[int, bytes, bytes]] = field(default_factory=list)  # at, old, new

    def write(self, at: int, new: bytes) -> None:
        """Write bytes from an offset on."""
        if at > len(self.data):
            self.data.extend(bytes(at - len(self.data)))
        old = bytes(self.data[at : at + len(new)]).ljust(len(new), b"\0")
        self.data[at : at + len(new)] = new
        self.length = max(self.length, len(self.data))
        self.unsynced.append((at, old, new))

    def sync(self) -> None:
        """Take what is there as synced."""
        self.synced_length = self.length
        self.unsynced.clear()

    def cut(self, rng: Random, *, tear: bool) -> None:
        """Keep what is synced, and of the rest what ``rng`` chooses."""
        if not self.unsynced and self.length == self.synced_length:
            return
        for at, old, _new in reversed(self.unsynced):
            self.data[at : at + len(old)] = old
        self.length = rng.choice((self.synced_length, self.length))
        del self.data[self.length :]
        end = max((at + len(new) for at, _old, new in self.unsynced), default=0)
        self.data.extend(bytes(max(0, min(end, self.length) - len(self.data))))
        reach(self.data, [(at, new) for at, _old, new in self.unsynced], rng, tear=tear)
        self.sync()


class _Files:
    """Files by name, as operations leave them; those without a name can be forgotten."""

    def __init__(self) -> None:
        self.names: dict[Path, int] = {}
        self.contents: dict[int, _Content] = {}
        self._kept: dict[Path, int] = {}  # names that survive a loss of power
        self._unsynced: list[DiskOperation] = []  # of names

    def apply(self, operation: DiskOperation) -> None:
        """Change them."""
        match operation.action:
            case "create":
                self.contents[operation.file] = _Content(operation.at)
            case "write" if operation.file in self.contents:
                self.contents[operation.file].write(operation.at, operation.data)
            case "sync" if operation.file in self.contents:
                self.contents[operation.file].sync()
            case "sync_folder":
                self._kept = dict(self.names)
                self._unsynced.clear()
                left = set(self.names.values())
                self.contents = {file: c for file, c in self.contents.items() if file in left}
        if operation.action in ("create", "rename", "remove"):
            _rename(self.names, operation)
            self._unsynced.append(operation)

    def keep(self) -> None:
        """Take all as synced."""
        for content in self.contents.values():
            content.sync()
        self._kept = dict(self.names)
        self._unsynced.clear()

    def cut(self, rng: Random, *, tear: bool) -> None:
        """Lose what ``rng`` chooses of what is not synced."""
        names, count = dict(self._kept), len(self._unsynced)
        if rng.random() < 0.5:  # a file system with a journal of its own keeps their order
            chosen = self._unsynced[: rng.randrange(count + 1)]
        else:
            chosen = [each for each in self._unsynced if rng.random() < 0.5]
        for operation in chosen:
            _rename(names, operation)
        self.names = names
        self.contents = {file: self.contents[file] for file in sorted(set(names.values()))}
        for content in self.contents.values():
            content.cut(rng, tear=tear)


def _rename(names: dict[Path, int], operation: DiskOperation) -> None:
    if operation.action == "create":
        names[operation.path] = operation.file
        return
    if names.get(operation.path) == operation.file:
        del names[operation.path]
    if operation.action == "rename":
        names[operation.to] = operation.file


class VirtualDisk:
    """A disk in memory.

    Parameters
    ----------
    loop
        The virtual event loop of its threads, whose syncs and renames take time; None: it has no
        threads, and takes no time.
    seconds
        The virtual seconds of a sync, if a thread waits for it; the event loop does not. The
        attribute may be set while threads run.
    history
        Whether operations are kept, so that `after` and `after_power_cut` know earlier moments.
    inline
        Whether the loop calls the functions of its threads (`InlineThread`), each at one moment.

    Attributes
    ----------
    operations
        What was done, in order; empty without a history.
    full
        Whether there is no room for new or longer files.
    segment
        A segment of a journal is small, as each start reads all of it.
    """

    segment = 64 << 10

    def __init__(
        self,
        loop: VirtualLoop | None = None,
        seconds: float = 0.0,
        *,
        history: bool = False,
        inline: bool = False,
    ) -> None:
        self._loop, self.seconds, self._history, self._inline = loop, seconds, history, inline
        self.operations: list[DiskOperation] = []
        self.full = False
        self._files = _Files()
        self._base = _Files()  # before the first operation
        self._numbers = itertools.count(1)
        self._locks: dict[Path, str] = {}

    # ------------------------------------------------------------ what is left of it

    def after(self, count: int | None = None) -> VirtualDisk:
        """Return the disk that the end of all processes left after some operations.

        Parameters
        ----------
        count
            The number of operations of a disk with a history; None: all of them.
        """
        return self._restarted(self._state(count))

    def after_power_cut(
        self, rng: Random, count: int | None = None, *, tear: bool = True, flips: int = 0
    ) -> VirtualDisk:
        """Return the disk that a loss of power left after some operations.

        Parameters
        ----------
        rng
            Chooses what survives of what was not synced.
        count
            As of `after`.
        tear
            Whether of a sector of 512 bytes a part may be written.
        flips
            The number of files in which one bit is flipped, synced or not.
        """
        files = self._state(count)
        files.cut(rng, tear=tear)
        for _ in range(flips if files.contents else 0):
            flip_bit(rng.choice(list(files.contents.values())).data, rng)
        files.keep()
        return self._restarted(files)

    def _restarted(self, files: _Files) -> VirtualDisk:
        disk = VirtualDisk(self._loop, self.seconds, history=self._history, inline=self._inline)
        disk.full = self.full
        disk._base, disk._files = _copy(files), files
        disk._numbers = itertools.count(max(files.contents, default=0) + 1)
        return disk

    def _state(self, count: int | None) -> _Files:
        if count is None:
            return _copy(self._files)
        files = _copy(self._base)
        for operation in self.operations[:count]:
            files.apply(operation)
        return files

    # ------------------------------------------------------------ for its files

    def do(self, operation: DiskOperation) -> None:
        """Carry out an operation.

        Raises
        ------
        OSError
            When it needs room, and the disk is full.
        """
        if self.full and operation.action in ("create", "write"):
            content = self._files.contents.get(operation.file)
            if content is None or operation.at + len(operation.data) > content.length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._files.apply(operation)
        if self._history:
            self.operations.append(operation)

    def sync(self, operation: DiskOperation) -> None:
        """Carry out an operation for which a thread waits."""
        thread = self._loop.threads.get(threading.current_thread()) if self._loop else None
        if thread is not None and self.seconds:
            thread.pause(self.seconds)
        self.do(operation)

    def content(self, file: int) -> tuple[bytearray, int]:
        """Return the bytes of a file, and its length: those that are missing are zeros."""
        content = self._files.contents.get(file)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        return content.data, content.length

    def unlock(self, path: Path) -> None:
        """Release the lock of a file."""
        self._locks.pop(path, None)

    # ------------------------------------------------------------ a disk

    def make_folder(self, folder: Path) -> None:
        """Do nothing: every folder is there."""

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, sorted."""
        return sorted(path.name for path in self._files.names if path.parent == folder)

    def create(self, path: Path, nbytes: int = 0) -> DiskFile:
        """Make a new file, with room for a number of bytes, which read as zeros."""
        if path in self._files.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = next(self._numbers)
        self.do(DiskOperation("create", file, path, nbytes))
        return VirtualFile(self, file, path)

    def open(self, path: Path) -> DiskFile:
        """Open a file to read and write."""
        return VirtualFile(self, self._number(path), path)

    def rename(self, path: Path, to: Path, *, synced: bool = True) -> None:
        """Rename a file, replacing another."""
        self.do(DiskOperation("rename", self._number(path), path, to=to))
        if synced:
            self.sync_names(to.parent)

    def sync_names(self, folder: Path) -> None:
        """Return when the names of a folder's files would survive a loss of power."""
        self.sync(DiskOperation("sync_folder", 0, folder))

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        if path in self._files.names:
            self.do(DiskOperation("remove", self._files.names[path], path))

    def lock(self, path: Path, text: str) -> DiskLock | str:
        """Lock a file; return the holder's text if it is locked."""
        if path in self._locks:
            return self._locks[path]
        self._locks[path] = text
        return VirtualLock(self, path)

    def free(self, folder: Path) -> int:
        """Return the bytes that may still be written: none if it is full, or 2⁴⁰."""
        return 0 if self.full else 1 << 40

    def thread(self, run: Callable[[], None], name: str) -> DiskThread:
        """Begin a thread in virtual time."""
        if self._inline:
            return InlineThread(self._running(), run, lambda: self.seconds)
        return VirtualThread(self._running(), run, name)

    def queue(self) -> DiskQueue:
        """Return a queue that such a thread may wait for."""
        return VirtualQueue(self._running())

    def _running(self) -> VirtualLoop:
        if self._loop is None:
            raise UsageError("a simulated disk without an event loop has no threads")
        return self._loop

    def _number(self, path: Path) -> int:
        try:
            return self._files.names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None


class VirtualFile:
    """A file of a `VirtualDisk`."""

    def __init__(self, disk: VirtualDisk, number: int, path: Path) -> None:
        self._disk, self._number, self._path = disk, number, path

    def write(self, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> None:
        """Write all buffers of bytes, one after the other, from an offset on."""
        data = b"".join(buffers)
        self._disk.do(DiskOperation("write", self._number, self._path, at, data))

    def sync(self) -> None:
        """Return when all that was written would survive a loss of power."""
        self._disk.sync(DiskOperation("sync", self._number, self._path))

    def read(self, into: memoryview, at: int) -> int:
        """Read from an offset; return the number of bytes."""
        data, length = self._disk.content(self._number)
        count = max(0, min(len(into), length - at))
        there = data[at : at + count]
        into[: len(there)] = there
        into[len(there) : count] = bytes(count - len(there))
        return count

    def written(self, at: int) -> tuple[int, int]:
        """Return the next range of bytes, from ``at`` on, that may not be zeros."""
        data, length = self._disk.content(self._number)
        return (at, len(data)) if at < len(data) else (length, length)

    def size(self) -> int:
        """Return its length in bytes."""
        return self._disk.content(self._number)[1]

    def fill(self) -> None:
        """Do nothing: it has its zeros."""

    def bypass(self) -> bool:
        """Return False: there is no cache that matters."""
        return False

    def map(self) -> None:
        """Do nothing: there is no system whose calls cost anything."""

    def descriptor(self) -> int:
        """Return -1: each write is to be seen."""
        return -1

    def lend(self, at: int, nbytes: int) -> None:
        """Return None: each write is to be seen."""

    def close(self) -> None:
        """Do nothing."""


class VirtualLock:
    """A lock of a `VirtualDisk`."""

    def __init__(self, disk: VirtualDisk, path: Path) -> None:
        self._disk, self._path = disk, path

    def release(self) -> None:
        """Release it."""
        self._disk.unlock(self._path)


def _copy(files: _Files) -> _Files:
    """Return files with the same contents, all of which count as before."""
    made = _Files()
    made.names, made._kept = dict(files.names), dict(files._kept)
    made._unsynced = list(files._unsynced)
    for file, each in files.contents.items():
        made.contents[file] = _Content(
            each.length, bytearray(each.data), each.synced_length, list(each.unsynced)
        )
    return made
