"""Some workers of a run: ``python -m aiops.lab.experiments.bandwidth.worker TASK``.

TASK is a `BandwidthTask` as JSON. The workers are threads of one process (NumPy releases the
interpreter's lock while it multiplies), each with a connection of its own. The process reports the
gradients so far, ``{"gradients": 1200}``, a few times per second, and at the end a
`BandwidthReport` (`aiops.lab.training_worker`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiops
from aiops.lab.experiments.bandwidth.networks import Lessons, lessons
from aiops.lab.experiments.bandwidth.tickets import Tickets
from aiops.lab.training_worker import REPORT_EVERY, Ready, run, send_line


@dataclass(frozen=True, kw_only=True)
class BandwidthTask:
    """The task of one process: it trains as long as ``tickets`` are left.

    Attributes
    ----------
    url
        The server's address.
    indices, workers
        The numbers of this process's workers, and how many workers there are in all.
    tickets, gradients
        The file that all processes draw mini-batches from, and how many it has.
    network
        What is trained, one of `aiops.lab.experiments.bandwidth.networks.NETWORKS`.
    sizes, data
        As of `aiops.lab.experiments.bandwidth.networks.Material`: its ``sizes`` and ``folder``.
    batch_size, seed
        Of the mini-batches.
    timeout
        Seconds that a worker waits for an answer.
    """

    url: str
    indices: Sequence[int]
    tickets: str
    gradients: int
    workers: int
    network: str
    sizes: Sequence[int]
    data: str
    batch_size: int
    seed: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class BandwidthReport:
    """The report of one process.

    Attributes
    ----------
    gradients
        Mini-batches of its workers.
    seconds, idle
        Their time, added up, and how much of it they waited for the server.
    account
        The bytes of their own ledgers, by reason.
    """

    gradients: int
    seconds: float
    idle: float
    account: dict[str, int]


class _Trainer:
    """One worker, on a thread of its own."""

    def __init__(
        self, task: BandwidthTask, index: int, start: Mapping[str, Any], given: Lessons
    ) -> None:
        name = f"worker-{index + 1}"
        self.worker = aiops.Worker(task.url, start, name=name, timeout=task.timeout)
        self._gradients = given(index, self.worker.params.like())
        self._tickets = Path(task.tickets), task.gradients
        self.seconds = 0.0

    def train(self) -> None:
        """Compute gradients until all workers together have computed enough."""
        began = time.perf_counter()
        with Tickets(*self._tickets) as tickets:
            while tickets.draw():
                self._gradients.advance()
                self.worker.step(self._gradients)
        self.worker.close()
        self.seconds = time.perf_counter() - began


def train(task: BandwidthTask, ready: Ready) -> Mapping[str, Any]:
    """Train with all workers of this process; return their `BandwidthReport`."""
    sizes, of = tuple(task.sizes), (task.batch_size, task.seed, task.workers)
    start, given = lessons(task.network, sizes, task.data, *of)
    trainers = [_Trainer(task, index, start, given) for index in task.indices]
    ready()
    with ThreadPoolExecutor(len(trainers)) as pool:
        running = {pool.submit(trainer.train) for trainer in trainers}
        while running:
            done, running = wait(running, REPORT_EVERY, FIRST_EXCEPTION)
            for future in done:
                future.result()
            send_line({"gradients": sum(trainer.worker.steps for trainer in trainers)})
    account: Counter[str] = Counter()
    for trainer in trainers:
        account.update(trainer.worker.ledger.brief())
    report = BandwidthReport(
        gradients=sum(trainer.worker.steps for trainer in trainers),
        seconds=sum(trainer.seconds for trainer in trainers),
        idle=sum(trainer.worker.idle_seconds for trainer in trainers),
        account=dict(account),
    )
    return asdict(report)


if __name__ == "__main__":
    run(BandwidthTask, train)
