"""One trial: a server, its workers, the kills, and what was found at the end."""

from __future__ import annotations

import heapq
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker
from aiops.errors import AiopsError
from aiops.lab.torture.checker import ClientView, uncertain, violations
from aiops.lab.torture.plan import TrialPlan
from aiops.lab.torture.pusher import MODEL, PusherPlan, push_on
from aiops.lab.torture.spawner import Forked, Spawner, run_server
from aiops.model.layout import Array

_PATIENCE = 60.0  # seconds for anything that should take a moment, on a machine that is busy
_TIMEOUT = 300.0  # a worker's: it may find the server gone at each of its attempts
_LOOK = 0.002  # seconds between looks at a file
_PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections

RunServer = Callable[[list[str]], None]


@dataclass(slots=True)
class TrialResult:
    """The findings of a trial.

    Attributes
    ----------
    plan
        The trial's.
    kills, early
        The processes killed, and those of them before they were ready.
    acknowledged
        The pushes that a client saw acknowledged.
    uncertain, applied
        The clients that were killed, and those of them whose last push is part of the model all the
        same.
    wrong
        What contradicts the promise, one sentence each.
    seconds
        The time that it took.
    """

    plan: TrialPlan
    kills: int = 0
    early: int = 0
    acknowledged: int = 0
    uncertain: int = 0
    applied: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trial:
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    folder
        An empty folder.
    spawner
        Forks the processes.
    run_server
        Runs a server with these flags.
    """

    def __init__(
        self, plan: TrialPlan, folder: Path, spawner: Spawner, run_server: RunServer = run_server
    ) -> None:
        self.result = TrialResult(plan)
        self._plan, self._folder, self._spawner = plan, folder, spawner
        self._run_server = run_server
        self._rng = random.Random()  # ports: two trials of one seed may run side by side
        self._port = self._free_port()
        self._starts = 0
        self._running: list[Forked] = []
        self._workers: list[tuple[Forked, str, int]] = []  # the process, its name, its life

    def kill_servers(self) -> TrialResult:
        """Kill the server again and again, and see that its workers notice nothing."""
        return self._carry_out(self._while_servers_die)

    def kill_workers(self) -> TrialResult:
        """Kill workers again and again, and see that the server counts as it promised."""
        return self._carry_out(self._while_workers_die)

    def _carry_out(self, what: Callable[[], None]) -> TrialResult:
        began = time.monotonic()
        try:
            what()
        except AiopsError as error:
            self.result.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            for process in self._running:
                process.kill()
        self.result.seconds = time.monotonic() - began
        return self.result

    # -------------------------------------------------------------- the two scenes

    def _while_servers_die(self) -> None:
        server = self._serve(self._port)
        self._ready(server)
        for life in range(self._plan.workers):
            self._start_worker(life)
        for delay in self._plan.delays:
            if delay < 0:  # it was started just now
                time.sleep(-delay)
                self.result.early += 1
            else:
                self._ready(server)
                self._wait_for_progress()
                time.sleep(delay)
            server.kill()
            self.result.kills += 1
            server = self._serve(self._port)
        self._ready(server)
        self._wait_for_progress()
        self._stop_workers()
        self._flush()
        before = self._fetch(self._port)
        self._check(before[1])
        server.kill()
        self.result.kills += 1
        self._compare(before)

    def _while_workers_die(self) -> None:
        plan = self._plan
        server = self._serve(self._port)
        self._ready(server)
        due = [(time.monotonic() + plan.delays[life], life) for life in range(plan.workers)]
        for life in range(plan.workers):
            self._start_worker(life)
        heapq.heapify(due)
        following = plan.workers
        while due:
            instant, life = heapq.heappop(due)
            time.sleep(max(0.0, instant - time.monotonic()))
            process, _name, _life = self._workers[life]
            process.kill()
            self.result.kills += 1
            self.result.early += not self._log(life).exists()
            self._start_worker(following)
            if following < plan.kills:
                heapq.heappush(due, (time.monotonic() + plan.delays[following], following))
            following += 1
        self._stop_workers(plan.kills)
        self._flush()
        self._check(self._fetch(self._port)[1])
        self._end(server)

    # -------------------------------------------------------------- processes

    def _serve(self, port: int, state: str = "state") -> Forked:
        self._starts += 1
        flags = ["--port", str(port), *self._plan.flags()]
        if self._plan.acks:
            flags += ["--state", str(self._folder / state), "--acks", self._plan.acks]
        output = self._folder / f"server-{self._starts}"
        process = self._spawner.start(self._run_server, output, flags)
        self._running.append(process)
        return process

    def _ready(self, server: Forked) -> None:
        """Wait until a server has printed its URL."""
        until = time.monotonic() + _PATIENCE
        while "aiops://" not in server.text():
            if (status := server.wait(_LOOK)) is not None:
                raise TrialFailed(f"a server ended with status {status}: {_last(server)}")
            if time.monotonic() > until:
                raise TrialFailed(f"a server was not ready after {_PATIENCE:g} s")

    def _end(self, server: Forked) -> None:
        """End a server in good order."""
        server.signal(signal.SIGTERM)
        status = server.wait(_PATIENCE)
        if status != 0 or "Traceback" in server.text():
            raise TrialFailed(f"a server that was to end gave status {status}: {_last(server)}")

    def _start_worker(self, life: int) -> None:
        plan, name = self._plan, f"worker-{life}"
        orders = PusherPlan(
            url=f"aiops://127.0.0.1:{self._port}",
            name=name,
            size=plan.size,
            cells=plan.cells_of(life),
            scale=plan.checked.scale,
            pause=plan.pauses[life],
            own=plan.checked.own,
            log=str(self._log(life)),
            timeout=_TIMEOUT,
        )
        process = self._spawner.start(push_on, self._folder / name, orders)
        self._running.append(process)
        self._workers.append((process, name, life))

    def _stop_workers(self, first: int = 0) -> None:
        """Have the workers from ``first`` on end after the push that they make."""
        for process, _name, _life in self._workers[first:]:
            process.signal(signal.SIGTERM)
        for process, name, _life in self._workers[first:]:
            status = process.wait(_PATIENCE + 5)
            if status is None:
                self.result.wrong.append(f"{name} does not end")
            elif status not in (0, -signal.SIGTERM):  # the latter: it had not begun
                self.result.wrong.append(f"{name} ended with status {status}: {_last(process)}")

    def _wait_for_progress(self) -> None:
        """Wait until a push is acknowledged, or all workers have ended."""
        before, until = self._written(), time.monotonic() + _PATIENCE
        while self._written() == before:
            if all(process.wait(0) is not None for process, *_ in self._workers):
                return
            if time.monotonic() > until:
                raise TrialFailed(f"no push was acknowledged for {_PATIENCE:g} s")
            time.sleep(_LOOK)

    def _written(self) -> int:
        logs = (self._log(life) for _process, _name, life in self._workers)
        return sum(log.stat().st_size for log in logs if log.exists())

    def _log(self, life: int) -> Path:
        return self._folder / f"log-{life}"

    def _free_port(self) -> int:
        while True:
            port = self._rng.choice(_PORTS)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port

    # -------------------------------------------------------------- what is found

    def _fetch(self, port: int) -> tuple[int, Array]:
        """Return the version and the parameters of a server."""
        with Client(f"aiops://127.0.0.1:{port}", timeout=_PATIENCE) as client:
            params = client.fetch()
            return params.version, np.array(params[MODEL])

    def _flush(self) -> None:
        """Complete a sum of pushes that waits for more: pushes of zeros change nothing else."""
        if self._plan.checked.scale == 1:
            return
        zeros = {MODEL: np.zeros(self._plan.size)}
        url = f"aiops://127.0.0.1:{self._port}"
        with Worker(url, zeros, name="flush", timeout=_PATIENCE) as worker:
            for _ in range(self._plan.checked.scale - 1):
                worker.step(zeros)

    def _check(self, model: Array) -> None:
        """Compare the model with what the clients saw."""
        views = []
        for process, name, life in self._workers:
            log = self._log(life)
            data = log.read_bytes() if log.exists() else b""
            view = ClientView.parse(name, self._plan.cells_of(life), data)
            if process.wait(0) == 0 and not view.ended and not view.told:
                view.told.append("it ended without a word")
            self.result.acknowledged += len(view.acknowledged)
            if self._plan.checked.additive and not view.ended:
                self.result.uncertain += 1
                self.result.applied += uncertain(model, view)
            views.append(view)
        if self._plan.checked.additive:
            self.result.wrong += violations(model, views, scaled=self._plan.checked.scaled)
        else:
            self.result.wrong += [f"{view.name}: {text}" for view in views for text in view.told]

    def _compare(self, before: tuple[int, Array]) -> None:
        """Compare the server after a restart, and one on a copy of its folder, with the last."""
        copy_state(self._folder / "state", self._folder / "copy")
        other = self._free_port()
        servers = {self._port: self._serve(self._port), other: self._serve(other, "copy")}
        for (port, server), what in zip(servers.items(), ("restarted", "copied"), strict=True):
            self._ready(server)
            version, model = self._fetch(port)
            if version != before[0]:
                self.result.wrong.append(f"version {before[0]} is {version} when {what}")
            elif model.tobytes() != before[1].tobytes():
                self.result.wrong.append(f"the parameters of version {version} differ when {what}")
            self._end(server)


class TrialFailed(AiopsError):
    """A trial cannot go on: a process did not do its part."""


def copy_state(source: Path, target: Path) -> None:
    """Copy a state directory that no server uses; holes stay holes, and the lock is left out."""
    target.mkdir()
    for path in source.iterdir():
        if path.name == "LOCK":
            continue
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            size = os.fstat(read.fileno()).st_size
            write.truncate(size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(read.fileno(), at, os.SEEK_DATA)
                except OSError:  # only a hole follows
                    break
                end = os.lseek(read.fileno(), at, os.SEEK_HOLE)
                os.pwrite(write.fileno(), os.pread(read.fileno(), end - at, at), at)
                at = end


def _last(process: Forked) -> str:
    lines = process.text().strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
