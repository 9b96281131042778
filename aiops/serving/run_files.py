"""Write the ledger of a run's bytes, a file that grows.

Each run has its own (`aiops.serving.new_files.begin`). A full disk is no reason to end training: a
file that cannot be written any more ends, and its `error` says so.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiops.common import forks
from aiops.serving import new_files

EVERY = 1.0
"""Seconds between two lines."""

_log = logging.getLogger("aiops.server")


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
