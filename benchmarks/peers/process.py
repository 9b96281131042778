"""The processes of one peer: a server and its workers, started, told what to do, timed and ended.

Whatever happens, nothing hangs and nothing survives: every order has a deadline, every child is
the leader of a session that is killed as a whole, and the kernel kills it when we die. Temporary
files of a team's processes go to a folder in memory, which is removed with them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.net.cpu_count import BLAS
from benchmarks.peers.base import Job

_ROOT = Path(__file__).resolve().parents[2]
_ONE_THREAD = (*BLAS, "NUMBA_NUM_THREADS")
_PR_SET_PDEATHSIG = 1


READS = ("whole", "mixed", "torn")
"""How parameters can read, from best to worst; see `benchmarks.peers.base.check_worker`."""


class PeerFailed(Exception):
    """A peer hung, died or gave wrong results; the text says which of its processes, and how."""


@dataclass(frozen=True)
class Lap:
    """One worker's cycles: when the first began and the last ended, and the seconds of each."""

    start: float
    end: float
    seconds: npt.NDArray[np.float64]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere do nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """Return the processes in the session that this one leads (Linux; elsewhere none)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            _state, _parent, _group, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == leader:
                found.append(int(stat.parent.name))
    return found


def having(variable: str) -> list[int]:
    """Return the processes that were started with this in their environment (Linux; else none).

    A server's shards lead sessions of their own, and outlive one that is killed.
    """
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


class Child:
    """One process, started at once; orders go through a pipe and its stderr into a file."""

    def __init__(self, role: str, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by reap
        self.pipe, theirs = multiprocessing.Pipe()
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        env = dict(os.environ) | dict.fromkeys(_ONE_THREAD, "1") | dict(environment)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=env,
                start_new_session=True,  # Ctrl-C reaches us alone, and we end it with its children
            )
        self.tell(role)

    def tell(self, order: Any) -> None:
        """Send an order; a dead child is noticed when its answer is awaited."""
        with suppress(OSError):
            self.pipe.send(order)

    def answer(self) -> Any:
        """Take the answer that is there; PeerFailed when it is an error or the child is gone."""
        try:
            fine, value = self.pipe.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise PeerFailed(
                f"{self.name} ended with exit code {self._process.returncode}{self.complaint()}"
            ) from None
        if not fine:
            raise PeerFailed(f"{self.name}: {str(value).partition(chr(10))[0]}")
        return value

    def complaint(self) -> str:
        """Return the last line it wrote, as the end of a sentence."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"; it said: {lines[-1].strip()}" if lines else ""

    def end(self) -> None:
        """Kill its whole process group at once, and then who left the group for one of its own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in session(self._process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the killed process, and let go of its pipe and log."""
        self._process.wait()
        self.pipe.close()
        self._log.close()


class Team:
    """A peer's server and workers; persistent, quiet until told to run.

    Args:
        job: what to do.
        deadline: seconds that any single order may take.
        environment: variables to add to that of the processes.
        name: what messages call it; the peer's unless given.

    """

    def __init__(
        self, job: Job, deadline: float, environment: Mapping[str, str], name: str = ""
    ) -> None:
        self.job = job
        self.name = name or job.peer
        self.address = ""
        self.total = 0
        self._deadline = deadline
        self._environment = dict(environment)
        self._children: list[Child] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def launch(self) -> None:
        """Start all processes, and the server in its own."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._scratch = tempfile.TemporaryDirectory(
            prefix="aiops-", dir=memory, ignore_cleanup_errors=True
        )
        self._environment["TMPDIR"] = self._scratch.name
        server = self._add("server", f"{self.name}'s server")
        for index in range(self.job.workers):
            self._add("worker", f"{self.name}'s worker {index}")
        server.tell(("serve", self.job))

    def connect(self) -> None:
        """Wait for the server's address and connect the workers."""
        server, *workers = self._children
        self.address = self._gather([server])[0]
        for index, worker in enumerate(workers):
            worker.tell(("join", self.job, self.address, index))
        self._gather(workers)

    def run(self, cycles: int) -> list[Lap]:
        """Have every worker run so many cycles; return their laps."""
        workers = self._children[1:]
        for worker in workers:
            worker.tell(("run", cycles))
        laps: list[Lap] = self._gather(workers)
        self.total += cycles * len(workers)
        return laps

    def finish(self) -> str:
        """Check what the server and the workers hold, close, and return how the workers' read.

        Raises PeerFailed when the parameters are not exactly the sum of all updates, or when the
        peer does not close in good order.
        """
        server, *workers = self._children
        reads = self._all(workers, ("check", self.total))
        self._all([server], ("check", self.total))
        self.close()
        return str(max(reads, key=READS.index))

    def close(self) -> None:
        """Have the workers say goodbye and the server end; PeerFailed when one does not."""
        server, *workers = self._children
        self._all(workers, ("close",))
        self._all([server], ("close",))

    def server_process(self) -> int:
        """Return the number of the process that serves."""
        return int(self._all(self._children[:1], ("process",))[0])

    def kill(self) -> None:
        """End everything, however it stands; safe to call at any time and twice."""
        for child in self._children:
            child.end()
        while self._children:
            self._children.pop().reap()
        if self._scratch is not None:
            for pid in having(f"TMPDIR={self._scratch.name}"):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._scratch.cleanup()

    def _add(self, role: str, name: str) -> Child:
        child = Child(role, name, self._environment)
        self._children.append(child)
        return child

    def _all(self, children: Sequence[Child], order: tuple[Any, ...]) -> list[Any]:
        for child in children:
            child.tell(order)
        return self._gather(children)

    def _gather(self, children: Sequence[Child]) -> list[Any]:
        """Collect one answer from each; a death anywhere in the team ends the wait."""
        until = time.monotonic() + self._deadline
        answers: dict[Connection, Any] = {}
        everybody = {child.pipe: child for child in self._children}
        while len(answers) < len(children):
            waiting = [pipe for pipe in everybody if pipe not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                late = [child.name for child in children if child.pipe not in answers]
                raise PeerFailed(f"no answer from {', '.join(late)} within {self._deadline:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[pipe] = everybody[pipe].answer()
        return [answers[child.pipe] for child in children]
