"""What simulated workers train: a model, each worker's gradients, and a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.errors import UsageError
from aiops.lab.workloads import MLP, batches, load
from aiops.lab.workloads.dataset import Dataset
from aiops.model.layout import Array

Gradient: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""From parameters to the gradients of the next mini-batch; the arrays may be the same each time."""


class Workload(Protocol):
    """Something to train."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return the parameters that the first worker offers."""

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return what one worker computes."""

    def test(self, params: Mapping[str, Array]) -> tuple[float, float] | None:
        """Return loss and accuracy on the test set; None: there is no test."""


@dataclass(frozen=True)
class Training:
    """A multilayer perceptron on a data set; every worker draws mini-batches of its own.

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
        """Return the parameters that the first worker offers."""
        return self._model.init(seed)

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return what one worker computes."""
        stream = batches(self._data, self.batch_size, seed, worker, worker + 1)
        model = self._model
        out = {name: np.empty(shape, model.dtype) for name, shape in model.shapes.items()}
        return lambda params: model.gradients(params, *next(stream), out)[1]

    def test(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return loss and accuracy on the test set."""
        return self._model.evaluate(params, self._data.test_x, self._data.test_y)


@dataclass(frozen=True)
class Deadweight:
    """A model of a stated size that learns nothing: for questions of time and traffic alone.

    Parameters
    ----------
    nbytes
        Of the model, in float32.
    tensors
        How many it has.
    """

    nbytes: int
    tensors: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 1 <= self.tensors <= self.nbytes // 4:
            raise UsageError(
                f"a model of {self.nbytes} bytes in {self.tensors} tensors cannot be: each has 4"
                " bytes or more"
            )

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return the parameters that the first worker offers: zeros."""
        cuts = [self.nbytes // 4 * place // self.tensors for place in range(self.tensors + 1)]
        sizes = [end - begin for begin, end in pairwise(cuts)]
        return {f"w{place}": np.zeros(size, np.float32) for place, size in enumerate(sizes)}

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return what one worker computes: always the same, small and not zero."""
        fixed: dict[str, Any] = {}

        def gradient(params: Mapping[str, Array]) -> Mapping[str, Array]:
            if not fixed:
                fixed.update({name: np.full_like(array, 1e-3) for name, array in params.items()})
            return fixed

        return gradient

    def test(self, params: Mapping[str, Array]) -> None:
        """Return nothing: there is no test."""
