"""The bytes of a file, read when they are looked at."""

from __future__ import annotations

import numpy as np

from aiops.model.layout import Bytes
from aiops.state.blocks import Read

_PIECE = 1 << 20
"""Bytes that are read at a time, if less is looked at."""


class FileBytes:
    """Stands for the bytes of a file; slices of it are views of memory of their own.

    A file that is much larger than what is needed of it takes neither the time to be read nor the
    memory: a segment of the journal has room for several of the longest rows.

    Parameters
    ----------
    read, length
        Reads from the file, and how many bytes it has.
    again
        Whether a slice of a MiB or more lasts until the next such slice only: its memory is used
        again. New memory takes as long as the reading.
    """

    def __init__(self, read: Read, length: int, *, again: bool = False) -> None:
        self._read, self._length, self._again = read, length, again
        self._begin, self._piece = 0, memoryview(b"")
        self._room = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> memoryview:
        begin, stop, _step = where.indices(self._length)
        if stop - begin >= _PIECE:
            if self._again and stop - begin > len(self._room):
                self._room = np.empty(stop - begin, np.uint8)
            return self._filled(self._room if self._again else None, begin, stop)
        at = begin - self._begin
        if at < 0 or stop - self._begin > len(self._piece):
            self._piece = self._filled(None, begin, min(begin + _PIECE, self._length))
            self._begin, at = begin, 0
        return self._piece[at : at + stop - begin]

    def _filled(self, room: Bytes | None, begin: int, stop: int) -> memoryview:
        """Read a range into some memory, or new; bytes that the file does not have are zeros."""
        nbytes = max(stop - begin, 0)
        data = np.empty(nbytes, np.uint8) if room is None else room[:nbytes]
        data[self._read(begin, data.data) :] = 0
        return data.data
