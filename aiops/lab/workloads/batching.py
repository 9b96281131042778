"""Mini-batches: an endless, reproducible stream of examples for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiops.errors import UsageError
from aiops.lab.workloads.dataset import Dataset
from aiops.lab.workloads.seeds import Purpose, generator

__all__ = ["batches"]

Batch = tuple[NDArray[Any], NDArray[Any]]


def batches(
    data: Dataset | Batch, batch_size: int, seed: int, worker: int = 0, workers: int = 1
) -> Iterator[Batch]:
    """Return the endless mini-batches of one worker.

    Every worker goes through all the data, epoch after epoch, in an order of its own: the papers'
    workers share the data and sample independently. Within an epoch each example comes once. A
    mini-batch always has ``batch_size`` examples; what is left at the end of an epoch begins the
    first mini-batch of the next. A worker's stream depends on ``seed`` and ``worker`` alone, so it
    stays the same when others join.

    Args:
        data: a data set (its training part is used), or arrays (x, y) of equal length.
        batch_size: examples in a mini-batch; may exceed the number of examples.
        seed: of the run, 0 or more.
        worker: this worker's number, 0 ≤ worker < workers.
        workers: how many workers take part.

    Yields:
        (x, y): fresh arrays of shape (batch_size, ...) and (batch_size,), the caller's to keep.

    Raises:
        UsageError: at once, when an argument cannot work.
    """
    x, y = (data.train_x, data.train_y) if isinstance(data, Dataset) else data
    if len(x) != len(y) or not len(x):
        raise UsageError(
            f"there are {len(x)} examples and {len(y)} labels; mini-batches need as many labels "
            "as examples, and at least one"
        )
    if batch_size < 1:
        raise UsageError(f"the mini-batch size is {batch_size}; give 1 or more")
    if not 0 <= worker < workers:
        raise UsageError(f"worker {worker} of {workers}: count from 0 to {workers - 1}")
    return _stream(x, y, batch_size, generator(seed, Purpose.BATCHES, worker))


def _stream(
    x: NDArray[Any], y: NDArray[Any], batch_size: int, rng: np.random.Generator
) -> Iterator[Batch]:
    order = rng.permutation(len(x))
    while True:
        while len(order) < batch_size:
            order = np.concatenate((order, rng.permutation(len(x))))
        chosen, order = order[:batch_size], order[batch_size:]
        yield x[chosen], y[chosen]
