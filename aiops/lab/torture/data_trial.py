"""Kill workers and servers in the middle of epochs, and look which examples the model has.

Processes are killed by SIGKILL as soon as a number of examples, which the seed chooses, has been
seen. A worker that was killed is replaced by a new one. A server is started again with its state,
or its standby is promoted, and what was killed is started again as the standby of that.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aiops.client.sync.client import Client
from aiops.errors import AiopsError
from aiops.lab.torture.data_reader import COUNTS, RATE, ReaderPlan, dataset_of, read_on
from aiops.lab.torture.server_group import PATIENCE, ServerGroup, TrialFailed, looks
from aiops.lab.torture.spawner import Forked, Spawner, run_server
from aiops.lab.workloads import MLP

_SERVER = (0,)  # as `ServerGroup` numbers what is killed: the one that serves


@dataclass(frozen=True, slots=True)
class DataTrialPlan:
    """A trial.

    Attributes
    ----------
    kills, server_kills
        Processes that are killed: workers and servers.
    workers
        Those at work at a time.
    dataset, epochs, batch_size
        As of `ReaderPlan`.
    acks
        The promise of an acknowledgement.
    seed
        Of the moments, and of the order.
    pause
        As of `ReaderPlan`.
    standby
        Whether the server has a standby, which takes the place of each that is killed.
    """

    kills: int = 100
    server_kills: int = 0
    workers: int = 4
    dataset: str = "mnist"
    epochs: int = 3
    batch_size: int = 32
    acks: str = "written"
    seed: int = 0
    pause: float = 0.0
    standby: bool = False

    @property
    def sites(self) -> int:
        """2 with a standby, else 1."""
        return 1 + self.standby

    @property
    def shards(self) -> int:
        """The servers that have a part of the model."""
        return 1

    @property
    def cuts(self) -> int:
        """The times that a line is cut."""
        return 0

    def flags(self) -> list[str]:
        """Return the server's flags, but for its folder, its port and its peers."""
        flags = ["--policy", "asgd", "--set", f"lr={RATE}", "--kernels", "numpy"]
        return [*flags, "--acks", self.acks, "--snapshot-every", "2"]


@dataclass(slots=True)
class DataFindings:
    """The findings of a trial.

    Attributes
    ----------
    plan
        The trial.
    examples
        Of the data set.
    killed, servers_killed
        Workers and servers that were killed while they were at work.
    once, missing, twice
        By epoch: examples that are once in the model, not at all, and more than once.
    returned
        Examples that were handed out again.
    accuracy
        Of the trained model on the examples for testing.
    seconds
        The time that it took.
    """

    plan: DataTrialPlan
    examples: int
    killed: int = 0
    servers_killed: int = 0
    once: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    returned: int = 0
    accuracy: float = 0.0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """True if each example of each epoch is in the model once, and all kills took place."""
        whole = self.once == [self.examples] * self.plan.epochs
        counts = self.killed, self.servers_killed
        return whole and counts == (self.plan.kills, self.plan.server_kills)

    def report(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "right": self.right}


class DataTrial:
    """One trial, in a folder of its own.

    Parameters
    ----------
    plan
        The trial.
    folder
        Where the server keeps its state, and processes write what they say.
    spawner
        Forks them.
    """

    def __init__(self, plan: DataTrialPlan, folder: Path, spawner: Spawner) -> None:
        self._plan, self._folder, self._spawner = plan, folder, spawner
        self._rng = random.Random(plan.seed)
        self._servers = ServerGroup(plan, folder, spawner, run_server)
        self._workers: list[Forked] = []
        self._started = 0

    def run(self) -> DataFindings:
        """Carry the trial out; return what the model has.

        Raises
        ------
        TrialFailed
            When a process did not do its part.
        """
        plan, began = self._plan, time.monotonic()
        data = dataset_of(plan.dataset)
        found = DataFindings(plan, len(data.train_x))
        total = found.examples * plan.epochs
        marks = sorted(
            (self._rng.uniform(0.01, 0.9) * total, kind)
            for kind, count in (("worker", plan.kills), ("server", plan.server_kills))
            for _ in range(count)
        )
        try:
            self._servers.begin()
            self._servers.ready()
            for _ in range(plan.workers):
                self._start_worker()
            for mark, kind in marks:
                self._wait_for(mark)
                time.sleep(self._rng.random() * 0.01)  # anywhere in a step
                if kind == "server":
                    found.servers_killed += self._kill_server()
                else:
                    found.killed += self._kill_worker()
            self._finish()
            with Client(self._servers.url, timeout=PATIENCE) as client:
                params, stats = client.fetch(), client.stats()
            counts = np.rint(params[COUNTS]).astype(np.int64)
            exact = bool((params[COUNTS] == counts).all())
            found.once = [int((row == 1).sum()) if exact else 0 for row in counts]
            found.missing = [int((row < 1).sum()) for row in counts]
            found.twice = [int((row > 1).sum()) for row in counts]
            found.returned = stats["data_sets"][0]["returned"]
            model = MLP((data.features, 16, data.classes))
            found.accuracy = model.accuracy(params, data.test_x, data.test_y)
        finally:
            self._end()
        found.seconds = time.monotonic() - began
        return found

    # ------------------------------------------------------------ inside

    def _start_worker(self) -> None:
        plan, number = self._plan, self._started
        self._started += 1
        name = f"worker-{number}"
        orders = ReaderPlan(
            *(self._servers.url, name, plan.dataset, plan.epochs, plan.batch_size, plan.seed),
            plan.pause,
            PATIENCE,
        )
        self._workers.append(self._spawner.start(read_on, self._folder / name, orders))

    def _wait_for(self, mark: float) -> None:
        """Wait until that number of examples has been seen."""
        with Client(self._servers.url, timeout=PATIENCE) as client:
            for _ in looks(f"{mark:,.0f} examples have not been seen"):
                for row in client.stats()["data_sets"]:
                    before = row["epoch"] * row["examples"]
                    if before + row["seen"] + row["seen_ahead"] >= mark:
                        return
                self._check()

    def _check(self) -> None:
        for worker in self._workers:
            status = worker.wait(0)
            if status not in (None, 0):
                raise TrialFailed(f"a worker ended with {status}: {worker.text().strip()[-2000:]}")

    def _kill_worker(self) -> bool:
        worker = self._workers.pop(self._rng.randrange(len(self._workers)))
        at_work = worker.wait(0) is None
        worker.kill()
        self._start_worker()
        return at_work

    def _kill_server(self) -> bool:
        servers = self._servers
        servers.wait_for_standbys()
        at_work = servers.current.wait(0) is None
        servers.strike(_SERVER)
        servers.recover(_SERVER)
        servers.ready()
        return at_work

    def _finish(self) -> None:
        for _ in looks("the workers have not ended"):
            self._check()
            if all(worker.wait(0) == 0 for worker in self._workers):
                return

    def _end(self) -> None:
        with contextlib.suppress(AiopsError):
            self._servers.close()
        for process in self._workers:
            with contextlib.suppress(AiopsError):
                process.kill()
