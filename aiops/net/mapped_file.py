"""Write short pieces of a file into the system's cache of it, without a call of the system.

A mapping of a file shows the pages that the system keeps of it. What is stored there is as safe as
what ``pwrite`` has written: it outlives the process, and a sync brings it to the disk.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from time import monotonic

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; Python has no name for it

SHORT = 64 << 10
"""Bytes: of more, a call of the system copies as fast, and need not map every page."""

_WINDOW, LENT = 256 << 10, 0.05
"""Bytes that are made writable at a time, and seconds for which they are taken to be so."""

_SAFE = ("ext4", "tmpfs")
"""File systems in which a page that was writable once stays so, whatever becomes of the disk."""


class MappedFile:
    """A file in memory, for writes of a few KiB, one behind the other.

    To store into a page for which the disk has no room, or which it refuses, ends a process
    (SIGBUS), where a call of the system would raise an error. So the pages are made writable by a
    call that does return an error, a little while before they are stored into. If it fails, `write`
    leaves the bytes to the caller's own call of the system, which then tells why.

    When the system has written a page to the disk, in that while, the next store asks the file
    system again. ext4 answers from what it has in memory, and tmpfs is not asked; so their files
    are mapped, and no others (`_SAFE`). Tried, each with a sync between two stores: ext4 and tmpfs
    that became full, and ext4 whose disk was shut down, took the second store; btrfs that became
    full (it writes a page to another place each time), XFS that was shut down, and ext4 with
    ``data=journal`` did not. What is left is that another process cuts the file, or punches a hole
    into it, and fills the disk, within that while.

    Parameters
    ----------
    descriptor
        Of a file that does not get shorter.

    Raises
    ------
    OSError, ValueError
        When the file cannot be mapped, or should not be, or the system has no such call.
    """

    def __init__(self, descriptor: int) -> None:
        if sys.platform != "linux":
            raise OSError("no such call is known here")
        if not _is_safe(*_mount_of(descriptor)):
            raise OSError("its file system may refuse a page that was writable")
        self._map = mmap.mmap(descriptor, 0)
        try:
            self._map.madvise(_POPULATE_WRITE, 0, mmap.PAGESIZE)
        except OSError:
            self._map.close()
            raise
        self._view = memoryview(self._map)
        self._begin = self._end = 0  # of what is writable
        self._until = 0.0

    def write(self, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> bool:
        """Write all buffers, one after the other, from an offset on.

        Returns
        -------
        bool
            False: nothing was written, and the caller has to do it in another way.
        """
        end = at
        for buffer in buffers:
            end += len(buffer)
        writable = self._begin <= at and end <= self._end and monotonic() < self._until
        if not (writable or self._made_writable(at, end)):
            return False
        view = self._view
        for buffer in buffers:
            stop = at + len(buffer)
            view[at:stop] = buffer
            at = stop
        return True

    def lend(self, at: int, nbytes: int) -> tuple[memoryview, int] | None:
        """Return the file's memory, as `aiops.net.disk.DiskFile.lend`."""
        return (self._view, self._end) if self._made_writable(at, at + nbytes) else None

    def _made_writable(self, at: int, end: int) -> bool:
        """Make the pages from an offset on writable; return whether they are, up to ``end``."""
        if end - at > SHORT or end > len(self._view):
            return False
        begin = at - at % mmap.PAGESIZE
        stop = min(begin + _WINDOW, len(self._view))
        try:
            self._map.madvise(_POPULATE_WRITE, begin, stop - begin)
        except OSError:  # there is no room, or the disk fails
            return False
        self._begin, self._end, self._until = begin, stop, monotonic() + LENT
        return True

    def close(self) -> None:
        """Let go of the memory; the file stays open."""
        self._view.release()
        self._map.close()


def _is_safe(kind: str, options: str) -> bool:
    """Return whether the pages of a kind of file system stay writable, with these options."""
    return kind in _SAFE and "data=journal" not in options.split(",")


def _mount_of(descriptor: int) -> tuple[str, str]:
    """Return the kind of the file system of an open file, and its options; empty: unknown."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file if ":" in line)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            number, *fields = line.split()
            if number == facts.get("mnt_id", "").strip():
                kind, _source, options = fields[fields.index("-") + 1 :][:3]
                return kind, options
    return "", ""
