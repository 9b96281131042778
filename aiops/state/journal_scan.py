"""The rows of a journal, over all of its segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from aiops.errors import DamagedState
from aiops.state.blocks import Buffer
from aiops.state.directory import StateListing, foreign, journal_name
from aiops.state.file_bytes import FileBytes
from aiops.state.frames import JournalFrame, SegmentScan, never_reached


class JournalScan:
    """Reads rows, in order, up to the journal's end.

    Parameters
    ----------
    read
        Returns the bytes of a file, given its name.
    listing
        The files.
    base
        The row of the snapshot that is begun with; 0: there is none.
    segments
        The first rows of the segments to read: `StateListing.segments_after`.
    origin
        The run whose journal it is, the number of the shard and that of all shards.
    passed
        Rows up to this one have no payload here: theirs are not looked at.

    Attributes
    ----------
    torn
        After the last row: the name of the file in which a row is not whole, and its bytes as far
        as that is known; None: there is none.
    void
        After the last row: the first rows of the segments that are no part of the journal, as rows
        before them are missing.
    lost
        The number of rows that are missing before them, and in them.
    cut
        True if `end_before` has ended it.

    Raises
    ------
    DamagedState, UsageError
        As `SegmentScan`.
    """

    def __init__(
        self,
        read: Callable[[str], Buffer | FileBytes],
        listing: StateListing,
        base: int,
        segments: Sequence[int],
        origin: tuple[str, int, int],
        passed: int = 0,
    ) -> None:
        self._read, self._listing, self._base, self._origin = read, listing, base, origin
        self._passed = passed
        self._segments = [*segments]
        self.torn: tuple[str, int] | None = None
        self.void: tuple[int, ...] = ()
        self.lost, self.cut = 0, False

    def __iter__(self) -> Iterator[JournalFrame]:
        for at, first in enumerate(self._segments):
            name, rest = journal_name(first), self._segments[at + 1 :]
            data = self._read(name)
            if (at or self._base) and never_reached(data, first):
                later = called_synced(self._read, rest, max(first, self._passed + 1))
                if later is not None:
                    raise DamagedState(
                        f"{name} is damaged: its head is missing, and was there when row"
                        f" {later:,} was written",
                        file=name,
                    )
                self._end(first, [first, *rest])
                return
            scan = SegmentScan(
                *(data, name),
                first=first,
                until=self._listing.until(first),
                called_synced=partial(called_synced, self._read, rest),
                passed=self._passed,
            )
            why = foreign(name, scan.head.origin, self._origin)
            if why:
                raise DamagedState(f"{why}: put back the file that was there", file=name)
            yield from scan
            if scan.torn:
                self.torn = name, scan.torn
            if scan.short:
                self._end(max(scan.row, self._base + 1), rest)
                return

    def end_before(self, row: int) -> None:
        """Have the journal end before a row that is damaged, or not wanted.

        The segments behind are void, and the rows behind it in its own.
        """
        self.cut = True
        self._end(row, [first for first in self._segments if first >= row])
        if not self.void:
            with suppress(DamagedState):  # then it is not known how many
                own = max(first for first in self._segments if first < row)
                self.lost = self._rows_from(row, own)

    def _end(self, row: int, void: list[int]) -> None:
        """Note that the journal ends before a row, and the segments behind it."""
        self.void = tuple(void)
        self.lost = self._rows_from(row, void[-1]) if void else 0

    def _rows_from(self, row: int, first: int) -> int:
        """Return how many rows there are from one on, given the last segment that has some."""
        newest, data = max(first, row) - 1, self._read(journal_name(first))
        if not never_reached(data, first):
            scan = SegmentScan(data, journal_name(first), payloads=False)
            newest = max(newest, *(frame.number for frame in scan), 0)
        return newest - row + 1


def called_synced(
    read: Callable[[str], Buffer | FileBytes], segments: Sequence[int], row: int
) -> int | None:
    """Return the number of a row in some segments that calls an earlier row synced, or None."""
    for first in reversed(segments):
        data = read(journal_name(first))
        if never_reached(data, first):
            continue
        later = SegmentScan(data, journal_name(first), first=first).calls_synced(row)
        if later is not None:
            return later
    return None
