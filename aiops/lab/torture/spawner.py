"""Fork processes from one that has imported everything: a server starts in some ten milliseconds.

A process that is forked is as real as any other, and its death by SIGKILL is the same; only its
imports are not repeated. Each ends when the process that asked for it ends.

The spawner rehearses: a first server and a first worker tell which modules they needed, and it
imports them, too. It has no thread and no socket, so there is none that a fork would lack.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiops.errors import AiopsError
from aiops.lab.processes import PipedProcess
from aiops.lab.torture.checker import CellRange
from aiops.lab.torture.pusher import PusherPlan, push_on
from aiops.net.child_guard import ChildGuard
from aiops.net.process_tree import send

_IMPORTS = ("aiops.cli.serve", "aiops.cli.main", "aiops.serving.main", "aiops.client.sync.worker")
_POLL = 0.002  # seconds between looks, where the system cannot tell of a process's end
_PATIENCE = 60.0  # seconds for a rehearsal
_MODULES = "AIOPS_TORTURE_MODULES"  # a rehearsing process writes its modules there


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
        # Until the spawner asks for its status it is a zombie, so the number is not used again.
        self._end = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1

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
        if self._status is None and self._ended(seconds):
            self._status = self._spawner.ask("status", self.pid)
            self.close()
        return self._status

    def close(self) -> None:
        """Give back what tells of its end; it may be called twice."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def _ended(self, seconds: float) -> bool:
        if self._end >= 0:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            return bool(poll.poll(1000 * seconds))
        until = time.monotonic() + seconds
        while not self._spawner.ask("ended", self.pid):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL)
        return True

    def text(self) -> str:
        """Return what it has written so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Spawner(PipedProcess):
    """The process that forks, for one thread.

    Numba is off: a codec's loops would be compiled by each worker again, for seconds. NumPy gives
    the same bits.
    """

    def __init__(self) -> None:
        super().__init__("the spawner", _run, {"NUMBA_DISABLE_JIT": "1"})

    def ask(self, *request: Any) -> Any:
        """Return its answer to a request."""
        self.send(request)
        return self.receive()

    def start(
        self,
        target: Callable[..., None],
        output: Path,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """Fork a process that calls a function of a module, then ends."""
        pid = self.ask("start", target, str(output), arguments, dict(environment or {}))
        return Forked(self, pid, output)

    def rehearse(self) -> None:
        """Have a server and a worker run once, and import what they needed.

        Raises
        ------
        AiopsError
            When one of them does not do its part.
        """
        with tempfile.TemporaryDirectory(prefix="torture-rehearsal-") as name:
            _rehearse(self, Path(name))
            for part in ("server", "worker"):
                self.ask("import", (Path(name) / f"{part}.modules").read_text().split())


def _rehearse(spawner: Spawner, folder: Path) -> None:
    def start(part: str, target: Callable[..., None], *arguments: Any) -> Forked:
        environment = {_MODULES: str(folder / f"{part}.modules")}
        return spawner.start(target, folder / part, *arguments, environment=environment)

    def end(process: Forked, part: str) -> None:
        process.signal(signal.SIGTERM)
        if process.wait(_PATIENCE) != 0:
            raise AiopsError(f"the {part} of the rehearsal failed: {process.text().strip()}")

    flags = ["--port", "0", "--kernels", "numpy", "--acks", "durable"]
    server = start("server", run_server, [*flags, "--state", str(folder / "state")])
    until = time.monotonic() + _PATIENCE
    while not (found := _url(server)):
        if server.wait(_POLL) is not None or time.monotonic() > until:
            raise AiopsError(f"the server of the rehearsal failed: {server.text().strip()}")
    plan = PusherPlan(
        url=found,
        name="rehearsal",
        size=1,
        cells=CellRange(0, 1),
        scale=1.0,
        pause=0.0,
        own=False,
        log=str(folder / "log"),
        timeout=_PATIENCE,
    )
    worker = start("worker", push_on, plan)
    if worker.wait(_PATIENCE) != 0:
        raise AiopsError(f"the worker of the rehearsal failed: {worker.text().strip()}")
    end(server, "server")


def _url(server: Forked) -> str:
    """Return the line that a server writes when it listens, or nothing."""
    lines = server.text().splitlines(keepends=True)
    return next((line.strip() for line in lines if line.startswith("aiops://")), "")


def run_server(flags: list[str]) -> None:
    """Run ``python -m aiops.server``."""
    import runpy

    sys.argv = ["aiops.server", *flags]
    runpy.run_module("aiops.server", run_name="__main__", alter_sys=True)


def _run(pipe: Connection) -> None:
    _import(_IMPORTS)
    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:
            return
        pipe.send(_fork(pipe, *rest) if kind == "start" else _REQUESTS[kind](*rest))


def _import(names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # made by a module that is imported, not by a file
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all these modules


def _fork(
    pipe: Connection,
    target: Callable[..., None],
    output: str,
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        pipe.close()
        os.environ.update(environment)
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
        if _MODULES in os.environ:
            names = [name for name in sys.modules if not name.startswith("__")]
            Path(os.environ[_MODULES]).write_text("\n".join(names))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


_REQUESTS: Mapping[str, Callable[..., Any]] = {
    "import": _import,
    "ended": _ended,
    "status": _status,
}
