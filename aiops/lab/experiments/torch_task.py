"""The base of tasks whose gradients PyTorch computes, with tensors of their own for each thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aiops.client.params import Params
from aiops.model.layout import Array, Ints


class TorchTask(ABC):
    """A `Task` that classifies: derive, and give fresh weights' deviations and the scores.

    Attributes
    ----------
    shapes
        Those of the parameters, by name.
    examples
        To train with.
    """

    examples: int

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._own = threading.local()

    @abstractmethod
    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the standard deviation of fresh weights, of two dimensions or more."""

    def initial(self, seed: int) -> dict[str, Array]:
        """Return fresh parameters, float32: normal weights, and zeros of one dimension."""
        random = np.random.default_rng([seed, 3])
        return {
            name: (random.standard_normal(shape) * self.deviation(name, shape)).astype(np.float32)
            if len(shape) > 1
            else np.zeros(shape, np.float32)
            for name, shape in self.shapes.items()
        }

    @abstractmethod
    def scores(self, weights: Mapping[str, Any], rows: Ints) -> tuple[Any, Any]:
        """Return the scores of a mini-batch, ``float32[n, classes]``, and the classes it has."""

    @abstractmethod
    def tested(self, weights: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the same of the test, a part at a time."""

    def gradient(
        self, params: Mapping[str, Array], rows: Ints, out: Params, *, flipped: bool = False
    ) -> None:
        """Write the gradient of the mini-batch's mean cross-entropy.

        ``flipped``: of wrong classes, the last for the first and so on.
        """
        weights = self.weights(params)
        for weight in weights.values():
            weight.grad = None
        scores, classes = self.scores(weights, np.asarray(rows, np.int64))
        classes = scores.shape[1] - 1 - classes if flipped else classes
        functional.cross_entropy(scores, classes).backward()
        for name, weight in weights.items():
            out[name][...] = weight.grad.numpy()

    def validate(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return the mean cross-entropy in nats, and the share of wrong classes, of the test."""
        weights, cost, wrong, count = self.weights(params), 0.0, 0, 0
        with torch.no_grad():
            for scores, classes in self.tested(weights):
                cost += float(functional.cross_entropy(scores, classes, reduction="sum"))
                wrong += int((scores.argmax(1) != classes).sum())
                count += len(classes)
        return cost / count, wrong / count

    def weights(self, params: Mapping[str, Array]) -> dict[str, Any]:
        """Return the parameters as this thread's tensors."""
        weights: dict[str, Any] | None = getattr(self._own, "weights", None)
        if weights is None:
            made = {name: self.laid_out(torch.zeros(s)) for name, s in self.shapes.items()}
            self._own.weights = weights = {n: w.requires_grad_() for n, w in made.items()}
        for name, weight in weights.items():
            weight.detach().numpy()[...] = params[name]
        return weights

    @staticmethod
    def laid_out(tensor: Any) -> Any:
        """Return a parameter as it lies in memory; override where another order is faster."""
        return tensor
