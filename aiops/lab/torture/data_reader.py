"""A worker process of the torture of data sets: it trains, and its model counts what it was given.

The model has, beside the layers of a perceptron, one place for each example of each epoch. A
gradient adds 1 to the places of its mini-batch. So the parameters tell how often each example
became a part of the model, and neither the server's counts nor the worker's are needed for that.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import numpy as np

from aiops.client.sync.worker import Worker
from aiops.data import batches
from aiops.lab.workloads import MLP, Dataset, load, synthetic

COUNTS = "counts"
"""The tensor of the places: [epochs, examples]."""

RATE = 0.125
"""The learning rate: with it, and these whole numbers, float32 is exact."""

_NAME = "torture"


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """The orders of a worker process.

    Attributes
    ----------
    url, name
        The server, and the worker's name.
    dataset
        As `dataset_of` reads it.
    epochs, batch_size, seed
        As of `aiops.data.batches`.
    pause
        Seconds that a mini-batch takes beside its gradient.
    timeout
        Seconds that it rides out a server that is gone.
    """

    url: str
    name: str
    dataset: str
    epochs: int
    batch_size: int
    seed: int
    pause: float = 0.0
    timeout: float = 60.0


def dataset_of(name: str) -> Dataset:
    """Return a data set by its name, or, by a number, as many random examples."""
    if name.isdigit():
        return synthetic(int(name), d=4, classes=2)
    return load(name, download=False).flat()


def read_on(plan: ReaderPlan) -> None:
    """Train until all examples of all epochs have been seen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data = dataset_of(plan.dataset)
    model = MLP((data.features, 16, data.classes))
    counts = np.zeros((plan.epochs, len(data.train_x)), np.float32)
    numbers = np.arange(len(data.train_x))
    params = {**model.init(seed=plan.seed), COUNTS: counts}
    with Worker(plan.url, params, name=plan.name, timeout=plan.timeout) as worker:
        shared = batches(
            worker,
            (data.train_x, data.train_y, numbers),
            batch_size=plan.batch_size,
            epochs=plan.epochs,
            seed=plan.seed,
            name=_NAME,
        )
        for x, y, indices in shared:
            _loss, gradients = model.gradients(worker.params, x, y)
            counts[shared.epoch, indices] = -1 / RATE
            time.sleep(plan.pause)
            worker.step({**gradients, COUNTS: counts})
            counts[shared.epoch, indices] = 0.0
