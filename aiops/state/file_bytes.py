"""The bytes of a file, read when they are looked at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aiops.model.arena import aligned
from aiops.model.layout import Bytes
from aiops.state.blocks import Read

_PIECE = 1 << 20
"""Bytes that are read at a time, if less is looked at."""

_ALIGNED = 64  # bytes, as buffers are


class Room:
    """Memory into which the large slices of several files are read, one after the other.

    Each lasts until the next one only, unless it is exchanged. New memory takes longer than the
    reading.
    """

    def __init__(self) -> None:
        self._data = aligned(0)
        self._last = 0  # bytes of the last slice

    def of(self, nbytes: int) -> Bytes:
        """Return its first bytes."""
        if nbytes > len(self._data):
            self._data = aligned(nbytes)
        self._last = nbytes
        return self._data[:nbytes]

    def exchange(self, last: memoryview, other: Bytes) -> Bytes | None:
        """Give the memory of the last slice away, for other memory of as many bytes.

        Returns
        -------
        Bytes or None
            None: it is another slice, or a part of one, or the lengths differ. Nothing was done.
        """
        data = self._data
        same = len(last) == len(other) == len(data) == self._last > 0
        if not same or np.frombuffer(last, np.uint8).ctypes.data != data.ctypes.data:
            return None
        self._data, self._last = other, 0
        return data


class OwnMemory(Room):
    """Stands for the memory of large slices that were read without a `Room`: each has its own."""

    def exchange(self, last: memoryview, other: Bytes) -> Bytes | None:
        """Give the memory of a slice away."""
        data = np.frombuffer(last, np.uint8)
        whole = len(last) == len(other) and len(last) >= _PIECE  # shorter ones share theirs
        return data if whole and not data.ctypes.data % _ALIGNED else None


class FileBytes:
    """Stands for the bytes of a file; slices of it are views of memory of their own.

    A file that is much larger than what is needed of it takes neither the time to be read nor the
    memory: a segment of the journal has room for several of the longest rows.

    Parameters
    ----------
    read, length
        Reads from the file, and how many bytes it has.
    room
        Where slices of a MiB or more are read; default: each into memory of its own.
    written
        Returns the next range of bytes, from an offset on, that may not be zeros: a segment has
        room that was never written. Default: all of them may.
    """

    def __init__(
        self,
        read: Read,
        length: int,
        room: Room | None = None,
        written: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        self._read, self._length, self._room = read, length, room
        self._written = written
        self._begin, self._piece = 0, memoryview(b"")

    def written(self, at: int) -> tuple[int, int]:
        """Return the next range of bytes, from an offset on, that may not be zeros."""
        return (at, self._length) if self._written is None else self._written(at)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> memoryview:
        begin, stop, _step = where.indices(self._length)
        if stop - begin >= _PIECE:
            return self._filled(self._room, begin, stop)
        at = begin - self._begin
        if at < 0 or stop - self._begin > len(self._piece):
            self._piece = self._filled(None, begin, min(begin + _PIECE, self._length))
            self._begin, at = begin, 0
        return self._piece[at : at + stop - begin]

    def _filled(self, room: Room | None, begin: int, stop: int) -> memoryview:
        """Read a range into some memory, or new; bytes that the file does not have are zeros."""
        nbytes = max(stop - begin, 0)
        data = aligned(nbytes) if room is None else room.of(nbytes)
        data[self._read(begin, data.data) :] = 0
        return data.data
