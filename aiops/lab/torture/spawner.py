"""Fork processes from one that has imported everything: a server starts in some ten milliseconds.

A process that is forked is as real as any other, and its death by SIGKILL is the same; only its
imports are not repeated. Each ends when the process that asked for it ends.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiops.lab.processes import PipedProcess, send
from aiops.net.child_guard import ChildGuard

_IMPORTS = ("aiops.cli.serve", "aiops.cli.main", "aiops.serving.main", "aiops.client.sync.worker")
_POLL = 0.002  # seconds between looks at a process that is to end


class Forked:
    """A process that a `Spawner` has forked.

    Attributes
    ----------
    pid
        Its number.
    output
        The file with its standard output and standard error.
    """

    def __init__(self, spawner: Spawner, pid: int, output: Path) -> None:
        self._spawner, self.pid, self.output = spawner, pid, output
        self._status: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended and that is known."""
        if self._status is None:
            send(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait(60.0)

    def wait(self, seconds: float) -> int | None:
        """Return its exit status (-9: by signal 9), or None if it goes on for ``seconds``."""
        if self._status is None:
            self._status = self._spawner.ask("wait", self.pid, seconds)
        return self._status

    def text(self) -> str:
        """Return what it has written so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Spawner(PipedProcess):
    """The process that forks."""

    def __init__(self) -> None:
        super().__init__("the spawner", _run)

    def ask(self, *request: Any) -> Any:
        """Return its answer to a request."""
        self.send(request)
        return self.receive()

    def start(self, target: Callable[..., None], output: Path, *arguments: Any) -> Forked:
        """Fork a process that calls a function of a module, then ends."""
        return Forked(self, self.ask("start", target, str(output), arguments), output)


def run_server(flags: list[str]) -> None:
    """Run ``python -m aiops.server``."""
    import runpy

    sys.argv = ["aiops.server", *flags]
    runpy.run_module("aiops.server", run_name="__main__", alter_sys=True)


def _run(pipe: Connection) -> None:
    for name in _IMPORTS:
        importlib.import_module(name)
    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:
            return
        pipe.send(_fork(pipe, *rest) if kind == "start" else _wait(*rest))


def _fork(
    pipe: Connection, target: Callable[..., None], output: str, arguments: tuple[Any, ...]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        pipe.close()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        ChildGuard()  # the one of the parent is a thread, and threads are not forked
        target(*arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL)
