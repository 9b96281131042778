"""A server as a process, for benchmarks that talk to it themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.process import die_with_parent

_MERCY = 1.0  # seconds that it has to end by itself


@contextmanager
def serving(policy: str, *flags: str, cache: Path | None = None) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own; give its URL and the process's number.

    ``cache`` is the folder that it takes for the user's cache (``XDG_CACHE_HOME``).

    Raises
    ------
    RuntimeError
        When it ends before it listens; it has said why.
    """
    command = [sys.executable, "-m", "aiops.server", "--port", "0", "--policy", policy]
    command += ["--log-level", "warning", *flags]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=None if cache is None else {**os.environ, "XDG_CACHE_HOME": str(cache.resolve())},
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"`{' '.join(command)}` ended without printing a URL")
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(_MERCY)
            except subprocess.TimeoutExpired:
                process.kill()
