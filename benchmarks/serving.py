"""A server as a process, for benchmarks that connect to it themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiops.lab.processes import ChildProcess, command
from aiops.lab.training_run import START_DEADLINE

_GRACE = 1.0  # seconds that it has to end by itself


@contextmanager
def serving(policy: str, *flags: str, cache: Path | None = None) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own; yield its URL and the process's number.

    ``cache`` is the folder that it takes for the user's cache (``XDG_CACHE_HOME``).

    Raises
    ------
    ProcessFailed
        When it ends before it listens; its standard error has the reason.
    """
    words = command("aiops.server", "--port=0", f"--policy={policy}", "--log-level=warning", *flags)
    environment = None if cache is None else {**os.environ, "XDG_CACHE_HOME": str(cache.resolve())}
    with ChildProcess(
        "the server", words, environment=environment, lines=True, grace=_GRACE
    ) as server:
        yield server.first_line(START_DEADLINE), server.popen.pid
