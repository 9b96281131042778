"""The workload of simulated workers: a model, each worker's gradients, and a test.

`aiops.lab.workloads.PerceptronWorkload` is one on real data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.errors import UsageError
from aiops.model.layout import Array

Gradient: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""From parameters to the gradients of the next mini-batch; the arrays may be the same each time."""


class Workload(Protocol):
    """A model to train. Any object with these methods can be a cluster's workload."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return the parameters that the first worker offers."""

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return what one worker computes."""

    def test(self, params: Mapping[str, Array]) -> tuple[float, float] | None:
        """Return loss and accuracy on the test set; None: there is no test."""


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
