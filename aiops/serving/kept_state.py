"""Keep a server's state in a folder: recover it, and journal what happens from then on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.recorder import AppendRow, Recorder
from aiops.durable.rows import LEASED
from aiops.engine.engine import Engine
from aiops.engine.events import Apply, Event, Resumed, Tick
from aiops.errors import UsageError
from aiops.model.arena import Arena
from aiops.model.layout import Ints
from aiops.serving.state_files import Clock, StateFiles
from aiops.state.row_kinds import RowKind

_log = logging.getLogger("aiops.server")


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

    Attributes
    ----------
    recorder
        Handles the server's events from here on.
    resumes
        Whether there was a state already.

    Raises
    ------
    UsageError
        When the folder cannot be read or written, is damaged, or holds a run with other settings.
    """

    def __init__(
        self,
        files: StateFiles,
        engine: Engine,
        policy: str,
        acks: Acks,
        clock: Clock,
        post: Callable[[Event], None],
        post_threadsafe: Callable[[Event], object],
    ) -> None:
        self._files, self._clock, self._post = files, clock, post
        began = time.perf_counter()
        recovered = files.recover(engine, policy)
        if recovered is not None:
            clock.go_on(recovered.time)
        self._outstanding: Apply | None = None if recovered is None else recovered.outstanding
        self.resumes = recovered is not None
        self._writer = files.begin(engine, policy, recovered, clock(), acks, post_threadsafe)
        row = 1 if recovered is None else recovered.row
        self.recorder = Recorder(engine, CommitGate(acks), row + 1)
        if recovered is None:
            _log.info("%s: a new state, run %s", files.folder, files.run)
            return
        _log.info(
            "%s: generation %d of run %s: %d rows, version %d, %d clients known, in %.2f s",
            *(files.folder, files.generation, files.run, row, engine.version),
            *(len([*engine.membership]), time.perf_counter() - began),
        )

    def check_new(self, init: Path | None) -> None:
        """Refuse a model to begin with where there is a state.

        Raises
        ------
        UsageError
            If so.
        """
        if init is not None and self.resumes:
            raise UsageError(
                f"--init {init} is for a new state, and {self._files.folder} is at version"
                f" {self.recorder.engine.version:,} already: leave it out, or name another --state"
            )

    def actions(
        self, reply: Callable[[EncodedReply], None]
    ) -> Mapping[type[Any], Callable[[Any], Event | None]]:
        """Return what carries out the effects that only a server with a state has.

        ``reply`` sends an answer that is encoded already.
        """

        def replied(effect: EncodedReply) -> None:
            reply(effect)

        return {AppendRow: self._writer.append, EncodedReply: replied}

    def resume(self, perform: Callable[[Apply], None]) -> None:
        """Go on where the earlier server ended; ``perform`` carries out an effect."""
        if not self.resumes:
            return
        self._post(Resumed(self._clock(), self._files.generation))
        if self._outstanding is not None:
            perform(self._outstanding)
            self._outstanding = None
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
        }

    def end(self) -> None:
        """Sync and close the journal, and unlock the folder."""
        self._writer.end()
        self._files.close()
