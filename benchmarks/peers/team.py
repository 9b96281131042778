"""The processes of one peer: a server and its workers, started, given orders, timed and ended.

Every order has a deadline. Every process ends with this one, and is killed with its whole session
(`aiops.lab.processes`). Temporary files of a team's processes go to a folder in memory, which is
removed with them.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiops.lab.processes import PipedProcess, ProcessFailed
from aiops.net.process_tree import having, send
from benchmarks.footprint import family
from benchmarks.peers.base import Job, Lap
from benchmarks.peers.orders import obey
from benchmarks.processor_time import ProcessorMeter, ProcessorTime

_ROOT = Path(__file__).resolve().parents[2]

_FOLDER = "TMPDIR"

READS = ("whole", "mixed", "torn")
"""How parameters can read, from best to worst; see `benchmarks.peers.base.check_worker`."""


class Team:
    """A peer's server and workers; persistent, idle until they are given an order.

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
        self._children: list[PipedProcess] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._server_meter, self._worker_meter = ProcessorMeter(), ProcessorMeter()

    def launch(self) -> None:
        """Start all processes, and the server in its own."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._scratch = tempfile.TemporaryDirectory(
            prefix="aiops-", dir=memory, ignore_cleanup_errors=True
        )
        self._environment[_FOLDER] = self._scratch.name
        server = self._add("server", f"{self.name}'s server")
        for index in range(self.job.workers):
            self._add("worker", f"{self.name}'s worker {index}")
        server.send(("serve", self.job))

    def connect(self) -> None:
        """Wait for the server's address and connect the workers."""
        server, *workers = self._children
        self.address = self._gather([server])[0]
        for index, worker in enumerate(workers):
            worker.send(("join", self.job, self.address, index))
        self._gather(workers)

    def run(self, cycles: int) -> list[Lap]:
        """Have every worker run ``cycles`` cycles; return their laps."""
        workers = self._children[1:]
        for worker in workers:
            worker.send(("run", cycles))
        laps: list[Lap] = self._gather(workers)
        self.total += cycles * len(workers)
        return laps

    def processor_time(self) -> tuple[ProcessorTime, ProcessorTime] | None:
        """Return what the server, and all workers together, have used since the call before.

        The server's is that of all processes of the team that are not its workers'. None where
        the system does not tell.
        """
        workers = family(*(child.popen.pid for child in self._children[1:]))
        served = self._server_meter.read({*having(self._mark)} - {*workers})
        worked = self._worker_meter.read(workers)
        return None if served is None or worked is None else (served, worked)

    def finish(self) -> str:
        """Check what the server and the workers hold, close, and return how the workers' read.

        Raises ProcessFailed when the parameters are not exactly the sum of all updates, or when the
        peer does not close in good order.
        """
        server, *workers = self._children
        reads = self._all(workers, ("check", self.total))
        self._all([server], ("check", self.total))
        self.close()
        return str(max(reads, key=READS.index))

    def close(self) -> None:
        """Have the workers disconnect and the server end; ProcessFailed when one does not."""
        server, *workers = self._children
        self._all(workers, ("close",))
        self._all([server], ("close",))

    def server_process(self) -> int:
        """Return the number of the process that serves."""
        return int(self._all(self._children[:1], ("process",))[0])

    def kill(self) -> None:
        """Kill every process, in any state; may be called at any time and twice."""
        for child in self._children:
            child.kill()
        while self._children:
            self._children.pop().close()
        if self._scratch is not None:
            for pid in having(self._mark):  # they left their sessions
                send(pid, signal.SIGKILL)
            self._scratch.cleanup()

    @property
    def _mark(self) -> str:
        """The variable of which all processes of the team, and no others, have this value."""
        return f"{_FOLDER}={self._environment[_FOLDER]}"

    def _add(self, role: str, name: str) -> PipedProcess:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"PYTHONPATH": path, **self._environment}
        child = PipedProcess(name, partial(obey, role), environment)
        self._children.append(child)
        return child

    def _all(self, children: Sequence[PipedProcess], order: tuple[Any, ...]) -> list[Any]:
        for child in children:
            child.send(order)
        return self._gather(children)

    def _gather(self, children: Sequence[PipedProcess]) -> list[Any]:
        """Collect one answer from each; a death anywhere in the team ends the wait."""
        until = time.monotonic() + self._deadline
        answers: dict[Connection, Any] = {}
        running = {child.pipe: child for child in self._children}
        while len(answers) < len(children):
            waiting = [pipe for pipe in running if pipe not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                late = [child.name for child in children if child.pipe not in answers]
                raise ProcessFailed(f"no answer from {', '.join(late)} within {self._deadline:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[pipe] = _answer(running[pipe])
        return [answers[child.pipe] for child in children]


def _answer(child: PipedProcess) -> Any:
    """Take the answer that is there; ProcessFailed when it is an error or the child has ended."""
    fine, value = child.receive()
    if not fine:
        raise ProcessFailed(f"{child.name}: {str(value).partition(chr(10))[0]}")
    return value
