"""The networks that ``aiops bandwidth`` trains: how they are tested, and the workers' gradients.

``perceptron``: the papers', on a data set. ``transformer``: the small one of ``one-rule``, which
learns to write the documentation of Python (`aiops.lab.experiments.gpt`, in PyTorch).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from aiops.client.params import Params
from aiops.lab.experiments.execution import PERCEPTRON, TRANSFORMER, network_task
from aiops.lab.training_files import TrainingFiles
from aiops.lab.training_worker import BatchGradients, mapped
from aiops.lab.workloads import MLP, batches
from aiops.model.layout import Array, Ints
from aiops.sim.turns.simulation import Simulation
from aiops.sim.turns.task import Batches, Task

NETWORKS = (PERCEPTRON, TRANSFORMER)


class Material(Protocol):
    """The training data of a run's processes, and the test of what they learn."""

    @property
    def folder(self) -> Path:
        """As of `TrainingFiles`; without a meaning for the transformer, whose text is Python's."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The perceptron's layers; empty for the transformer."""

    def test(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the loss (nats) and the accuracy (share of 1) on the test set."""


def material(network: str, dataset: str, hidden: int) -> AbstractContextManager[Material]:
    """Return the material of runs with a network, until the ``with`` block ends."""
    if network == TRANSFORMER:
        return nullcontext(_Text())
    return TrainingFiles(dataset, hidden)


class _Text:
    """The material of the transformer."""

    folder = Path()
    sizes: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._task = _transformer()

    def test(self, params: Mapping[str, Any]) -> tuple[float, float]:
        cost, error = self._task.validate(params)
        return cost, 1 - error


class Gradients(Protocol):
    """The gradients of one worker's mini-batches, as a function of parameters."""

    def advance(self) -> None:
        """Take the next mini-batch."""

    def __call__(self, params: Params | Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the gradients at these parameters; the arrays are the same each time."""


Lessons: TypeAlias = Callable[[int, Params], Gradients]
"""Returns the gradients of a worker by its number, which are written into those arrays."""


def lessons(
    network: str, sizes: tuple[int, ...], folder: str, batch_size: int, seed: int, workers: int
) -> tuple[Mapping[str, Array], Lessons]:
    """Return the initial parameters of a run, and its workers' gradients.

    Parameters
    ----------
    network
        One of `NETWORKS`.
    sizes, folder
        Those of its `Material`.
    batch_size, seed
        Of the mini-batches.
    workers
        How many there are, in all processes.
    """
    if network == PERCEPTRON:
        model, data = MLP(sizes), mapped(folder)
        return model.init(seed), lambda index, out: BatchGradients(
            model, batches(data, batch_size, seed, index, workers), out
        )
    task = _transformer()
    return task.initial(seed), lambda index, out: _TextGradients(
        task, Batches(task.examples, batch_size, 1000 * seed + index), out
    )


class _TextGradients:
    """Those of the transformer."""

    def __init__(self, task: Task, drawn: Batches, out: Params) -> None:
        self._task, self._drawn, self._out = task, drawn, out
        self._iterations = itertools.count()
        self._rows: Ints = drawn.rows(0)

    def advance(self) -> None:
        self._rows = self._drawn.rows(next(self._iterations))

    def __call__(self, params: Params | Mapping[str, Any]) -> Mapping[str, Any]:
        self._task.gradient(params, self._rows, self._out)
        return self._out


def _transformer() -> Task:
    return network_task(TRANSFORMER, Simulation())
