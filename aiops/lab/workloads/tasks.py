"""The perceptrons that simulated workers train: for a cluster in virtual time, and in turns.

`aiops.sim` trains any object with the methods of `aiops.sim.cluster.workload.Workload` or
`aiops.sim.turns.task.Task`; the two classes here are these, on real data.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aiops.client.params import Params
from aiops.errors import UsageError
from aiops.lab.workloads.batching import batches
from aiops.lab.workloads.catalog import load
from aiops.lab.workloads.dataset import Dataset
from aiops.lab.workloads.mlp import MLP
from aiops.model.layout import Array, Ints, Layout
from aiops.sim.cluster.workload import Gradient
from aiops.sim.turns.task import Batches, Task

_HELD_OUT = 6  # one of six training examples is for validation


@dataclass(frozen=True)
class PerceptronWorkload:
    """A multilayer perceptron that the workers of a `aiops.sim.cluster.spec.Cluster` train.

    Every worker draws mini-batches of its own.

    Parameters
    ----------
    data
        A data set or its name (`aiops.lab.workloads.load`).
    hidden
        Units of its hidden layers.
    batch_size
        Examples in a mini-batch.

    Raises
    ------
    UsageError
        When there is no such data set, or a mini-batch is larger than it.
    """

    data: str | Dataset = "digits"
    hidden: tuple[int, ...] = (32,)
    batch_size: int = 16

    def __post_init__(self) -> None:
        """Check the settings."""
        examples = len(self._data.train_y)
        if not 1 <= self.batch_size <= examples:
            raise UsageError(
                f"a mini-batch of {self.batch_size} examples cannot be: the data has {examples},"
                " so give 1 to as many"
            )
        self._model.init(0)

    @cached_property
    def _data(self) -> Dataset:
        return (load(self.data) if isinstance(self.data, str) else self.data).flat()

    @cached_property
    def _model(self) -> MLP:
        return MLP((self._data.features, *self.hidden, self._data.classes))

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return the initial parameters, float32 by name."""
        return self._model.init(seed)

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return one worker's gradient function; it reuses the arrays that it returns."""
        stream = batches(self._data, self.batch_size, seed, worker, worker + 1)
        model = self._model
        out = {name: np.empty(shape, model.dtype) for name, shape in model.shapes.items()}
        return lambda params: model.gradients(params, *next(stream), out)[1]

    def test(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return the loss (nats) and the accuracy (share of 1) on the test set."""
        return self._model.evaluate(params, self._data.test_x, self._data.test_y)


class PerceptronTask:
    """The papers' task for simulations in turns: a perceptron with one hidden layer.

    The last sixth of the training part is for validation: of MNIST 10,000 examples, as in the
    FASGD paper. The test part is left alone.

    Parameters
    ----------
    data
        The data set, or its name.
    hidden
        Units of the hidden layer.

    Attributes
    ----------
    examples
        The number of examples to train on.
    model
        The perceptron.

    Raises
    ------
    UsageError
        When there is no such data set, or no hidden unit.
    """

    def __init__(self, data: Dataset | str, hidden: int = 200) -> None:
        found = (load(data) if isinstance(data, str) else data).flat()
        if hidden < 1:
            raise UsageError(f"a hidden layer of {hidden} units: give 1 or more")
        self.examples = len(found.train_x) - len(found.train_x) // _HELD_OUT
        self._x, self._y = found.train_x[: self.examples], found.train_y[: self.examples]
        self._held_out = found.train_x[self.examples :], found.train_y[self.examples :]
        self.model = MLP((found.features, hidden, found.classes))

    def initial(self, seed: int) -> dict[str, Array]:
        """Return the initial parameters, float32 by name."""
        return self.model.init(seed)

    def alike(self) -> Ints:
        """Return the examples' numbers, int64: those of a class beside each other."""
        return np.argsort(self._y, kind="stable")

    def gradient(
        self, params: Mapping[str, Array], rows: Ints, out: Params, *, flipped: bool = False
    ) -> None:
        """Write the gradient of the mean cost of these examples into ``out``.

        ``flipped``: of wrong classes, the last for the first and so on.
        """
        classes = self._y[rows]
        if flipped:
            classes = self._y.max() - classes
        self.model.gradient(params, self._x[rows], classes, out)

    def validate(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return the mean negative log-likelihood (nats), and the share of wrong classes."""
        cost, right = self.model.evaluate(params, *self._held_out)
        return cost, 1 - right


@dataclass(frozen=True)
class TaskWorkload:
    """A task in turns as the workload of a cluster: each worker draws mini-batches of its own.

    Attributes
    ----------
    task
        What is trained.
    batch_size
        Examples in a mini-batch.
    """

    task: Task
    batch_size: int

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return the initial parameters, float32 by name."""
        return self.task.initial(seed)

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return one worker's gradient function; it reuses the arrays that it returns."""
        drawn = Batches(self.task.examples, self.batch_size, 1000 * seed + worker)
        out, iterations = Params(Layout.of(self.task.initial(0))), itertools.count()

        def gradient(params: Mapping[str, Array]) -> Mapping[str, Array]:
            self.task.gradient(params, drawn.rows(next(iterations)), out)
            return out

        return gradient

    def test(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return the loss (nats) and the accuracy (share of 1) on what is held out."""
        cost, error = self.task.validate(params)
        return cost, 1 - error
