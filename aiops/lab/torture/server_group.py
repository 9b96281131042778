"""The server processes of a trial: one, or a server and its standby, or a lead and a follower."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aiops.client.sync.client import Client
from aiops.errors import AiopsError
from aiops.lab.torture.plan import TrialPlan
from aiops.lab.torture.spawner import Forked, Spawner
from aiops.net.faults import VARIABLE
from aiops.serving.config import shard_folder

PATIENCE = 300.0
"""Seconds for anything that should take a moment, on a machine that is busy."""

RunServer = Callable[[list[str]], None]

_PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections


class TrialFailed(AiopsError):
    """A trial cannot go on: a process did not do its part."""


def looks(missing: str) -> Iterator[None]:
    """Yield from time to time, and less often the longer it takes: each look costs the machine.

    Raises
    ------
    TrialFailed
        When `PATIENCE` is over; ``missing`` is the beginning of its text.
    """
    began = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - began
        if waited > PATIENCE:
            raise TrialFailed(f"{missing} within {PATIENCE:g} s")
        time.sleep(min(0.1, max(0.004, waited / 10)))


class ServerGroup:
    """The servers of a trial, each of which can be killed and started again.

    Parameters
    ----------
    plan
        The trial's: its layout and its flags.
    folder
        Where they keep their states and write what they say.
    spawner
        Forks them.
    run_server
        Runs a server with these flags.

    Attributes
    ----------
    main
        The number of the server that workers speak to; the other one is 1 - ``main``.
    """

    def __init__(
        self, plan: TrialPlan, folder: Path, spawner: Spawner, run_server: RunServer
    ) -> None:
        self.main = 0
        self._plan, self._folder, self._spawner = plan, folder, spawner
        self._run_server = run_server
        self._rng = random.Random()  # ports: two trials of one seed may run side by side
        self._ports = [self.free_port(), self.free_port()]
        self._processes: dict[int, Forked] = {}
        self._all: list[Forked] = []

    @property
    def url(self) -> str:
        """The address for workers."""
        ports = sorted(self._ports) if self._plan.layout == "standby" else [self.port]
        return "aiops://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    @property
    def port(self) -> int:
        """The port of the server that workers speak to."""
        return self._ports[self.main]

    @property
    def current(self) -> Forked:
        """The server that workers speak to."""
        return self._processes[self.main]

    @property
    def state(self) -> Path:
        """The folder of its state."""
        return self._folder / f"state-{self.main}"

    @property
    def have_snapshots(self) -> bool:
        """True if each server that has a part of the model has a snapshot to begin with."""
        folders = [self.state]
        if self._plan.layout == "shards":
            folders = [self.state / shard_folder(0), self._folder / "state-1"]
        names = [[path.name for path in folder.glob("snapshot-*")] for folder in folders]
        return all(any(not name.endswith(".part") for name in mine) for mine in names)

    def begin(self, faults: str = "") -> None:
        """Start all of them; ``faults``: of the one that workers speak to."""
        if self._plan.layout == "shards":
            self._start(1)
            self.ready(self._processes[1])
            self.start(faults)
            return
        self.start(faults)
        if self._plan.layout == "standby":
            self.ready()
            self._start(1)
            self.ready(self._processes[1])

    def start(self, faults: str = "") -> None:
        """Start the one that workers speak to."""
        self._start(self.main, faults)

    def strike(self, target: int) -> None:
        """Kill the server that workers speak to (0), the other one (1), or both (2).

        Then see to what follows.
        """
        if target == 2:
            for process in self._processes.values():
                process.kill()
            self.begin()
            return
        number = self.main if target == 0 else 1 - self.main
        self._processes[number].kill()
        if self._plan.layout == "standby" and target == 0:
            self.main = 1 - number
            self.current.signal(signal.SIGUSR1)
        self._start(number)
        if number != self.main:  # a lead does not start without its follower
            self.ready(self._processes[number])

    def ready(self, server: Forked | None = None) -> None:
        """Wait until a server, default the main one, has printed its URL."""
        server = server or self.current
        for _ in looks("a server was not ready"):
            if "aiops://" in server.text():
                return
            if (status := server.wait(0)) is not None:
                raise TrialFailed(f"a server ended with status {status}: {last_line(server)}")

    def wait_for_standby(self) -> None:
        """Wait until acknowledgements mean ``replicated``: without a standby they mean less."""
        with Client(f"aiops://127.0.0.1:{self.port}", timeout=PATIENCE) as client:
            for _ in looks("acknowledgements did not mean 'replicated'"):
                if client.stats()["state"]["acks"] == "replicated":
                    return

    def end(self, server: Forked | None = None) -> None:
        """End a server, default the main one, in good order."""
        server = server or self.current
        server.signal(signal.SIGTERM)
        status = server.wait(PATIENCE)
        if status != 0 or "Traceback" in server.text():
            raise TrialFailed(f"a server that was to end gave status {status}: {last_line(server)}")

    def end_all(self) -> None:
        """End a lead, and its follower with it, in good order."""
        self.end()
        status = self._processes[1].wait(PATIENCE)
        if status != 0:
            raise TrialFailed(f"a follower that was to end gave status {status}")

    def kill(self) -> None:
        """Kill all that run."""
        for process in self._all:
            process.kill()

    def copied(self, folder: str) -> tuple[Forked, int]:
        """Start a server on another state folder; return it and its port."""
        port = self.free_port()
        return self._fork([*self._plan.flags(), *self._kept(folder)], port), port

    def free_port(self) -> int:
        """Return a port that no process uses now."""
        while True:
            port = self._rng.choice(_PORTS)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port

    def _start(self, number: int, faults: str = "") -> None:
        flags = [*self._plan.flags(), *self._kept(f"state-{number}")]
        other = f"127.0.0.1:{self._ports[1 - number]}"
        if self._plan.layout == "shards":
            flags += ["--follower"] if number == 1 else ["--followers", other]
        elif self._plan.layout == "standby":
            flags += ["--standby-deadline", str(PATIENCE)]
            if number != self.main:
                flags += ["--standby", f"aiops://{other}"]
        self._processes[number] = self._fork(flags, self._ports[number], faults)

    def _kept(self, folder: str) -> list[str]:
        return ["--state", str(self._folder / folder)] if self._plan.acks else []

    def _fork(self, flags: list[str], port: int, faults: str = "") -> Forked:
        output = self._folder / f"server-{len(self._all)}"
        environment = {VARIABLE: faults} if faults else None
        process = self._spawner.start(
            self._run_server, output, ["--port", str(port), *flags], environment=environment
        )
        self._all.append(process)
        return process


def last_line(process: Forked) -> str:
    """Return the last line that a process wrote."""
    lines = process.text().strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


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
