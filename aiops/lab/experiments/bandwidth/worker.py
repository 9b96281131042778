"""Some workers of a run: ``python -m aiops.lab.experiments.bandwidth.worker TASK``, a `Task` as
JSON.

They are threads of one process (NumPy lets go of the interpreter while it multiplies), each with a
connection of its own. The process speaks in lines of JSON on standard output: ``{"ready": true}``,
then, once its parent has said the word, ``{"gradients": 1200}`` a few times per second, and at the
end a `Report`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aiops
from aiops.client.params import Params
from aiops.client.worker import Gradients
from aiops.errors import AiopsError
from aiops.lab.demo.worker import PATIENCE, REPORT_EVERY, say
from aiops.lab.experiments.bandwidth.tickets import Tickets
from aiops.lab.workloads import MLP, batches
from aiops.net.child_guard import ChildGuard


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process has to do: train with the workers of these numbers, as long as there are
    ``gradients`` left in the file of ``tickets`` that all processes draw from.
    """

    url: str
    indices: list[int]
    tickets: str
    gradients: int
    workers: int
    sizes: Sequence[int]
    data: str
    batch_size: int
    seed: int
    timeout: float

    @classmethod
    def read(cls, text: str) -> Task:
        """Read the command line."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the workers of a process came to.

    Attributes
    ----------
    gradients
        Mini-batches.
    seconds, idle
        Their time in all, and how much of it they waited for the server.
    account
        The bytes of their own ledgers, by reason.
    """

    gradients: int
    seconds: float
    idle: float
    account: dict[str, int]


class Trainer:
    """One worker, on a thread of its own."""

    def __init__(self, task: Task, index: int, data: tuple[Any, Any]) -> None:
        self._model = MLP(task.sizes)
        self._tickets = Path(task.tickets), task.gradients
        self._stream = batches(data, task.batch_size, task.seed, index, task.workers)
        self._batch: Any = None
        name = f"worker-{index + 1}"
        start = self._model.init(task.seed)
        self.worker = aiops.Worker(task.url, start, name=name, timeout=task.timeout)
        self._room = self.worker.params.like()
        self.seconds = 0.0

    def train(self) -> None:
        """Compute gradients until all workers together have computed enough."""
        began = time.perf_counter()
        with Tickets(*self._tickets) as tickets:
            while tickets.draw():
                self._batch = next(self._stream)
                self.worker.step(self._gradients)
        self.worker.close()
        self.seconds = time.perf_counter() - began

    def _gradients(self, params: Params) -> Gradients:
        x, y = self._batch
        return self._model.gradients(params, x, y, out=self._room)[1]


def train(task: Task, trainers: Sequence[Trainer]) -> Report:
    """Have all of them train; tell how far they are meanwhile."""
    with ThreadPoolExecutor(len(trainers)) as pool:
        running = {pool.submit(trainer.train) for trainer in trainers}
        while running:
            done, running = wait(running, REPORT_EVERY, FIRST_EXCEPTION)
            for future in done:
                future.result()
            say({"gradients": sum(trainer.worker.steps for trainer in trainers)})
    account: Counter[str] = Counter()
    for trainer in trainers:
        account.update(trainer.worker.ledger.brief())
    return Report(
        gradients=sum(trainer.worker.steps for trainer in trainers),
        seconds=sum(trainer.seconds for trainer in trainers),
        idle=sum(trainer.worker.idle_seconds for trainer in trainers),
        account=dict(account),
    )


def main(arguments: Sequence[str]) -> None:
    """Run the workers of one process."""
    task, leash = Task.read(arguments[0]), ChildGuard()
    x, y = (np.asarray(np.load(Path(task.data) / f"{n}.npy", mmap_mode="r")) for n in "xy")
    trainers = [Trainer(task, index, (x, y)) for index in task.indices]
    say({"ready": True})
    if not leash.wait_for_word(PATIENCE):
        raise SystemExit(f"the others were not ready within {PATIENCE:g} s")
    say(asdict(train(task, trainers)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AiopsError as error:
        sys.exit(f"aiops: {error}")
