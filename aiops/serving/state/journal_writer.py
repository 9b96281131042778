"""Append rows to the segments of a journal, and sync them."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from aiops.common.frozen import value
from aiops.durable.commit_gate import Acks
from aiops.durable.recorder import AppendRow
from aiops.engine.events import Committed, Event, JournalEnded
from aiops.engine.steady import Recorded
from aiops.kernels.checksum import crc32
from aiops.net.disk import Disk, DiskFile, DiskThread
from aiops.net.mapped_file import LENT, SHORT
from aiops.serving.state.segment_files import SegmentFiles
from aiops.state import directory
from aiops.state.frames import END, HEAD, FixedFrames, SegmentHead, frame, frame_bytes
from aiops.state.row_kinds import STEADY_ROW, STRUCTS, RowKind

_SETTLED = 30.0
"""Seconds after which the system itself has written most of a file, so that a sync costs little."""

_STEADY = RowKind.STEADY

_BATCH = 1 << 18
"""Bytes of rows after which their writing is told: answers wait for it."""


class _Old(NamedTuple):
    """A segment that is not written any more, and not known to be synced."""

    file: DiskFile
    path: Path
    last: int  # its last row
    begun: float


class _Unsynced(NamedTuple):
    """A row that was written at once, and is to be synced."""

    file: DiskFile
    number: int
    time: float
    nbytes: int = 0


@value
class _SyncAsked:
    """All rows that are written are to be synced; ``done`` is called with the last of them."""

    time: float
    done: Callable[[int], object]


class JournalWriter:
    """Appends rows to the segments of a journal.

    A row that does not say `AppendRow.later` is in the file when `append` returns. The others are
    written by a thread, in order, which posts up to which row it is: with ``DURABLE`` once they are
    synced, all that was written meanwhile at once. With less, an answer promises that the row
    survives the process, and the system may take its time. Then a segment is synced on another
    thread when it is 30 seconds old, or more, when a later one has begun: so that damage can be
    told from a loss of power, and not in the way of any row; and all are when `sync` asks for it.
    After an error nothing more is written: what a file holds after a failed call is unknown.

    No row may be appended at once while the thread has any: then it alone uses the file.

    Parameters
    ----------
    disk, folder
        Where the segments are.
    run, generation
        For their heads.
    first
        The number of the first row.
    acks, salt, post
        As of `StateFiles`.
    files
        The files of its segments.
    shard
        The number of the shard whose journal it is, and of all shards.
    synced
        The newest row that would survive a loss of power.
    earlier
        The first and last rows of segments that an earlier server wrote, and that are not known to
        be synced.

    Raises
    ------
    OSError
        When the first segment cannot be made.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = (
        *("__dict__", "__weakref__", "_at", "_descriptor", "_frames", "_half", "_lent_to"),
        *("_lent_until", "_memory", "_room", "_salt", "_size", "_synced", "_waiting", "_written"),
        *("nbytes", "why"),
    )

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        run: str,
        generation: int,
        first: int,
        acks: Acks,
        salt: Callable[[], int],
        post: Callable[[Event], object],
        files: SegmentFiles,
        shard: tuple[int, int] = (0, 1),
        *,
        synced: int,
        earlier: Iterable[tuple[int, int]] = (),
    ) -> None:
        self._disk, self._folder, self._run, self._generation = disk, folder, run, generation
        self._new_salt, self._post, self._files, self._shard = salt, post, files, shard
        self._durable = acks >= Acks.DURABLE
        self._size = self._at = self._half = 0
        self.nbytes = 0  # of all rows so far
        self._synced = synced
        self._written = first - 1
        self.why, self._closed = "", False
        self._told = False  # that it has ended, to the caller of `append`
        paths = [(folder / directory.journal_name(first), last) for first, last in earlier]
        self._old = deque(_Old(disk.open(path), path, last, -inf) for path, last in paths)
        self._begun = 0.0
        self._frames = FixedFrames(_STEADY, STEADY_ROW, 0)
        self._file = self._segment(first, 0, 0.0, synced=True)
        self._memory = memoryview(b"")  # of the segment, in place of writes
        self._room = bytearray()  # for all of a frame but its payload, which compiled code writes
        self._lent_to, self._lent_until = 0, 0.0  # the offset and the time up to which it is
        self._rows = disk.queue()  # that are to be written later; None: the end
        self._writer: DiskThread | None = None
        self._over = False  # that thread is to write nothing more
        self._given = self._done = 0  # bytes of payloads for that thread
        self._waiting: list[AppendRow] = []  # for the next one
        self._chores = disk.queue()  # times at which there is something to do; None: the end
        self._keeper: DiskThread | None = None

    @property
    def lag(self) -> int:
        """Bytes of payloads that are not written yet, or with ``DURABLE`` not synced."""
        return self._given - self._done

    @property
    def synced(self) -> int:
        """The newest row that is known to survive a loss of power."""
        return self._synced

    def sync(self, now: float, done: Callable[[int], object]) -> None:
        """Have all rows that are written so far synced by a thread.

        It calls ``done`` with the last of them, unless the journal ends before.
        """
        if not (self.why or self._closed):
            self._do_chores(_SyncAsked(now, done))

    def append(self, effect: AppendRow) -> JournalEnded | None:
        """Append a row; return the event that the journal has ended, once, if it has.

        A thread that ends it posts that too, which may be handled after this: no answer that
        promises this row may leave before.
        """
        if self.why or self._closed:
            _unpin((effect,))
            told, self._told = self._told or not self.why, True
            return None if told else JournalEnded(effect.row.time, self.why)
        if effect.later:
            if self._waiting:
                ended = self._flush()
                if ended is not None:
                    return ended
            self._put(effect)
            return None
        self._waiting.append(effect)
        return None if effect.more else self._flush()

    def exchange(
        self,
        number: int,
        time: float,
        flags: int,
        fields: tuple[int, ...],
        gradient: Recorded,
    ) -> bool:
        """Store the row of a steady exchange in the segment's memory, at once.

        Parameters
        ----------
        number, time, flags
            Of the row.
        fields
            Of its struct.
        gradient
            The gradient, and the rest of the row.

        Returns
        -------
        bool
            False: nothing was stored, and the row has to be appended.
        """
        frames, at, payload = self._frames, self._at, gradient.data.data
        end = at + frames.nbytes
        if (
            end + len(END) > self._lent_to
            or time >= self._lent_until
            or (len(payload) != frames.payload or gradient.parts != frames.rest)
            or (gradient.coded == (frames.kind == _STEADY) or self._waiting or self.why)
        ) and not self.borrow(time, gradient):
            return False
        # The journal's thread writes `_synced` at any time, but only ever a greater one.
        salt, unsynced = self._salt, number - self._synced
        frames.store(self._memory, at, number, time, flags, fields, payload, salt, unsynced)
        self.nbytes += frames.nbytes
        self._at, self._written = end, number
        if end > self._half:
            self.pass_half(time)
        return True

    def pass_half(self, time: float) -> None:
        """Have a file made ready for the next segment, as this one is half full."""
        self._half = self._size
        self._do_chores(time)

    def borrow(self, time: float, gradient: Recorded) -> bool:
        """Have memory for the row of a steady exchange; return whether there is.

        ``time`` is the row's, and ``gradient`` as of `exchange`.
        """
        self._lent_to = 0
        if self._waiting or self._durable or self.why or self._closed:
            return False
        frames, payload = self._frames, gradient.data.nbytes
        kind = RowKind.CODED if gradient.coded else _STEADY
        if (payload, gradient.parts, kind) != (frames.payload, frames.rest, frames.kind):
            self._frames = FixedFrames(kind, STRUCTS[kind], payload, gradient.parts)
            if payload > SHORT:  # no memory is lent for it
                self._room = bytearray(self._frames.nbytes - payload + len(END))
            return False  # `exchange` has the earlier ones
        lent = self._file.lend(self._at, self._frames.nbytes + len(END))
        if lent is None:
            return False
        self._memory, self._lent_to = lent
        self._lent_until = time + LENT
        return True

    def _flush(self) -> JournalEnded | None:
        """Write the rows that wait for another."""
        effects, self._waiting = self._waiting, []
        try:
            self._write(effects)
        except OSError as error:
            self._told = True
            return self._ended(effects[-1].row.time, error)
        finally:
            _unpin(effects)
        if self._durable:
            self._put(_Unsynced(self._file, effects[-1].number, effects[-1].row.time))
        return None

    def _put(self, work: AppendRow | _Unsynced) -> None:
        """Give work to the thread that writes and syncs."""
        if self._writer is None:
            self._writer = self._disk.thread(self._write_behind, "aiops-journal")
        self._given += work.nbytes
        self._rows.put(work)

    def _write(self, effects: Sequence[AppendRow]) -> None:
        """Write rows, with one call where they are in one segment."""
        buffers, at = list[bytes | memoryview](), self._at
        for effect in effects:
            row = effect.row
            payload = b"" if row.payload is None else row.payload.data
            length = len(payload)
            nbytes = frame_bytes(len(row.row), length)
            if at + nbytes + len(END) > self._size:
                if buffers:
                    self._file.write([*buffers, END], self._at)
                    buffers = []
                self._roll(effect.number, nbytes, row.time)
                at = self._at
            before, after = frame(
                *(effect.number, row.kind, row.time, row.flags, row.row),
                *(length, crc32(payload) if length else 0),
                salt=self._salt,
                unsynced=effect.number - self._synced,
            )
            buffers += (before, payload, after)
            at += nbytes
            self.nbytes += nbytes
        if not buffers:
            return
        buffers.append(END)
        self._file.write(buffers, self._at)
        self._at, self._written = at, effects[-1].number
        if at > self._half:
            self.pass_half(effects[-1].row.time)

    def end(self, last: AppendRow | None = None) -> None:
        """Sync and close the journal, in which nothing is written from here on.

        ``last``: a row to be appended when all others are synced, which it says.
        """
        if self._waiting and not self.why:
            self._flush()
        self._closed, self._lent_to, self._descriptor = True, 0, -1
        for thread, work in ((self._writer, self._rows), (self._keeper, self._chores)):
            if thread is not None:
                work.put(None)
                thread.join()
        if not self.why:
            try:
                if last is not None:
                    for old in self._old:
                        old.file.sync()
                    self._disk.sync_names(self._folder)
                    self._file.sync()
                    self._synced = last.number - 1
                    self._write([last])
                self._file.sync()
            except OSError as error:
                self._ended(0.0, error)
        for old in self._old:
            old.file.close()
        self._file.close()
        self._files.close()

    def _ended(self, now: float, error: Exception) -> JournalEnded:
        self.why = self._sentence(error)
        return JournalEnded(now, self.why)

    def _sentence(self, error: Exception) -> str:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"the journal in {self._folder} has ended: {why}"

    def _segment(self, first: int, nbytes: int, now: float, *, synced: bool) -> DiskFile:
        """Begin a segment with room for a row of ``nbytes``."""
        self._salt = self._new_salt()
        head = SegmentHead(first, self._generation, self._run, self._salt, *self._shard)
        self._lent_to = 0
        file, self._size = self._files.begin(first, head.pack(), nbytes, synced=synced)
        # With DURABLE it is synced after every few rows; for long ones no memory is lent.
        if not self._durable and self._frames.payload <= SHORT:
            file.map()
        self._descriptor = -1 if self._durable else file.descriptor()
        self._first, self._begun, self._at, self._half = first, now, HEAD, self._size // 2
        return file

    def _roll(self, first: int, nbytes: int, now: float) -> None:
        """Go on in a new segment."""
        path = self._folder / directory.journal_name(self._first)
        old = _Old(self._file, path, first - 1, self._begun)
        if self._durable:  # all of it is on the disk before a successor has a name
            old.file.sync()
            self._synced = first - 1
        self._old.append(old)  # before there is another: a thread looks for all that has rows
        self._file = self._segment(first, nbytes, now, synced=self._durable)
        self._do_chores(now)

    # ------------------------------------------------------------ threads

    def _do_chores(self, chore: float | _SyncAsked) -> None:
        if self._keeper is None:
            self._keeper = self._disk.thread(self._keep, "aiops-segments")
        self._chores.put(chore)

    def _keep(self) -> None:
        """Have a file ready for the next segment, and sync those that have settled."""
        while (chore := self._chores.get()) is not None:
            asked = isinstance(chore, _SyncAsked)
            now = chore.time if asked else chore
            try:
                if asked:
                    self._sync_written(chore)
                else:
                    self._files.make_ready(filled=not self._durable)
                    self._sync_old(now)
            except Exception as error:  # also of memory: no other thread hears of it
                # Rows go on until the event is handled.
                ended, self._over = JournalEnded(now, self._sentence(error)), True
                if self._writer is None:
                    self._post(ended)
                else:  # which is perhaps writing a buffer that the event gives back
                    self._rows.put(ended)
                return

    def _sync_written(self, asked: _SyncAsked) -> None:
        last = self._written
        self._file.sync()  # first: once another has taken its place, it is closed below
        self._sync_old(inf)
        self._disk.sync_names(self._folder)
        self._synced = max(self._synced, last)
        asked.done(last)

    def _sync_old(self, now: float) -> None:
        # The names are read after the list is copied: a segment that has begun since has no name
        # among earlier ones, and would pass for one that a snapshot has covered.
        settled, last = [*self._old], 0
        names = set(self._disk.names(self._folder))
        for old in settled:
            name = old.path.name  # if it has none, a snapshot has covered it
            needed = name in names or name + directory.PART in names
            if old.file is self._file or (needed and now - old.begun < _SETTLED):
                break
            if needed:
                old.file.sync()
            old.file.close()
            self._old.popleft()
            last = old.last
        if last:
            self._disk.sync_names(self._folder)
            self._synced = max(self._synced, last)

    def _write_behind(self) -> None:
        """Write what waits, again and again, and post up to which row that is."""
        over = False
        while not over and (first := self._rows.get()) is not None:
            work, nbytes = [first], 0
            while self._durable or nbytes < _BATCH:
                try:
                    following = self._rows.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    over = True
                    break
                work.append(following)
                nbytes += 0 if isinstance(following, JournalEnded) else following.nbytes
            if self._over:
                for ended in work:
                    if isinstance(ended, JournalEnded):
                        self._post(ended)
                continue
            last = work[-1]
            try:
                self._write([each for each in work if isinstance(each, AppendRow)])
                if self._durable:
                    # A file that is not written any more has been synced, and may be closed.
                    if not isinstance(last, _Unsynced) or last.file is self._file:
                        self._file.sync()
                    self._synced = max(self._synced, last.number)
            except Exception as error:  # or answers and buffers would wait for this thread for ever
                self._post(self._ended(last.time, error))
                return
            self._done += sum(each.nbytes for each in work)
            self._post(Committed(last.time, last.number))


def _unpin(effects: Iterable[AppendRow]) -> None:
    """Give back the buffers of rows that were to be written at once."""
    for effect in effects:
        if effect.pinned is not None and not effect.later:
            effect.pinned.unpin()
