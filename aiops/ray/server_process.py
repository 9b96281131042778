"""An ``aiops.server`` process that an actor runs on its node, and that ends with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from aiops.common.formatting import ending
from aiops.errors import UsageError
from aiops.net.process_tree import Lines

START = 600.0
"""Seconds that a server may take until it listens: it may have a large state to read."""

_STOP = 120.0  # seconds that a server may take to write what it has to keep


class ServerProcess:
    """An ``aiops.server`` that ends with this process; it listens when this has been made.

    Parameters
    ----------
    name
        What errors call it.
    token
        What clients must know.
    flags
        Those of `aiops serve`.

    Attributes
    ----------
    url
        The address that it listens at.

    Raises
    ------
    UsageError
        When it does not begin to listen; the text has the last line of its log.
    """

    def __init__(self, name: str, token: str, flags: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AIOPS_")}
        environment["AIOPS_TOKEN"] = token
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "aiops.net.child_guard", "aiops.server", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self._words = deque[str](maxlen=1)
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        self.url: str = self._first_line(name)

    @property
    def last_words(self) -> str:
        """The last line of its log, after a colon; empty: there is none."""
        self._reader.join(1.0)
        return f": {self._words[-1]}" if self._words else ""

    def stop(self) -> None:
        """Have it end; kill it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(_STOP)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def _first_line(self, name: str) -> str:
        pipe = self.popen.stdout
        assert pipe is not None
        there, _, _ = select.select([pipe], [], [], START)
        line = pipe.readline().decode().strip() if there else ""
        if line:
            return line
        if not there:
            self.popen.kill()
            raise UsageError(f"{name} did not begin to listen in {START:g} s")
        status = self.popen.wait()
        raise UsageError(f"{name} {ending(status)} before it listened{self.last_words}")

    def _pass_on(self) -> None:
        """Hand its log on to this actor's, which Ray shows."""
        pipe, lines = self.popen.stderr, Lines()
        assert pipe is not None
        while True:
            chunk = os.read(pipe.fileno(), 1 << 16)
            for line in lines.feed(chunk):
                self._words.append(line)
                print(line, file=sys.stderr, flush=True)
            if not chunk:
                return
