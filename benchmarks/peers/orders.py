"""The inside of a `benchmarks.peers.team.Team`'s processes: orders come in, answers go out.

An order is a tuple of a name and arguments; its answer is ``(True, value)`` or ``(False, the
error)``. The process ends when the pipe does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from aiops.net.cpu_count import run_as_batch
from benchmarks.peers.base import (
    Array,
    Job,
    Lap,
    Overlapping,
    Restless,
    SelfChecking,
    ServerSide,
    WorkerSide,
    check_server,
    check_worker,
    load,
)


class ServerOrders:
    """The orders of a server's process."""

    server: ServerSide

    def serve(self, job: Job) -> str:
        """Start the peer's server; return its address."""
        self.server = load(job.peer).Server(job)
        return self.server.start()

    def check(self, cycles: int) -> None:
        """Fail unless the parameters are exactly the sum of that number of updates."""
        if isinstance(self.server, SelfChecking):
            self.server.check(cycles)
        else:
            check_server(self.server.parameters(), cycles)

    def process(self) -> int:
        """Return the number of the process that serves, where it is not this one."""
        return int(getattr(self.server, "pid", os.getpid()))

    def close(self) -> None:
        """End the server."""
        self.server.close()


class WorkerOrders:
    """The orders of a worker's process."""

    worker: WorkerSide
    array: Array | None
    whole: bool
    own = 0
    read = b""

    def join(self, job: Job, address: str, index: int) -> None:
        """Connect to the server."""
        if job.batch:
            run_as_batch()
        self.worker = load(job.peer).Worker(job, address, index)
        self.array = None if job.settings.get("views") else self.worker.params
        # A single worker cannot see versions mix, whatever the peer does.
        self.whole = job.workers == 1 or bool(job.settings["whole"])

    def run(self, cycles: int) -> Lap:
        """Run ``cycles`` cycles and time each."""
        if isinstance(self.worker, Overlapping):
            return self._overlapping(self.worker, cycles)
        cycle, clock = self.worker.cycle, time.perf_counter
        stamps = [0.0] * (cycles + 1)
        if isinstance(self.worker, Restless):
            self.worker.wake()
        stamps[0] = clock()
        for i in range(1, cycles + 1):
            cycle()
            stamps[i] = clock()
        if isinstance(self.worker, Restless):
            self.worker.rest()
        self.own += cycles
        self.read = self._edges()
        return Lap(stamps[0], stamps[-1], np.diff(np.array(stamps)))

    def _overlapping(self, worker: Overlapping, cycles: int) -> Lap:
        times = np.array(worker.run(cycles))
        self.own += cycles
        self.read = self._edges()
        return Lap(float(times.min()), float(times.max()), times[:, 1] - times[:, 0])

    def check(self, total: int) -> str:
        """Fail unless the parameters are where they belong, and stayed; return how they read."""
        if isinstance(self.worker, SelfChecking):
            return self.worker.check(total) or "whole"
        if self.array is not None and self.worker.params is not self.array:
            raise ValueError("the parameters moved to another array")
        if self._edges() != self.read:
            raise ValueError("the parameters changed after the worker's last cycle")
        return check_worker(self.worker.params, self.own, total, self.whole)

    def _edges(self) -> bytes:
        """The first and the last parameter, of which an update changes both."""
        return self.worker.params[[0, -1]].tobytes()

    def close(self) -> None:
        """Disconnect."""
        self.worker.close()


def obey(role: str, pipe: Connection) -> None:
    """Carry out the orders of a ``server`` or a ``worker`` until the pipe ends; then exit."""
    threading.excepthook = _end_on_error
    targets: dict[str, Any] = {"server": ServerOrders, "worker": WorkerOrders}
    target = targets[role]()
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            break
        try:
            reply = (True, getattr(target, name)(*arguments))
        except Exception as error:
            traceback.print_exc()
            reply = (False, f"{type(error).__name__}: {error}")
        pipe.send(reply)
    # Peers leave threads blocked in C; waiting for them at exit would be waiting for ever.
    sys.stderr.flush()
    os._exit(0)


def _end_on_error(failure: threading.ExceptHookArgs) -> None:
    """End the process: with its serving thread dead, all others would wait for ever."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(1)
