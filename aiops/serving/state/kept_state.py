"""Keep a server's state in a folder: recover it, and journal what happens from then on."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from aiops._version import __version__
from aiops.common.formatting import nbytes
from aiops.common.frozen import value
from aiops.common.generations import generation_text
from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.recorder import (
    WAITS,
    AppendRow,
    Recorder,
    SnapshotFailed,
    Supersede,
    WriteSnapshot,
)
from aiops.durable.recovery import Recovered
from aiops.durable.rows import exchange_fields
from aiops.durable.snapshot_rule import SnapshotRule, Unsaved
from aiops.engine.capture import Capture, capture, policy_state
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Effect,
    Event,
    JournalEnded,
    Resumed,
    SnapshotDue,
    SnapshotWritten,
    Tick,
    Warm,
)
from aiops.engine.receive import CopiedIncoming
from aiops.engine.steady import Recorded
from aiops.errors import DamagedState, Refused
from aiops.kernels.checksum import warm_crc32
from aiops.model.layout import Ints
from aiops.net.disk import DiskThread
from aiops.serving.repeated_error import RepeatedError
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.running_journal import RunningJournal
from aiops.serving.state.snapshot_requests import OnSnapshot, SnapshotRequests
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.state.directory import GenerationFile
from aiops.state.snapshot_file import SnapshotHeader

_log = logging.getLogger("aiops.server")

_RETRY, _MINUTE = 10.0, 60.0
"""Seconds after which a journal that has ended is tried again, and it is said again that it has."""

_KERNELS = 1.0
"""Seconds for which a start waits for kernels, at most. To read them from their cache takes half of
that, less than an update of a large model without them; to compile them takes longer."""

_OFTEN = 0.05
"""Seconds from one look at whether a snapshot is due to the next."""

_CAPTURED = 1
"""Rows behind that of a snapshot which say only that its capture is done."""


@value
class _Mark:
    """A point of the journal: the last row, the bytes of all so far, and the updates begun."""

    row: int
    nbytes: int
    updates: int


class KeptState:
    """The state of a server that runs.

    Parameters
    ----------
    files
        The folder.
    engine, policy
        A fresh engine, and the policy's name; the engine is brought to the state that is kept.
    acks
        What an acknowledgement is to mean.
    clock
        The server's clock; it goes on from the state's time.
    post, post_threadsafe
        Post an event; the second from any thread.
    perform
        Carries out an effect.
    recovered
        The state to which the engine has been brought already; None: it is fresh.
    promoted
        Whether that was a standby's, which now serves.

    Attributes
    ----------
    recorder
        Handles the server's events from here on.
    record
        Where steady exchanges are recorded; None: there is no journal.
    resumes
        Whether there was a state already.
    journal
        It has no writer where acknowledgements promise nothing.
    saved
        Called when a snapshot has been written, unless it is None. Then the first one is written as
        soon as there is a model.

    Raises
    ------
    UsageError
        When the folder cannot be read or written, is damaged, or holds a run with other settings;
        when the policy has attributes that cannot be kept.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "journal", "record", "recorder")

    _alone = True  # no other server's snapshots belong to its own

    def __init__(
        self,
        files: StateFiles,
        engine: Engine,
        policy: str,
        acks: Acks,
        clock: Clock,
        post: Callable[[Event], None],
        post_threadsafe: Callable[[Event], object],
        perform: Callable[[Effect], None],
        recovered: Recovered | None = None,
        *,
        promoted: bool = False,
    ) -> None:
        self._files, self._clock, self._post, self._perform = files, clock, post, perform
        self._acks, self._post_threadsafe = acks, post_threadsafe
        self.saved: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        policy_state(engine.policy)  # or refuse one that cannot be kept, at once
        warmed = threading.Event()
        perform(Warm([partial(warm_crc32, engine.options.backend), warmed.set]))
        began = time.perf_counter()
        if recovered is None and self._alone:  # a lead has been brought to the moment that all have
            kernels = partial(warmed.wait, _KERNELS)  # those that were begun before are ready too
            recovered = files.recover(
                *(engine, policy, perform),
                kernels=kernels,
                loading=lambda: not warmed.is_set(),
            )
        self._outstanding: tuple[Effect, ...] = ()
        self.resumes, row, self._mark = recovered is not None, 1, _Mark(0, 0, 0)
        if recovered is not None:
            clock.go_on(recovered.time)
            row, self._outstanding = recovered.row, recovered.outstanding
            self._mark = _Mark(recovered.snapshot, -recovered.nbytes, _updates(engine))
        begun = engine, policy, recovered, clock(), acks, post_threadsafe
        self.journal = RunningJournal(files.begin(*begun, promoted=promoted), clock)
        self._earlier = files.earlier_nbytes  # of segments that no snapshot of this start covers
        recording = self.journal.writer is not None
        self.record = self if recording else None
        if recording:
            engine.admission.incoming = CopiedIncoming
        self._snapshots = SnapshotWriter(
            *(files.disk, files.folder, files.segments, None if recording else row),
            alone=self._alone,
        )
        self._uncaptured, self._requests = RepeatedError(), SnapshotRequests()
        self._saved_version = 0  # of the model, in the last snapshot of this start
        given = engine, CommitGate(acks), row + 1, files.generations
        self.recorder = self._made_recorder(*given, recording=recording)
        self._writing = self._ended = self._captured = False
        self._waiting: WriteSnapshot | None = None  # for rows before it
        self._resuming: DiskThread | None = None  # begins a journal in place of one that has ended
        self._next_journal: JournalWriter | None = None  # that it has begun
        self._said = self._tried = 0.0  # when it was said, and tried to change, that it has ended
        self._capture_bytes = 0
        self._seconds = 0.0, 0.0  # for which updates waited for the last one, and of its writing
        if recovered is None:
            _log.info("%s: a new state, run %s", files.folder, files.run)
            return
        _log.info(
            "%s: generation %s of run %s: snapshot at row %d, %d rows since, version %d, %d clients"
            " known, in %.2f s",
            *(files.folder, generation_text(files.generation), files.run, recovered.snapshot),
            *(row - recovered.snapshot, engine.version, len([*engine.membership])),
            time.perf_counter() - began,
        )

    def _made_recorder(
        self,
        engine: Engine,
        gate: CommitGate,
        first: int,
        generations: GenerationFile,
        *,
        recording: bool,
    ) -> Recorder:
        return Recorder(engine, gate, first, generations, recording=recording)

    def actions(
        self, reply: Callable[[EncodedReply], None], supersede: Callable[[Supersede], None]
    ) -> Mapping[type[Any], Callable[[Any], Event | None]]:
        """Return what carries out the effects that only a server with a state has.

        ``reply`` sends an answer that is encoded already; ``supersede`` ends the server at once.
        """
        return {
            AppendRow: self.journal.append,
            EncodedReply: reply,
            Supersede: supersede,
            WriteSnapshot: self._write,
            SnapshotFailed: self._failed,
        }

    def keep_for(self, fed: Callable[[], int]) -> None:
        """Keep the rows from the one on that ``fed`` returns; a standby still needs them."""
        self._snapshots.fed = fed

    @property
    def newest(self) -> int:
        """The newest row of the journal."""
        return self.recorder.next - 1

    def begin(self, loop: asyncio.AbstractEventLoop, every: float) -> None:
        """Go on where the earlier server ended, if there was one, and take snapshots.

        Parameters
        ----------
        loop, every
            The event loop, and the seconds between two snapshots on it, at most.
        """
        self._loop, self._rule = loop, SnapshotRule(every, self._clock())
        self._timer = loop.call_later(min(every, _OFTEN), self._look, min(every, _OFTEN))
        if self.resumes:
            self._go_on()
            self._post(Tick(self._clock()))

    def _go_on(self) -> None:
        self._post(Resumed(self._clock(), self._files.generation))
        for effect in self._outstanding:
            self._perform(effect)
        self._outstanding = ()

    def exchanged(
        self,
        time: float,
        leased: bool,
        peer: int,
        numbers: tuple[int, ...],
        gradient: Recorded,
        ticket: int,
        sums: Ints,
        followed: Ints | None,
    ) -> None:
        """Append a steady exchange's row.

        Parameters as of `aiops.engine.steady.ExchangeRecord.exchanged`.
        """
        recorder, journal, writer = self.recorder, self.journal, self.journal.writer
        if writer is None or not recorder.recording:
            return
        given = leased, peer, numbers, gradient.coded, ticket, sums, followed
        flags, fields = exchange_fields(*given)
        if not recorder.pending and writer.exchange(recorder.next, time, flags, fields, gradient):
            recorder.next += 1
            if journal.appended is not None:
                journal.appended()
            return
        ended = journal.append(recorder.exchanged(time, flags, fields, gradient))
        if ended is not None:
            self._post(ended)

    # ------------------------------------------------------------ snapshots

    def _look(self, pause: float) -> None:
        """Have a snapshot taken if one is due; look again after ``pause`` seconds."""
        now, recorder = self._clock(), self.recorder
        if self._waiting is not None:
            self._write(self._waiting)
        self._requests.written(self._durable, self._saved_version)
        busy = self._writing or self._resuming is not None or recorder.capturing
        if not busy and recorder.engine.training is not None and self._may_capture():
            if not self._captured and (self.saved is not None or not recorder.recording):
                self._rule.at_once(now)  # without a journal or this machine there is nothing else
                self._captured = True
            if self.record is not None and not recorder.recording:
                self._try_again(now)
            due = len(self._requests) > 0 or self._rule.due(now, self._unsaved())
            if self._resuming is None and due:
                self._post(SnapshotDue(now, recorder.next))
        self._timer = self._loop.call_later(pause, self._look, pause)

    def _may_capture(self) -> bool:
        """Return whether a snapshot can be taken now."""
        return True

    @property
    def _durable(self) -> int:
        """The row of the newest snapshot that a start could go on from."""
        return self._mark.row

    def take_snapshot(self, answer: OnSnapshot) -> None:
        """Have a snapshot of all that there is now be taken, and ``answer`` called then."""
        self._requests.ask(self.newest + (not self.recorder.recording), answer)

    def note_rollback(self, version: int) -> None:
        """Write that the next start goes back to the newest snapshot of a version.

        The caller ends this one at once, and nothing that it has in memory is written.

        Raises
        ------
        Refused
            When there is none, or it cannot be gone back to; then nothing has changed.
        """
        row = self._row_of(version)
        self.stop()
        self._snapshots.wait()  # else the one that is being written might have it removed
        try:
            if self._row_of(version) != row:
                raise Refused(f"the snapshot of version {version:,} was just removed")
            self._files.check_snapshot(row)
            if self.journal.writer is None and self._files.has_journal:
                raise Refused(
                    "the journal of an earlier start, with --acks written or more, is there still:"
                    " ask again after two more snapshots"
                )
            self._files.note_back_to(row)
        except (Refused, DamagedState, OSError) as error:
            self._timer = self._loop.call_later(_OFTEN, self._look, _OFTEN)
            if isinstance(error, Refused):
                raise
            raise Refused(f"this server cannot go back: {error}") from None

    def _row_of(self, version: int) -> int:
        """Return the row of the newest snapshot of a version."""
        found = self._versions()
        rows = [row for row, its in found.items() if its == version]
        if not rows:
            there = ", ".join(f"{its:,}" for its in sorted(set(found.values()))) or "none yet"
            raise Refused(
                f"no snapshot of version {version:,} is kept; there are: {there} (`aiops snapshot`"
                " takes one, and --state keeps the last two)"
            )
        return max(rows)

    def _versions(self) -> dict[int, int]:
        """Return the versions of the model in the snapshots that can be gone back to, by row."""
        return {row: head.versions[0] for row, head in self._files.headers() if head.versions}

    def _try_again(self, now: float) -> None:
        """Say once a minute that there is no journal; have one again if there is room."""
        files, recorder = self._files, self.recorder
        if not self._tried:
            self._said = self._tried = now
        if now < self._tried + _RETRY:
            return
        self._tried, lacks = now, ""
        room = 2 * self._capture_bytes + files.disk.segment
        try:
            free = files.disk.free(files.folder)
            if free < room:
                lacks = f"there are {nbytes(free)} of room, and it takes {nbytes(room)}"
        except OSError as error:
            lacks = f"{files.folder}: {error.strerror or error}"
        if lacks:
            if now >= self._said + _MINUTE:
                self._said = now
                text = "%s; acknowledgements still mean 'applied': for another journal %s"
                _log.warning(text, recorder.ended, lacks)
            return
        # No row takes a number before there is a journal, and no snapshot is taken.
        run = partial(self._resume, recorder.next + 1)
        self._resuming = files.disk.thread(run, "aiops-journal-begins")

    def _resume(self, first: int) -> None:
        """Begin another journal (on a thread: to end the last and to make a file takes long)."""
        segments = self._files.segments
        try:
            if self.journal.writer is not None:
                self.journal.writer.end()
            if segments.kept > first:
                _log.error(
                    "%s: rows are missing before row %d: `aiops replay` ends there, and the journal"
                    " is not kept any more",
                    *(self._files.folder, first),
                )
                segments.kept = first
            self._next_journal = self._files.begin_again(first, self._acks, self._post_threadsafe)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error) or "there is no memory"
            _log.warning("%s: no journal yet: %s", self._files.folder, why)
        self._loop.call_soon_threadsafe(self._resumed)

    def _resumed(self) -> None:
        """Go on with the journal that was begun, and take the snapshot that it needs."""
        self._resuming = None
        if self._ended or self._next_journal is None:
            return
        self.journal.writer, self._next_journal = self._next_journal, None
        self.recorder.resume()
        self._mark = _Mark(self._mark.row, 0, self._mark.updates)
        self._rule.at_once(self._clock())

    def _unsaved(self) -> Unsaved:
        """Return what the last snapshot does not have."""
        engine, last, now = self.recorder.engine, self._mark, self._present()
        if not self.recorder.recording:  # there will be no replay
            return Unsaved(int(now.updates != last.updates or not last.row), 0, 0)
        cost = 0 if engine.store is None else engine.store.cost
        touched = (now.updates - last.updates) * cost
        nbytes = now.nbytes - last.nbytes
        own = _CAPTURED if last.row and not self.recorder.resuming else 0
        rows = now.row - last.row - own
        return Unsaved(max(0, rows), nbytes, touched, self._earlier)

    def _present(self) -> _Mark:
        return _Mark(self.newest, self.journal.nbytes, _updates(self.recorder.engine))

    def _write(self, effect: WriteSnapshot) -> None:
        """Begin to write a capture, once the journal has all its rows.

        Else, after a crash, the snapshot before it would lead to an earlier state.
        """
        self._writing = True
        if self.recorder.lacks(effect.row):
            self._waiting = effect
            return
        self._waiting, began, mark, recorder = None, self._clock(), self._present(), self.recorder
        mark, resuming = _Mark(effect.row, mark.nbytes, mark.updates), recorder.resuming

        def done(nbytes: int) -> None:
            if resuming:
                self._snapshots.reveal()
            self._loop.call_soon_threadsafe(self._written, effect, mark, began, nbytes)

        header, paced = header_of(self._files, effect.capture, effect.row), not recorder.recording
        self._snapshots.begin(effect.capture, header, done, paced=paced)

    def _written(self, effect: WriteSnapshot, mark: _Mark, began: float, nbytes: int) -> None:
        """Take note that a snapshot was written, or was not."""
        versions = effect.capture.versions
        effect.capture.release()
        self._writing, now = False, self._clock()
        if self._ended:
            return
        if self._snapshots.why:
            self._not_written(now, self._snapshots.why)
            return
        self._uncaptured.over()
        self._rule.written(now, effect.pause, now - began)
        first, self._capture_bytes = not self._capture_bytes, effect.capture.nbytes
        self._seconds = effect.pause, now - began
        self._mark, self._earlier, self._saved_version = mark, 0, versions[0]
        if first:
            _log.info(
                "%s: the first snapshot, of row %d: %.1f MiB written in %.2f s; to capture it took"
                " %.1f MiB of memory, and updates waited for %.3f s",
                *(self._files.folder, effect.row, nbytes / _MIB, now - began),
                *(self._capture_bytes / _MIB, effect.pause),
            )
        self._post(SnapshotWritten(now, effect.row))
        if self.saved is not None:
            self.saved()

    def _failed(self, effect: SnapshotFailed) -> None:
        """Take note that a snapshot was not captured."""
        if effect.why == WAITS:
            self._rule.at_once(self._clock())
            return
        text = f"no snapshot was taken: {effect.why}; it is tried again"
        self._uncaptured.log(self._clock(), effect.why, text)
        self._not_written(self._clock(), effect.why)

    def _not_written(self, now: float, why: str) -> None:
        self._rule.failed(now)
        self._requests.failed(why)
        if self.recorder.resuming:  # the journal would follow nothing
            self._post(JournalEnded(now, why))

    def _write_last(self) -> bool:
        """Write a last snapshot, so that the next start need not replay the journal.

        Returns
        -------
        Whether the state was written, or was there already.
        """
        recorder, engine = self.recorder, self.recorder.engine
        if engine.training is None or not engine.idle:
            return False
        if recorder.recording and recorder.next - 1 == self._mark.row:
            return True
        recorder.next += not recorder.recording
        row, found = recorder.next - 1, capture(engine)
        found.room = recorder.room
        try:
            found.copy(engine.machine.parallel_map)
            self._snapshots.write(found, header_of(self._files, found, row), last=True)
        finally:
            found.release()
        return not self._snapshots.why

    @property
    def _last_fault(self) -> str:
        """The reason for which there is no last snapshot, if writing it did not fail."""
        return "an update was not finished"

    # ------------------------------------------------------------ its end

    def report(self) -> dict[str, Any]:
        """Return its part of the statistics."""
        recorder, files = self.recorder, self._files
        return {
            "folder": str(files.folder),
            "run": files.run,
            "generation": files.generation,
            "row": recorder.next - 1,
            "acks": recorder.acks.name.lower(),
            "wanted": self._acks.name.lower(),
            "journal_bytes": self.journal.nbytes,
            "lag_rows": recorder.lag,
            "lag_bytes": 0 if self.journal.writer is None else self.journal.writer.lag,
            "ended": recorder.ended,
            "rolled_back": recorder.rolled_back,
            "rolled_back_at_most": recorder.rolled_back_at_most,
            "snapshot": self._mark.row,
            "snapshot_error": self._snapshots.why,
            "capture_bytes": self._capture_bytes,
            "capture_seconds": self._seconds[0],
            "snapshot_seconds": self._seconds[1],
        }

    def end(self, *, trusted: bool = True) -> str:
        """Write a last snapshot, close the journal, and unlock the folder.

        ``trusted``: False after an internal error, when only the journal is sure to be right.

        Returns
        -------
        A sentence on what the state lacks; empty if it is whole.
        """
        self.stop()
        whole, self._ended = self.recorder.recording, True
        if self._waiting is not None:
            self._waiting.capture.release()
            self._waiting = None
        self._snapshots.wait()
        if self._resuming is not None:
            self._resuming.join()
        try:
            if trusted:
                whole = self._write_last() or whole
        except MemoryError:
            _log.error("%s: there is no memory for a last snapshot", self._files.folder)
        finally:
            self._snapshots.end()
            for journal in (self.journal.writer, self._next_journal):
                if journal is not None:
                    journal.end()
            self._files.close()
        if whole or not trusted or self.recorder.engine.training is None:
            return ""
        why = self.recorder.ended or self._snapshots.why or self._last_fault
        return (
            f"{self._files.folder} lacks what was trained at last, as {why}: a start goes on from"
            " what it has, and tells the workers how many of their pushes are lost"
        )

    def stop(self) -> None:
        """Begin no further snapshot."""
        if self._timer is not None:
            self._timer.cancel()


_MIB = 1 << 20


def header_of(files: StateFiles, found: Capture, row: int) -> SnapshotHeader:
    """Return the header of a snapshot of the state after a row."""
    wrote = {"aiops": __version__, "numpy": np.__version__, "byteorder": sys.byteorder}
    numbers = row, files.generation, files.run, found.versions
    return SnapshotHeader(*numbers, found.settings, wrote, found.owners, *files.place)


def _updates(engine: Engine) -> int:
    """Return the number of updates that an engine has begun."""
    return 0 if engine.training is None else engine.training.updates.tickets
