"""Write the files that grow with a run: the record of its events, the ledger of its bytes.

Each run has its own (`aiops.serving.new_files.begin`). A full disk is no reason to end training: a
file that cannot be written any more ends, and its `error` says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiops.common import forks
from aiops.engine.engine import Engine
from aiops.engine.events import Event
from aiops.engine.journal import Journal
from aiops.errors import UsageError
from aiops.serving import new_files

EVERY = 1.0
"""Seconds between two lines."""

_log = logging.getLogger("aiops.server")


class RecordFile:
    """Records the events of one engine for `aiops replay`: a `Journal` in a file.

    Parameters
    ----------
    path
        The file, opened as by `aiops.serving.new_files.begin`: each run has its own.
    policy
        The policy as the settings name it.
    engine
        The engine whose events are recorded.

    Attributes
    ----------
    error
        The reason for which it ended before the run; empty while it goes on.

    Raises
    ------
    UsageError
        When it cannot be written.
    """

    def __init__(self, path: Path, policy: str, engine: Engine) -> None:
        self._engine = engine
        self._file = new_files.begin("record", path)
        try:
            self._journal = Journal(self._file, policy, engine)
        except OSError as error:
            new_files.discard(self._file)
            raise UsageError(f"--record {path}: {error.strerror}") from None
        self.error = ""
        self._ends_at = 0  # the version at which it ended before the run
        earlier = f", for {path} is there already" if self._file.name != str(path) else ""
        _log.info("recording this run in %s%s", self._file.name, earlier)

    def note(self, event: Event) -> bool | None:
        """Record an event; if the file cannot take it, log that and end the record.

        Returns what `aiops.engine.engine.Engine.handle` takes with the event.
        """
        if self.error:
            return None
        try:
            return self._journal.note(event)
        except OSError as error:
            self._cut(error, self._engine.version)
            return None

    def exchanged(self, *exchange: Any) -> None:
        """Record a steady exchange, as `Journal.exchanged`; if the file cannot take it, end it."""
        if self.error:
            return
        try:
            self._journal.exchanged(*exchange)
        except OSError as error:
            self._cut(error, self._engine.version - 1)  # its update is made already

    def end(self, now: float) -> None:
        """End the record with the run, or log again that it ended before."""
        if not self.error:
            try:
                self._journal.end(now)
                self._file.close()
            except OSError as error:
                self._cut(error, self._engine.version)
        else:
            _log.error(
                "--record: %s is incomplete: it ends at version %d, the run at version %d",
                *(self._file.name, self._ends_at, self._engine.version),
            )

    def discard(self) -> None:
        """Remove the file: its run did not begin."""
        new_files.discard(self._file)

    def forked(self) -> None:
        """Let go of it in a fork: its buffered bytes are the parent's to write."""
        if not self._file.closed:
            forks.blank(self._file.fileno())

    def _cut(self, error: OSError, version: int) -> None:
        """End the record before the run does: what follows a gap could not be replayed."""
        self._ends_at = version
        self.error = (
            f"--record: {self._file.name} ends at version {self._ends_at} and is incomplete:"
            f" {error.strerror}; the run goes on without a record until the server is started again"
        )
        _log.error("%s", self.error)
        with contextlib.suppress(OSError):  # it tries to write what it could not write before
            self._file.close()


class LedgerFile:
    """Writes reports of `aiops.bandwidth.byte_accounting.Ledger`, with the seconds since the start.

    Parameters
    ----------
    path
        The file, opened as by `aiops.serving.new_files.begin`: each run has its own.

    Attributes
    ----------
    error
        The reason for which it ended before the run; empty while it goes on.

    Raises
    ------
    UsageError
        When it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = new_files.begin("ledger", path)
        self.error = ""
        if self._file.name != str(path):
            _log.info("--ledger: %s is there already; this run's is %s", path, self._file.name)

    def write(self, seconds: float, account: Mapping[str, Any]) -> None:
        """Add a line; if the file cannot take it, log that, once, and end the file."""
        if self._file.closed:
            return
        try:
            line = json.dumps({"seconds": round(seconds, 3), **account}) + "\n"
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            self._end(error, f"after {seconds:.0f} s")
            self.close()

    def forked(self) -> None:
        """Let go of it in a fork: its buffered bytes are the parent's to write."""
        if not self._file.closed:
            forks.blank(self._file.fileno())

    def close(self) -> None:
        """End it; may be called twice."""
        try:
            self._file.close()
        except OSError as error:
            self._end(error, "with this run")

    def discard(self) -> None:
        """Remove the file: its run did not begin."""
        new_files.discard(self._file)

    def _end(self, error: OSError, when: str) -> None:
        if not self.error:
            self.error = f"--ledger {self._file.name} ends {when}: {error.strerror}"
            _log.error("%s", self.error)
