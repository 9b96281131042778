"""Feed standbys from a journal: which rows a standby needs, and what its answers promise.

A standby is fed from the segments of its primary's journal, up to the newest row that is synced
there. A row that is not may be lost with the power: the primary then tells the workers that it is,
and goes on without it, so no standby may have it, or a promotion would bring it back. If a standby
holds rows that the primary does not, or needs some that are gone, it begins again: with row 1 if
the journal has it, else with the newest snapshot.

With ``--acks replicated`` a row is committed when it is synced here and on a standby. If that takes
longer than a deadline, the promise falls to ``durable``, until a standby has all rows again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from aiops.common.frozen import value
from aiops.durable.commit_gate import Acks
from aiops.errors import DamagedState, RemoteProtocolError
from aiops.model.parts import LARGEST
from aiops.state.directory import GenerationStart, StateListing, journal_name
from aiops.state.frames import HEAD, SegmentHead, SegmentScan
from aiops.wire.standby_messages import RowsKept

AHEAD = 64 << 20
"""Bytes that a standby may be sent before it has confirmed them, unless one row is longer."""

BATCH = 256 << 10
"""Bytes that are read from a segment at a time, unless one row is longer."""

_MARKS = 4096
"""Moments of which it is known which row was the newest, to tell by how long a standby is late."""


class JournalReader(Protocol):
    """The journal's files."""

    def listing(self) -> StateListing:
        """Return the files that there are."""

    def read(self, first: int, at: int, into: memoryview) -> int:
        """Read from an offset of the segment that begins with row ``first``.

        Returns the number of bytes, less than asked for at the end only. Raises `OSError` if there
        is no such segment.
        """


class RowsGone(Exception):
    """Rows that a standby needs are not in the journal any more."""


@value
class RowBatch:
    """Rows that follow each other.

    Attributes
    ----------
    first, last
        Their numbers.
    data
        A segment of these rows and nothing else: its head, then the frames.
    """

    first: int
    last: int
    data: memoryview


class RowFeed:
    """Reads rows in order while the journal is being written.

    Parameters
    ----------
    files
        The journal.
    row
        The number of the row before the first that is read.

    Attributes
    ----------
    next
        The number of the next row.
    """

    def __init__(self, files: JournalReader, row: int) -> None:
        self._files, self.next = files, row + 1
        self._segment: SegmentHead | None = None
        self._until: int | None = None  # the first row of the segment after that, once there is one
        self._at = HEAD  # of the next row, in that segment
        self._row = 0  # the row there; less than `next` while rows are skipped
        self._missing = 0  # a row that was not there although a later segment is

    def read(self, last: int = LARGEST) -> RowBatch | None:
        """Return the next rows, up to ``last``; None: the next row is not in the file yet.

        Raises
        ------
        RowsGone
            When the next row is not in the journal any more.
        OSError
            When the disk fails.
        """
        if self.next > last:
            return None
        moved = False
        while True:
            if self._segment is None and not self._open():
                return None
            found = self._scan(min(last, self._end()))
            if found is not None and found.last >= self.next:
                self.next = found.last + 1
                return found
            if found is not None:
                continue  # rows before those that are wanted
            if moved or not self._move():
                return None
            moved = self._segment is not None  # once more, and no more than that

    def _open(self) -> bool:
        """Open the segment of the next row; return False if its head is not written yet."""
        first = self._files.listing().segment_of(self.next)
        if first is None:
            raise RowsGone(f"row {self.next:,} is not in the journal any more")
        head = memoryview(bytearray(HEAD))
        if self._files.read(first, 0, head) < HEAD:
            return False
        try:
            self._segment = SegmentHead.unpack(head, journal_name(first))
        except DamagedState as error:
            raise RowsGone(str(error)) from None
        self._at, self._row, self._until = HEAD, first, None
        return True

    def _end(self) -> int:
        """Return the last row that may be in the segment.

        Behind it there may be whole rows, which were undone: a server that goes back to an earlier
        moment begins another segment there.
        """
        assert self._segment is not None, "a segment is open"
        if self._until is None:
            self._until = self._files.listing().until(self._segment.first)
        return LARGEST if self._until is None else self._until - 1

    def _scan(self, until: int) -> RowBatch | None:
        """Read the whole rows that come next in the segment, none after ``until``."""
        segment, nbytes = self._segment, BATCH
        assert segment is not None, "a segment is open"
        while True:
            data = memoryview(bytearray(HEAD + nbytes))
            data[:HEAD] = replace(segment, first=self._row).pack()
            got = self._files.read(segment.first, self._at, data[HEAD:])
            scan = SegmentScan(data[: HEAD + got], journal_name(segment.first))
            begin, first, last, end = HEAD, 0, 0, HEAD
            try:
                for frame in scan:
                    if frame.number > until:
                        break
                    if frame.number < self.next:
                        begin = frame.end
                    else:
                        first = first or frame.number
                    last, end = frame.number, frame.end
            except DamagedState as error:
                raise RowsGone(str(error)) from None
            if last:
                self._at += end - HEAD
                self._row = last + 1
                if not first:
                    return RowBatch(last, last, data[:0])
                batch = bytearray(data[begin - HEAD : end])
                batch[:HEAD] = replace(segment, first=first).pack()
                return RowBatch(first, last, memoryview(batch))
            if got < nbytes or not scan.torn:
                return None
            nbytes *= 2  # the row is longer

    def _move(self) -> bool:
        """Go on to the next segment, if there is one; return whether it is worth another look."""
        segment = self._segment
        assert segment is not None, "a segment is open"
        listing = self._files.listing()
        if segment.first not in listing.segments:
            raise RowsGone(f"row {self.next:,} is not in the journal any more")
        until = listing.until(segment.first)
        if until is None:
            return False
        if until == self._row:
            self._segment = None
        elif until > self._row and self._missing == self._row:
            raise RowsGone(f"the rows from {self._row:,} to {until - 1:,} are not in the journal")
        self._missing = self._row  # they may have been written since they were looked for
        return True


def agree(starts: Sequence[GenerationStart], newest: int, generation: int, row: int) -> bool:
    """Return whether a standby's rows are this server's, as far as they go.

    Parameters
    ----------
    starts, newest
        The server's generations, and its newest row.
    generation, row
        In which the standby was fed last, and the newest row that it has.
    """
    if not 0 < row <= newest or all(start.generation != generation for start in starts):
        return False
    return all(row <= start.row for start in starts if start.generation > generation)


@dataclass(slots=True)
class StandbyProgress:
    """The progress of one standby.

    Attributes
    ----------
    name
        Its address, for people.
    sent
        The last row that it was sent.
    written, synced, applied
        As in `RowsKept`.
    ahead
        Bytes that it was sent and has not confirmed.
    """

    name: str
    sent: int
    written: int = 0
    synced: int = 0
    applied: int = 0
    ahead: int = 0
    _unconfirmed: deque[tuple[int, int]] = field(default_factory=deque)  # last row, bytes

    def note_sent(self, batch: RowBatch) -> None:
        """Note that rows were sent."""
        self.sent = batch.last
        self.ahead += len(batch.data)
        self._unconfirmed.append((batch.last, len(batch.data)))

    def has_room(self, nbytes: int) -> bool:
        """Return whether it may be sent as many bytes more now."""
        return not self.ahead or self.ahead + nbytes <= AHEAD

    def note_kept(self, message: RowsKept) -> None:
        """Note what it has.

        Raises
        ------
        RemoteProtocolError
            When it cannot have that.
        """
        written, synced, applied = message.written, message.synced, message.applied
        if not (self.written <= written <= self.sent and self.synced <= synced <= written):
            raise RemoteProtocolError(
                f"rows_kept: {written:,} and {synced:,} after {self.written:,} and"
                f" {self.synced:,}, and it was sent {self.sent:,}"
            )
        if applied > written:
            raise RemoteProtocolError(f"rows_kept.applied: {applied:,}, of {written:,} written")
        self.written, self.synced, self.applied = written, synced, applied
        while self._unconfirmed and self._unconfirmed[0][0] <= written:
            self.ahead -= self._unconfirmed.popleft()[1]


@value
class _NewestRow:
    """The newest row at a time, and the bytes of the journal up to it."""

    time: float
    row: int
    nbytes: int


class Replication:
    """The promise of acknowledgements, by what is synced here and on standbys.

    Parameters
    ----------
    wanted
        The promise that is asked for.
    deadline
        Seconds that a row may wait for a standby.
    now
        The time, in seconds.
    row
        The last row of the journal.
    synced
        The last one that is known to be synced.

    Attributes
    ----------
    level
        The promise at present: `wanted`, or ``DURABLE`` while no standby keeps up.
    standbys
        Those that are connected, by the number of their connections.
    newest
        The newest row of the journal.
    here
        The newest row that is synced here.
    """

    def __init__(self, wanted: Acks, deadline: float, now: float, row: int, synced: int) -> None:
        self.wanted, self._deadline = wanted, deadline
        self.level = wanted
        self.standbys: dict[int, StandbyProgress] = {}
        self.newest = row
        self.here = synced
        self._committed = 0
        self._nbytes = 0  # of the journal
        self._since, self._waiting = now, row  # when it was looked for which row
        self._marks: deque[_NewestRow] = deque(maxlen=_MARKS)

    @property
    def synced(self) -> int:
        """The newest row that a standby has synced."""
        return max((standby.synced for standby in self.standbys.values()), default=0)

    def synced_here(self, row: int) -> int:
        """Note that the journal is synced up to a row; return the row that is committed."""
        self.here = max(self.here, row)
        return self._commit()

    def kept(self, number: int, message: RowsKept, now: float) -> int:
        """Note what a standby has; return the row that is committed."""
        self.standbys[number].note_kept(message)
        if self.fallen and self.synced >= self.here:
            self.level = self.wanted
            self._since, self._waiting = now, self.here
        return self._commit()

    def tick(self, now: float, newest: int, nbytes: int = 0) -> str:
        """Note the time and the newest row; return a line for the log, if the promise has fallen.

        `committed` is then another row. ``nbytes``: the bytes of the journal so far.
        """
        self.note(now, newest, nbytes)
        if self.level < Acks.REPLICATED:
            return ""
        if self.synced >= self._waiting and self.standbys:
            self._since, self._waiting = now, newest
        if now - self._since <= self._deadline:
            return ""
        self.fall()
        slow = "no standby keeps up" if self.standbys else "no standby is connected"
        return f"{slow} since {self._deadline:g} s: acknowledgements mean 'durable' from here on"

    def note(self, now: float, newest: int, nbytes: int) -> None:
        """Note the newest row and the bytes of the journal up to it."""
        self.newest, self._nbytes = newest, nbytes
        marks = self._marks
        if marks and nbytes < marks[-1].nbytes:  # of another journal
            marks.clear()
        if not marks or marks[-1].row != newest:
            marks.append(_NewestRow(now, newest, nbytes))

    @property
    def fallen(self) -> bool:
        """True if rows wait for no standby, although they are to."""
        return self.level < self.wanted

    def fall(self) -> bool:
        """Wait for no standby until one has all rows; return whether that is another promise."""
        was, self.level = self.level, min(self.level, Acks.DURABLE)
        return was > self.level

    @property
    def committed(self) -> int:
        """The newest row that is all that acknowledgements promise."""
        return self._commit()

    def _commit(self) -> int:
        row = self.here
        if self.level >= Acks.REPLICATED:
            row = min(row, self.synced)
        self._committed = max(self._committed, row)
        return self._committed

    def seconds_behind(self, row: int, now: float) -> float:
        """Return for how long rows after this one have been in the journal."""
        if row >= self.newest:
            return 0.0
        return next((now - mark.time for mark in self._marks if mark.row > row), 0.0)

    def bytes_behind(self, row: int) -> int:
        """Return the bytes of the rows after this one, or somewhat more; those that are known of.

        The journal's length is known for some rows: of those up to this one the newest counts.
        """
        if row >= self.newest or not self._marks:
            return 0
        at = bisect_right(self._marks, row, key=lambda mark: mark.row)
        return self._nbytes - self._marks[max(at, 1) - 1].nbytes
