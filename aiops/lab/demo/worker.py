"""A worker of the demo: ``python -m aiops.lab.demo.worker TASK``, a `DemoTask` as JSON.

Its progress and its report (`aiops.lab.training_worker`) are `Progress`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiops
from aiops.lab.training_worker import REPORT_EVERY, BatchGradients, Ready, run, send_line
from aiops.lab.workloads import MLP, batches, load


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """The task of one worker.

    Attributes
    ----------
    url
        The server's address.
    index, workers
        The worker's number, from 0, and how many there are.
    dataset, hidden
        The data set, and the units of the perceptron's hidden layer.
    steps, batch_size
        Mini-batches to train on, and the examples in each.
    seed
        Of the initial parameters and the mini-batches.
    """

    url: str
    index: int
    workers: int
    dataset: str
    hidden: int
    steps: int
    batch_size: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a worker.

    Attributes
    ----------
    steps
        Mini-batches done.
    loss
        Mean training loss of the mini-batches since the last line, in nats.
    idle
        Share of its time, since training began, that it waited for the server.
    recomputed
        Gradients it computed again because the policy refused them.
    """

    steps: int
    loss: float
    idle: float
    recomputed: int


def train(task: DemoTask, ready: Ready) -> Mapping[str, Any]:
    """Train as the task states; return the last `Progress`."""
    data = load(task.dataset, download=False).flat()
    model = MLP((data.features, task.hidden, data.classes))
    stream = batches(data, task.batch_size, task.seed, task.index, task.workers)
    name = f"worker-{task.index + 1}"
    with aiops.Worker(task.url, model.init(task.seed), name=name) as worker:
        gradients = BatchGradients(model, stream, worker.params.like())
        ready()
        began = now = time.monotonic()

        def progress() -> dict[str, Any]:
            losses = gradients.take_losses()
            return asdict(
                Progress(
                    steps=worker.steps,
                    loss=sum(losses) / len(losses) if losses else float("nan"),
                    idle=worker.idle_seconds / max(now - began, 1e-9),
                    recomputed=worker.recomputed,
                )
            )

        due = began + REPORT_EVERY
        for _ in range(task.steps):
            gradients.advance()
            worker.step(gradients)
            now = time.monotonic()
            if now >= due:
                due = now + REPORT_EVERY
                send_line(progress())
        return progress()


if __name__ == "__main__":
    run(DemoTask, train)
