"""Write long runs of bytes to a disk past the system's cache (O_DIRECT).

A file that is not read again soon needs no place in the cache. To write a GiB through it takes
three times as much of a processor, half as much memory again in pages, and lasts twice as long.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from aiops.model.layout import Bytes

_PAGE = 4096
"""Offsets, lengths and addresses of what is written are its multiples: disks ask for less."""

_ROOM = 4 << 20
"""Bytes that are copied at a time, if their memory does not begin at a page."""


class DirectFile:
    """A file that is open once more, for writes that are not cached.

    Parameters
    ----------
    descriptor
        Of the file.

    Raises
    ------
    OSError
        When the file system has no such writes.
    """

    def __init__(self, descriptor: int) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            raise OSError(errno.EINVAL, "the system has no writes past its cache")
        # Another description of the file: `descriptor` goes on writing through the cache.
        path = f"/proc/self/fd/{descriptor}"
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
        self._room: Bytes | None = None

    def write(self, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> int:
        """Write what is made of whole pages, from an offset on.

        Returns
        -------
        int
            The number of bytes from the beginning of the buffers that were written. The caller
            writes the rest through the cache.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        begin = at
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8)
            whole = len(data) - len(data) % _PAGE if at % _PAGE == 0 else 0
            done = 0
            while done < whole:
                count = self._write(data[done:whole], at)
                if not count:
                    return at - begin
                at, done = at + count, done + count
            if whole < len(data):
                break
        return at - begin

    def _write(self, data: Bytes, at: int) -> int:
        """Write some of whole pages; return how many bytes, 0 if the file system refuses them."""
        if data.ctypes.data % _PAGE:
            if self._room is None:
                self._room = np.frombuffer(mmap.mmap(-1, _ROOM), np.uint8)
            source, data = data[:_ROOM], self._room[: min(len(data), _ROOM)]
            np.copyto(data, source)
        try:
            count = os.pwrite(self.descriptor, data.data, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0
        return count - count % _PAGE

    def close(self) -> None:
        """Close it; the other descriptor stays open."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
