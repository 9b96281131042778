"""A server's ledger as a file: one JSON object per line, for plots of bytes against time."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiops.errors import UsageError

EVERY = 1.0
"""Seconds between two lines."""

_log = logging.getLogger("aiops.server")


class LedgerFile:
    """Writes what `aiops.ledger.Ledger.report` returns, with the seconds since the start.

    Parameters
    ----------
    path
        Overwritten.

    Raises
    ------
    UsageError
        When it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--ledger {path}: {error.strerror}") from None

    def write(self, seconds: float, account: Mapping[str, Any]) -> None:
        """Add a line. A full disk is no reason to end training: it is logged, once."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({"seconds": round(seconds, 3), **account}) + "\n")
            self._file.flush()
        except OSError as error:
            _log.error("--ledger %s: %s; it ends here", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """End it; may be called twice."""
        try:
            self._file.close()
        except OSError as error:
            _log.error("--ledger %s: %s", self._path, error.strerror)
