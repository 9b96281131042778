"""Keep the states of a sharded model's servers: each has a folder and a journal of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aiops.common.generations import generation_text
from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.follower_recorder import BeginShard, FollowerRecorder, GoBack, NoteLead
from aiops.durable.lead_recorder import LeadRecorder
from aiops.durable.recorder import (
    AppendRow,
    BeginJournal,
    KeepSnapshots,
    Recorder,
    Supersede,
    WriteSnapshot,
)
from aiops.durable.recovery import Recovered
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Effect,
    Event,
    JournalEnded,
    Resumed,
    SnapshotDue,
    SnapshotWritten,
)
from aiops.errors import RolledBack, UsageError
from aiops.serving.state.kept_state import KeptState, header_of
from aiops.serving.state.running_journal import RunningJournal
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.directory import GenerationFile

_log = logging.getLogger("aiops.server")

_STOPPED = 1
"""Unsaved rows when nothing else has happened: that the server stops."""


class LeadState(KeptState):
    """The state of a sharded model's lead, whose snapshots are a set with those of its followers.

    Parameters
    ----------
    lead
        A lead, brought to the state that is kept (`LeadReplayer`).
    files, policy, acks, clock, post, post_threadsafe, perform, recovered, promoted
        As of `KeptState`.
    """

    _alone = False

    def __init__(
        self,
        lead: Lead,
        files: StateFiles,
        policy: str,
        acks: Acks,
        clock: Clock,
        post: Callable[[Event], None],
        post_threadsafe: Callable[[Event], object],
        perform: Callable[[Effect], None],
        recovered: Recovered | None,
        *,
        promoted: bool = False,
    ) -> None:
        self._lead = lead
        self._last_due: int | None = None  # the newest row when the last set was ordered
        given = files, lead.engine, policy, acks, clock, post, post_threadsafe
        super().__init__(*given, perform, recovered, promoted=promoted)
        lead.sets.holds(0, files.snapshots)
        lead.secret, lead.readmission.history = files.generations.secret, files.generations.history

    def resume(self) -> None:
        """Go on where the earlier lead ended, before followers are connected."""
        if not self.resumes:
            return
        recorder = self.recorder
        assert isinstance(recorder, LeadRecorder), "it is made below"
        event = Resumed(self._clock(), self._files.generation)
        outstanding, self._outstanding = self._outstanding, ()
        for effect in recorder.resumed(event, outstanding):
            self._perform(effect)  # type: ignore[arg-type]

    def _go_on(self) -> None:
        """Do nothing: `resume` has done it."""

    def _made_recorder(
        self,
        engine: Engine,
        gate: CommitGate,
        first: int,
        generations: GenerationFile,
        *,
        recording: bool,
    ) -> Recorder:
        return LeadRecorder(self._lead, gate, first, generations, recording=recording)

    def actions(
        self, reply: Callable[[EncodedReply], None], supersede: Callable[[Supersede], None]
    ) -> Mapping[type[Any], Callable[[Any], Event | None]]:
        """Return what carries out the effects that only a server with a state has."""
        return {**super().actions(reply, supersede), KeepSnapshots: self._keep}

    def _keep(self, effect: KeepSnapshots) -> None:
        self._snapshots.keep(effect.rows)

    def _may_capture(self) -> bool:
        """Return whether all servers are there, and have written the snapshots before."""
        return not (self._lead.lost or self._lead.sets.writing)

    @property
    def _durable(self) -> int:
        """The row of the newest snapshot, once all servers have theirs of it."""
        return self._mark.row if self._mark.row in self._lead.sets.whole else 0

    def _versions(self) -> dict[int, int]:
        """Return the versions of the model in the sets of snapshots that are whole, by row."""
        whole = self._lead.sets.whole
        return {row: its for row, its in super()._versions().items() if row in whole}

    def _not_written(self, now: float, why: str) -> None:
        super()._not_written(now, why)
        self._post(SnapshotWritten(now, self._lead.sets.cut, why))

    def take_last(self) -> bool:
        """Have a last set of snapshots be taken; return whether there is more to wait for.

        It is called again and again, after `stop` and while events are still handled. Then the next
        start has no update to replay; and where there is no journal it has lost nothing.
        """
        recorder, sets, lost = self.recorder, self._lead.sets, self._lead.lost
        if self._waiting is not None:
            self._write(self._waiting)
        busy = recorder.capturing or self._writing or self._resuming is not None or sets.writing
        if busy or lost or self._last_due is not None or not self._outdated:
            return busy and not lost
        self._last_due = self.newest
        self._post(SnapshotDue(self._clock(), recorder.next))
        return True

    @property
    def _outdated(self) -> bool:
        """True if there is more than the newest set of snapshots has."""
        if self.recorder.engine.training is None:
            return False
        if not self.recorder.recording:  # there are no rows to tell
            return True
        return self._mark.row not in self._lead.sets.whole or self._unsaved().rows > _STOPPED

    def report_last(self) -> None:
        """Say that there is no last set, if there is none, when it is waited for no more."""
        if self._write_last():
            return
        then = "replays the journals from there" if self.recorder.recording else "has lost the rest"
        _log.warning(
            "%s: no last set of snapshots (%s): the next start goes on from the newest that all"
            " servers have, and %s",
            *(self._files.folder, self._last_fault, then),
        )

    @property
    def _last_fault(self) -> str:
        return self._lead.lost or "a server has not written its own, or not in time"

    def _write_last(self) -> bool:
        """Write no snapshot, which would be in no set; return whether `take_last` had one taken."""
        due, row = self._last_due, self._mark.row
        if due is None:
            return not self._outdated
        return row > due and row in self._lead.sets.whole


class FollowerState:
    """The state of a follower that runs.

    Parameters
    ----------
    files
        The folder.
    follower
        A fresh follower; it is brought to the state that is kept.
    acks
        The promise of its reports.
    clock
        The server's clock; it goes on from the state's time.
    post_threadsafe
        Posts an event, on any thread.
    perform
        Carries out an effect.
    stop
        Begins to end the server with an error.
    promoted
        The state to which a standby has brought the follower; None: it is fresh.

    Attributes
    ----------
    recorder
        Handles the server's events from here on.
    record
        None: a follower has no steady exchanges.
    journal
        It has a writer once the lead has a model.

    Raises
    ------
    UsageError, DamagedState
        As of `KeptState`.
    """

    def __init__(
        self,
        files: StateFiles,
        follower: Follower,
        acks: Acks,
        clock: Clock,
        post_threadsafe: Callable[[Event], object],
        perform: Callable[[Effect], None],
        stop: Callable[[BaseException], None],
        promoted: Recovered | None = None,
    ) -> None:
        self._stop = stop
        self._files, self._follower, self._acks = files, follower, acks
        self._perform = perform
        self._post_threadsafe, self.record = post_threadsafe, None
        began = time.perf_counter()
        recovered = promoted or files.recover_follower(follower)
        self.journal = journal = RunningJournal(None, clock)
        self._outstanding: Sequence[Effect] = ()
        row = 0
        if recovered is not None:
            row, self._outstanding = recovered.row, recovered.outstanding
            clock.go_on(recovered.time)
            begun = partial(files.begin_rows, promoted=promoted is not None)
            journal.writer = begun(row, [self._version], acks, post_threadsafe)
            _log.info(
                "%s: generation %s of run %s: snapshot at row %d, %d rows since, version %d, in"
                " %.2f s",
                *(files.folder, generation_text(files.generation), files.run, recovered.snapshot),
                *(row - recovered.snapshot, self._version, time.perf_counter() - began),
            )
        recording = acks > Acks.APPLIED
        follower.led_by = files.generations.led_by
        follower.generation = lambda: files.generation
        follower.place = max((place.number for place in files.generations.places), default=0)
        self.recorder = FollowerRecorder(follower, CommitGate(acks), row + 1, recording=recording)
        self._snapshots = SnapshotWriter(
            *(files.disk, files.folder, files.segments, None if recording else row), alone=False
        )
        follower.snapshots = files.cuts()
        self._clock, self._mark = clock, max(files.snapshots, default=0)
        follower.state_report, follower.secret = self.report, files.generations.secret

    @property
    def _version(self) -> int:
        return 0 if self._follower.shard is None else self._follower.shard.version

    @property
    def newest(self) -> int:
        """The newest row of the journal."""
        return self.recorder.next - 1

    def keep_for(self, fed: Callable[[], int]) -> None:
        """Keep the rows from the one on that ``fed`` returns; a standby still needs them."""
        self._snapshots.fed = fed

    def actions(
        self, reply: Callable[[EncodedReply], None], supersede: Callable[[Supersede], None]
    ) -> Mapping[type[Any], Callable[[Any], Event | None]]:
        """Return what carries out the effects that only a follower with a state has."""
        return {
            AppendRow: self.journal.append,
            BeginShard: self._begin_shard,
            BeginJournal: self._begin_again,
            WriteSnapshot: self._write,
            KeepSnapshots: self._keep,
            NoteLead: self._note_lead,
            GoBack: self._go_back,
        }

    def _note_lead(self, effect: NoteLead) -> None:
        """Keep the generation of the lead, before it is welcomed, if there is a state."""
        if self._files.run and self._files.generation:
            self._keep_lead(effect.generation)

    def _keep_lead(self, generation: int) -> None:
        try:
            self._files.note_led_by(generation)
        except OSError as why:
            _log.error(
                "%s: the lead's generation is not kept, so that after a restart an earlier one"
                " could lead this follower: %s",
                *(self._files.folder, why.strerror or why),
            )

    def _go_back(self, effect: GoBack) -> None:
        """End, and have the next start undo the orders of later moments."""
        files = self._files
        try:
            files.note_back_to(effect.row)
        except OSError as why:
            _log.error("%s: it cannot go back: %s", files.folder, why.strerror or why)
            return
        self._stop(
            RolledBack(
                f"{files.folder} is ahead of what other servers of its model have kept: it goes"
                f" back to row {effect.row:,} of its lead's journal when it is started again",
                row=effect.row,
            )
        )

    def begin(self, loop: asyncio.AbstractEventLoop, every: float) -> None:
        """Carry out what the replay has left: the compiling of kernels."""
        for effect in self._outstanding:
            self._perform(effect)
        self._outstanding = ()

    def _begin_shard(self, effect: BeginShard) -> None:
        """Begin the journal, now that it is known of what."""
        files = self._files
        if files.run not in ("", effect.run):
            raise UsageError(f"{files.folder} is of run {files.run}, and the lead of {effect.run}")
        if not files.run:
            files.identify(effect.run, effect.shard, effect.shards)
        files.share_secret(self._follower.secret)
        self.journal.writer = files.begin_rows(0, [], self._acks, self._post_threadsafe)
        self._keep_lead(self._follower.led_by)
        _log.info("%s: a new state, run %s", files.folder, files.run)

    def _begin_again(self, effect: BeginJournal) -> Event | None:
        """Begin another journal, if there is room for it and for the snapshot before it."""
        files, shard = self._files, self._follower.shard
        nbytes = 0 if shard is None else shard.store.cost
        try:
            if files.disk.free(files.folder) < 2 * nbytes + files.disk.segment:
                return JournalEnded(self._clock(), self.recorder.ended)
            if self.journal.writer is not None:
                self.journal.writer.end()
            given = effect.first, self._acks, self._post_threadsafe
            self.journal.writer = files.begin_again(*given)
        except OSError as error:
            why = f"{files.folder}: {error.strerror or error}"
            return JournalEnded(self._clock(), why)
        return None

    def _write(self, effect: WriteSnapshot) -> None:
        """Begin to write a capture."""
        resuming = self.recorder.resuming

        def done(nbytes: int) -> None:
            if resuming:
                self._snapshots.reveal()
            if not self._snapshots.why:
                self._mark = effect.row
            event = SnapshotWritten(self._clock(), effect.row, self._snapshots.why)
            self._post_threadsafe(event)

        header = header_of(self._files, effect.capture, effect.row)
        self._snapshots.begin(effect.capture, header, done)

    def _keep(self, effect: KeepSnapshots) -> None:
        self._snapshots.keep(effect.rows)

    def report(self) -> dict[str, Any]:
        """Return its part of the statistics."""
        recorder, files = self.recorder, self._files
        return {
            "folder": str(files.folder),
            "run": files.run,
            "generation": files.generation,
            "row": recorder.next - 1,
            "acks": recorder.acks.name.lower(),
            "ended": recorder.ended,
            "snapshot": self._mark,
            "snapshot_error": self._snapshots.why,
        }

    def end(self, *, trusted: bool = True) -> str:
        """Close the journal, and unlock the folder; of what it lacks the lead tells."""
        self._snapshots.wait()
        self._snapshots.end()
        if self.journal.writer is not None:
            self.journal.writer.end()
        self._files.close()
        return ""

    def stop(self) -> None:
        """Do nothing: its lead orders snapshots."""
