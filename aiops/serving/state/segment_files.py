"""The files of a journal's segments: the next one is ready before it is needed.

To make a file and give it room takes a disk milliseconds, and bytes written over those of a segment
that is not needed any more take half as long as those of a new file. So covered segments are kept
as spares, and a thread has one open before the last segment is full. A journal that is kept to be
replayed has no spares: its segments stay.

The first segments of a start are short, and each later one is as long as all before: a server that
is started again and again before it has a model leaves one behind each time.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aiops.model.parts import LARGEST
from aiops.net.disk import Disk, DiskFile
from aiops.state import directory
from aiops.state.directory import MAX_SPARES, StateListing
from aiops.state.frames import END, HEAD

_ROWS, _LARGE = 32, 64 << 20
"""A segment has room for this number of rows as long as the longest, up to this number of bytes.

Short segments are soon used again, so that fewer are made; to begin one takes as long as to write a
row of 1 MiB.
"""

_OTHERS = 1 << 16
"""Bytes of room for short rows beside a longest one, at most: a start begins with some."""

_FEWEST, _SPARE_BYTES = 2, 1 << 30
"""Of spares: these many at least, and no more than are so long together."""

_FIRST = 1 << 16
"""Bytes of the first segment of a start, if no row is known to be longer."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Spare(NamedTuple):
    """A file to be overwritten."""

    number: int
    file: DiskFile
    size: int


class SegmentFiles:
    """The files of the segments of one journal; all methods may be called on any thread.

    Parameters
    ----------
    disk, folder
        Where they are.
    keep
        Whether all segments stay.

    Attributes
    ----------
    kept
        Segments of earlier rows stay.
    """

    def __init__(self, disk: Disk, folder: Path, *, keep: bool = False) -> None:
        self._disk, self._folder = disk, folder
        self.kept = LARGEST if keep else 0
        self._nbytes = 0  # of all segments that were begun
        self._guard = threading.Condition(threading.Lock())
        self._longest = 0  # bytes of a row
        self._ready: _Spare | None = None
        self._filling = False  # a file that is ready soon, and has its room on the disk already
        self._reserved: set[int] = set()  # spares that are in use
        self._hidden: list[str] | None = None  # segments that are no part of the journal yet

    def begin(self, first: int, head: bytes, nbytes: int, *, synced: bool) -> tuple[DiskFile, int]:
        """Begin the segment of a row; return its file and the file's length.

        Parameters
        ----------
        first, head
            The number of the row, and the segment's head.
        nbytes
            The row's length.
        synced
            Whether the segment survives a loss of power when this returns.

        Raises
        ------
        OSError
            When there is no room.
        """
        self.expect(nbytes)
        with self._guard:
            spare = self._take(HEAD + nbytes + len(END))
        try:
            spare.file.write([head, END], 0)
            if synced:
                spare.file.sync()
            with self._guard:
                name = directory.journal_name(first)
                if self._hidden is not None:
                    self._hidden.append(name)
                    name += directory.PART
                path = self._path(spare.number)
                self._disk.rename(path, self._folder / name, synced=False)
            if synced:
                self._disk.sync_names(self._folder)
            self._nbytes += spare.size
        except BaseException:
            spare.file.close()
            raise
        finally:
            with self._guard:
                self._reserved.discard(spare.number)
        return spare.file, spare.size

    def expect(self, nbytes: int) -> None:
        """Have the next segments have room for a row of this length, if the disk has it."""
        self._longest = max(self._longest, nbytes)

    def hide(self) -> None:
        """Begin a journal that is none until `reveal`: after a crash before that it is removed."""
        with self._guard:
            for name in self._hidden or ():
                self._disk.remove(self._folder / (name + directory.PART))
            self._hidden = []

    def reveal(self) -> None:
        """Have the hidden segments be the journal, also after a loss of power.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        with self._guard:
            hidden = self._hidden or []
            while hidden:  # the first one first: what has a name has no gap
                name = hidden[0]
                path = self._folder / (name + directory.PART)
                self._disk.rename(path, self._folder / name, synced=False)
                del hidden[0]
            self._hidden = None
        self._disk.sync_names(self._folder)

    def make_ready(self, *, filled: bool) -> None:
        """Have a file ready for the next segment, if there is room for one.

        ``filled``: whether a new one's pages are to be in the system's cache: to write to others
        takes several times as long, and a sync of these takes long.
        """
        with self._guard:
            if self._ready is not None:
                return
            try:
                ready, is_new = self._make(HEAD + self._longest + len(END))
            except OSError:
                return
            self._filling = True
        try:
            if filled and is_new:
                with contextlib.suppress(OSError):  # a row will meet it too
                    ready.file.fill()
        finally:
            with self._guard:
                self._ready, self._filling = ready, False
                self._guard.notify_all()

    def retire(self, segments: Sequence[int]) -> None:
        """Keep the files of segments that are not needed any more, or remove them, in order.

        Raises
        ------
        OSError
            When the disk refuses. Then those that were to be kept are removed: before a file is
            overwritten, it must have its new name on the disk too.
        """
        kept = list[int]()
        try:
            for first in segments:
                if first >= self.kept:
                    self._retire(first, kept)
            if kept:
                self._disk.sync_names(self._folder)
        except OSError:
            for spare in [*kept]:
                try:
                    self._disk.remove(self._path(spare))
                except OSError:  # it stays reserved, so it is not overwritten
                    kept.remove(spare)
            raise
        finally:
            with self._guard:
                self._reserved.difference_update(kept)

    def _retire(self, first: int, kept: list[int]) -> None:
        """Have a segment be a spare, which is noted in ``kept`` and reserved, or remove it."""
        path = self._folder / directory.journal_name(first)
        file = self._disk.open(path)
        most = max(_FEWEST, min(MAX_SPARES, _SPARE_BYTES // max(file.size(), 1)))
        file.close()
        with self._guard:
            taken = {*self._spares(), *self._reserved}
            spare = min({*range(1, most + 1)} - taken, default=0)
            if not spare:
                self._disk.remove(path)
                return
            self._reserved.add(spare)
        kept.append(spare)
        self._disk.rename(path, self._path(spare), synced=False)

    def remove_spares(self) -> bool:
        """Remove the files that are not in use; return whether there were any."""
        with self._guard:
            spares = [number for number in self._spares() if number not in self._reserved]
            for number in spares:
                self._disk.remove(self._path(number))
        return bool(spares)

    def close(self) -> None:
        """Let go of the file that is ready, which stays as a spare."""
        with self._guard:
            if self._ready is not None:
                self._ready.file.close()
                self._reserved.discard(self._ready.number)
                self._ready = None

    def _path(self, spare: int) -> Path:
        return self._folder / directory.spare_name(spare)

    def _spares(self) -> tuple[int, ...]:
        return StateListing(self._disk.names(self._folder)).spares

    def _take(self, least: int) -> _Spare:
        """Return a file with room for at least these bytes; its number is reserved."""
        ready = self._taken(least)
        if ready is not None:
            return ready
        try:
            return self._make(least)[0]
        except OSError:
            if not self._filling:
                raise
            # The room that there was has gone to the file that another thread fills.
            self._guard.wait_for(lambda: not self._filling)
            ready = self._taken(least)
            if ready is None:
                raise
            return ready

    def _taken(self, least: int) -> _Spare | None:
        """Return the file that is ready, if there is one that is long enough."""
        ready, self._ready = self._ready, None
        if ready is not None and ready.size < least:
            self._reserved.discard(ready.number)
            ready.file.close()
            ready = None
        return ready

    def _make(self, least: int) -> tuple[_Spare, bool]:
        """Return a spare file that is long enough, or a new one, and whether it is new.

        Its number is reserved.
        """
        short = min(self._disk.segment, max(_FIRST, self._nbytes))
        one = HEAD + min(_OTHERS, self._longest) + self._longest + len(END)
        many = HEAD + _ROWS * self._longest
        wanted = max(least, short, one, min(many, _LARGE))
        for number in self._spares():
            if number in self._reserved:
                continue
            file = self._disk.open(self._path(number))
            size = file.size()
            if wanted <= size <= 2 * wanted:
                self._reserved.add(number)
                return _Spare(number, file, size), False
            file.close()
            self._disk.remove(self._path(number))
        number = next(number for number in itertools.count(1) if number not in self._reserved)
        while True:
            try:
                file = self._disk.create(self._path(number), wanted)
                break
            except OSError as error:  # a smaller segment may have room
                if error.errno not in NO_ROOM or wanted <= max(least, short // 64):
                    raise
            wanted = max(least, wanted // 8)
        self._reserved.add(number)
        return _Spare(number, file, wanted), True
