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


_KEPT = 2
"""Memories that are kept: one is read into while the other is used."""


class OwnMemory:
    """The memory of large slices, each of which has its own."""

    def exchange(self, data: memoryview, other: Bytes) -> Bytes | None:
        """Give the memory of a whole slice away, for other memory of as many bytes.

        Returns
        -------
        Bytes or None
            None: it is a part of a slice, or the lengths differ. Nothing was done.
        """
        found = np.frombuffer(data, np.uint8)
        whole = len(data) == len(other) and len(data) >= _PIECE  # shorter ones share theirs
        return found if whole and not found.ctypes.data % _ALIGNED else None

    def free(self, data: memoryview) -> None:
        """Take the memory of a whole slice back, which is not used any more."""


class Room(OwnMemory):
    """Reads slices into memory that was given back: new memory takes longer than the reading.

    One thread may read while another uses what was read before.
    """

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def of(self, nbytes: int) -> Bytes:
        """Return memory that is not in use."""
        try:
            while True:
                data = self._free.pop()
                if nbytes <= len(data):
                    return data[:nbytes]
        except IndexError:
            return aligned(nbytes)

    def exchange(self, data: memoryview, other: Bytes) -> Bytes | None:
        """Give the memory of a whole slice away, and have the other memory instead."""
        found = super().exchange(data, other)
        if found is not None:
            self.free(other.data)
        return found

    def free(self, data: memoryview) -> None:
        """Take the memory of a whole slice back, to be read into again."""
        if len(data) >= _PIECE and len(self._free) < _KEPT:
            self._free.append(np.frombuffer(data, np.uint8))


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
