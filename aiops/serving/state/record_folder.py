"""Write the record of a run (``--record DIR``): a journal that keeps all rows."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from functools import partial
from math import inf
from pathlib import Path

from aiops.durable.commit_gate import Acks
from aiops.durable.recorder import AppendRow
from aiops.durable.rows import exchange_fields
from aiops.durable.run_record import RunRecord
from aiops.engine.engine import Engine
from aiops.engine.events import Event, JournalEnded
from aiops.engine.receive import CopiedIncoming
from aiops.engine.steady import Recorded
from aiops.errors import UsageError
from aiops.model.layout import Ints
from aiops.net.disk import SystemDisk
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving import new_files
from aiops.serving.state.state_files import RECORD, StateFiles

_log = logging.getLogger("aiops.server")

_MINUTE = 60.0


class RecordFolder:
    """Records the events of one engine for `aiops replay`.

    A row is in the file before the engine handles its event, so the record of a server that was
    killed has all pushes that were acknowledged. If the disk cannot take a row, the record is over:
    what follows a gap could not be replayed. That is logged, and logged again each minute.

    Parameters
    ----------
    path
        The folder, made as by `aiops.serving.new_files.begin_folder`: each run has its own.
    policy
        The policy as the settings name it.
    engine
        The engine whose events are recorded.
    now
        The time, in seconds.

    Attributes
    ----------
    error
        The reason for which it ended before the run; empty while it goes on.

    Raises
    ------
    UsageError
        When it cannot be written.
    """

    def __init__(self, path: Path, policy: str, engine: Engine, now: float) -> None:
        self._engine, self.error, self._said = engine, "", 0.0
        self._unrecorded = 0  # updates that are made already, and have no row yet
        self._ends_at = 0  # the version at which it ended before the run
        self._loop = asyncio.get_running_loop()
        self._record = RunRecord(engine, self._append)
        self.folder = new_files.begin_folder("record", path)
        env = CURRENT_ENVIRONMENT.get()
        salt, holder = partial(env.randbelow, 1 << 32), f"process {os.getpid()}"
        given = self.folder, SystemDisk(), holder, engine.options.run, salt
        try:
            self._files = StateFiles(*given, keep=True, flag=RECORD)
            writer = self._files.begin(engine, policy, None, now, Acks.WRITTEN, self._post)
            assert writer is not None, "there is a journal at this level"
            self._writer = writer
            if writer.why:
                raise UsageError(f"--record {path}: {writer.why}")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        engine.admission.incoming = CopiedIncoming  # a lent payload may change while it is written
        earlier = f", for {path} is there already" if self.folder != path else ""
        _log.info("recording this run in %s%s", self.folder, earlier)

    def note(self, event: Event) -> bool | None:
        """Record an event, unless the record is over.

        Returns what `aiops.engine.engine.Engine.handle` takes with the event.
        """
        if self.error:
            self._say(event.time)
            return None
        return self._record.note(event)

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
        """Record a steady exchange.

        Parameters as of `aiops.engine.steady.ExchangeRecord.exchanged`.
        """
        if self.error:
            self._say(time)
            return
        record, writer = self._record, self._writer
        given = leased, peer, numbers, gradient.coded, ticket, sums, followed
        flags, fields = exchange_fields(*given)
        if writer.exchange(record.next, time, flags, fields, gradient):
            record.next += 1
            return
        row = record.exchange_row(time, flags, fields, gradient)
        ended = writer.append(AppendRow(record.next - 1, row))
        if ended is not None:
            self._unrecorded = 1
            self._ended(ended)
            self._unrecorded = 0

    def end(self, now: float) -> None:
        """End the record with the run, or log again that it ended before."""
        self._writer.end(None if self.error else self._record.last(now))
        if not self.error and self._writer.why:  # it could not be synced
            self._ended(JournalEnded(now, self._writer.why))
        self._files.segments.remove_spares()
        self._files.close()
        if self.error:
            _log.error(
                "--record: %s is incomplete: it ends at version %d, the run at version %d",
                *(self.folder, self._ends_at, self._engine.version),
            )

    def discard(self) -> None:
        """Remove the folder: its run did not begin."""
        self._writer.end()
        self._files.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def forked(self) -> None:
        """Write no more in a fork: the folder is the parent's."""
        self.error, self._said = "a fork has no part in its parent's record", inf

    def _append(self, effect: AppendRow) -> None:
        ended = self._writer.append(effect)
        if ended is not None:
            self._ended(ended)

    def _post(self, event: Event) -> None:
        """Handle the end of the journal, which another thread has noticed, on the event loop."""
        if isinstance(event, JournalEnded):
            self._loop.call_soon_threadsafe(self._ended, event)

    def _ended(self, event: JournalEnded) -> None:
        if self.error:
            return
        self._ends_at = self._engine.version - self._unrecorded
        self.error = (
            f"--record: the record is over at version {self._ends_at} and incomplete: {event.why};"
            " the run goes on without one until the server is started again"
        )
        _log.error("%s", self.error)
        self._said = event.time

    def _say(self, now: float) -> None:
        if now >= self._said + _MINUTE:
            _log.error("%s", self.error)
            self._said = now
