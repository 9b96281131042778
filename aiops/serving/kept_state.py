"""Keep a server's state in a folder: recover it, and journal what happens from then on."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aiops._version import __version__
from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.recorder import AppendRow, Recorder
from aiops.durable.rows import LEASED
from aiops.engine.capture import Capture, policy_state
from aiops.engine.capture import capture as captured
from aiops.engine.engine import Engine
from aiops.engine.events import Effect, Event, Resumed, Tick
from aiops.errors import UsageError
from aiops.model.arena import Arena
from aiops.model.layout import Ints
from aiops.serving.snapshot_writer import SnapshotWriter
from aiops.serving.state_files import Clock, StateFiles
from aiops.state.row_kinds import RowKind
from aiops.state.snapshot_file import SnapshotHeader

_log = logging.getLogger("aiops.server")

_SOON = 0.02
"""Seconds after which it is tried again to find the engine between two updates."""


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
    init
        The file of a model to begin with, which a state must not have before.
    clock
        The server's clock; it goes on from the state's time.
    post, post_threadsafe
        Post an event; the second from any thread.

    Attributes
    ----------
    recorder
        Handles the server's events from here on.
    resumes
        Whether there was a state already.

    Raises
    ------
    UsageError
        When the folder cannot be read or written, is damaged, or holds a run with other settings;
        when the policy has attributes that cannot be kept.
    """

    def __init__(
        self,
        files: StateFiles,
        engine: Engine,
        policy: str,
        acks: Acks,
        init: Path | None,
        clock: Clock,
        post: Callable[[Event], None],
        post_threadsafe: Callable[[Event], object],
    ) -> None:
        self._files, self._clock, self._post = files, clock, post
        self._due: asyncio.TimerHandle | None = None
        policy_state(engine.policy)  # or refuse one that cannot be kept, at once
        began = time.perf_counter()
        recovered = files.recover(engine, policy)
        if recovered is not None and init is not None:
            raise UsageError(
                f"--init {init} is for a new state, and {files.folder} is at version"
                f" {engine.version:,} already: leave it out, or name another --state"
            )
        if recovered is not None:
            clock.go_on(recovered.time)
        self._outstanding = () if recovered is None else recovered.outstanding
        self.resumes = recovered is not None
        self._writer = files.begin(engine, policy, recovered, clock(), acks, post_threadsafe)
        row = 1 if recovered is None else recovered.row
        self._snapshots = SnapshotWriter(files.disk, files.folder)
        self._captured = 0  # the row of the last snapshot
        self.recorder = Recorder(engine, CommitGate(acks), row + 1)
        if recovered is None:
            _log.info("%s: a new state, run %s", files.folder, files.run)
            return
        _log.info(
            "%s: generation %d of run %s: %d rows, version %d, %d clients known, in %.2f s",
            *(files.folder, files.generation, files.run, row, engine.version),
            *(len([*engine.membership]), time.perf_counter() - began),
        )

    def actions(
        self, reply: Callable[[EncodedReply], None]
    ) -> Mapping[type[Any], Callable[[Any], Event | None]]:
        """Return what carries out the effects that only a server with a state has.

        ``reply`` sends an answer that is encoded already.
        """
        return {AppendRow: self._writer.append, EncodedReply: reply}

    def begin(
        self, loop: asyncio.AbstractEventLoop, every: float, perform: Callable[[Effect], None]
    ) -> None:
        """Go on where the earlier server ended, if there was one, and take snapshots.

        Parameters
        ----------
        loop, every
            The event loop, and the seconds between two snapshots on it.
        perform
            Carries out an effect.
        """
        self._due = loop.call_later(every, self._snapshot, loop, every)
        if not self.resumes:
            return
        self._post(Resumed(self._clock(), self._files.generation))
        for effect in self._outstanding:
            perform(effect)
        self._outstanding = ()
        self._post(Tick(self._clock()))

    def exchanged(
        self,
        time: float,
        leased: bool,
        peer: int,
        numbers: tuple[int, ...],
        gradient: Arena,
        ticket: int,
        sums: Ints,
    ) -> None:
        """Append a steady exchange's row.

        Parameters as of `aiops.engine.steady.ExchangeRecord.exchanged`.
        """
        recorder = self.recorder
        if not recorder.recording:
            return
        row = recorder.exchanged(peer, numbers, ticket, sums)
        number, flags = recorder.next - 1, LEASED if leased else 0
        ended = self._writer.write(number, RowKind.STEADY, time, flags, row, gradient.data.data)
        if ended is not None:
            self._post(ended)

    def _snapshot(self, loop: asyncio.AbstractEventLoop, every: float) -> None:
        """Begin to write a snapshot, if anything has happened; when updates run, a bit later."""
        engine, pause = self.recorder.engine, every
        if self._snapshots.busy or not self._changed:
            pass
        elif engine.training is None or not (engine.idle and not engine.working):
            pause = min(every, _SOON)
        else:

            def done(capture: Capture) -> None:
                loop.call_soon_threadsafe(capture.release)

            try:
                self._take(partial(self._snapshots.begin, done=done))
            except MemoryError:
                _log.error("no memory for a snapshot: it is tried again in %g s", every)
        self._due = loop.call_later(pause, self._snapshot, loop, every)

    @property
    def _changed(self) -> bool:
        """True unless the last snapshot has all; without a journal only a snapshot has anything."""
        last = self._captured if not self._snapshots.why else 0
        return self.recorder.next - 1 != last or not self.recorder.recording

    def _take(self, write: Callable[[Capture, SnapshotHeader], object]) -> None:
        """Capture the engine, between two events, and have it written."""
        engine, files = self.recorder.engine, self._files
        row = self.recorder.next - 1
        capture = captured(engine, row)
        try:
            capture.copy()
        except BaseException:
            capture.release()
            raise
        self._captured = row
        versions = [engine.version, *(table.version for table in engine.tables)]
        wrote = {"aiops": __version__, "numpy": np.__version__, "byteorder": sys.byteorder}
        header = SnapshotHeader(
            *(row, files.generation, files.run, versions),
            *(capture.settings, wrote, capture.owners),
        )
        write(capture, header)

    def _take_last(self) -> None:
        """Write a last snapshot, so that the next start need not replay the journal."""
        engine = self.recorder.engine
        if not self._changed or engine.training is None or not engine.idle or engine.working:
            return

        def write(capture: Capture, header: SnapshotHeader) -> None:
            self._snapshots.write(capture, header)
            capture.release()

        self._take(write)

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
            "snapshot": self._captured,
            "snapshot_error": self._snapshots.why,
        }

    def end(self, *, trusted: bool = True) -> None:
        """Write a last snapshot, close the journal, and unlock the folder.

        ``trusted``: False after an internal error, when only the journal is sure to be right.
        """
        self.stop()
        self._snapshots.wait()
        try:
            if trusted:
                self._take_last()
        finally:
            self._close()

    def stop(self) -> None:
        """Begin no further snapshot."""
        if self._due is not None:
            self._due.cancel()

    def _close(self) -> None:
        self._writer.end()
        self._files.close()
