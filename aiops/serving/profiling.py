"""Measure the time that a server spends, by purpose: ``--profile FILE.json``."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from aiops.errors import UsageError
from aiops.serving import new_files
from aiops.store.resources import Measure

WHAT = ("receive", "decode", "policy", "upload", "kernel", "download", "send")
"""The purposes: bytes read, parsed and surveyed; codecs; decisions; updates; answers.

Uploads and downloads are those of gradients and parameters, to and from a device.
"""

_RECEIVE = "buffer_updated"
_PROTOCOL = (
    *("connection_made", "connection_lost", "eof_received", "get_buffer"),
    *("pause_writing", "resume_writing"),
)

_log = logging.getLogger("aiops.server")


class Profile:
    """Seconds by purpose, on the event loop and beside it.

    Each moment counts once, under the innermost name; threads that work at the same time add up.
    Counting costs about a microsecond per call.

    Parameters
    ----------
    path
        The file to write at the end, opened as by `aiops.serving.new_files.begin`; checked now.
    clock
        Returns the time in seconds.

    Raises
    ------
    UsageError
        When the file cannot be written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path, self._clock = path, clock
        self._seconds = dict.fromkeys(WHAT, 0.0)
        self._calls = dict.fromkeys(WHAT, 0)
        self._since = clock()
        self._lock = threading.Lock()
        self._local = threading.local()
        new_files.discard(new_files.begin("profile", path))

    def measure(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and whose time counts for ``what``."""
        clock, local = self._clock, self._local

        @wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            within = getattr(
                local, "inner", 0.0
            )  # seconds counted so far in the call around this one
            local.inner = 0.0
            began = clock()
            try:
                return function(*args, **named)
            finally:
                spent = clock() - began
                with self._lock:
                    self._seconds[what] += spent - local.inner
                    self._calls[what] += 1
                local.inner = within + spent

        return counted

    def report(self) -> dict[str, Any]:
        """Return seconds, share of the time since the start, and calls, by purpose."""
        total = max(self._clock() - self._since, 1e-9)
        with self._lock:
            counted = {
                what: {
                    "seconds": round(self._seconds[what], 6),
                    "share": round(self._seconds[what] / total, 4),
                    "calls": self._calls[what],
                }
                for what in WHAT
            }
        return {"seconds": round(total, 3), **counted}

    def write(self) -> None:
        """Write the report; an error is only logged, and the server's end goes on."""
        try:
            file = new_files.begin("profile", self._path)
        except UsageError as error:
            _log.error("%s", error)
            return
        try:
            file.write((json.dumps(self.report(), indent=1) + "\n").encode())
            file.close()
        except OSError as error:
            _log.error("--profile %s: %s", file.name, error.strerror)
            new_files.discard(file)
        else:
            _log.info("profile written to %s", file.name)


class Receiving(asyncio.BufferedProtocol):
    """A connection's protocol, with the time spent on received bytes counted."""

    def __init__(self, protocol: asyncio.BufferedProtocol, measure: Measure) -> None:
        for name in _PROTOCOL:
            setattr(self, name, getattr(protocol, name))
        setattr(self, _RECEIVE, measure("receive", protocol.buffer_updated))
