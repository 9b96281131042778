"""The base of tasks that classify images of CIFAR-10's kind, in PyTorch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from aiops.client.params import Params
from aiops.errors import UsageError
from aiops.lab.experiments.torch_task import TorchTask
from aiops.lab.workloads import load
from aiops.lab.workloads.dataset import Dataset
from aiops.model.layout import Array, Ints

_CHUNK = 1000  # examples validated at a time


class ImageTask(TorchTask):
    """A network's data, and its gradient: derive, and give the shapes and the scores.

    Images have the training images' mean taken off, and nothing else is done to them. Weights begin
    as He et al. 2015 have them, all else at 0.

    Parameters
    ----------
    data
        A data set of images of 32 × 32 in three colours, or its name.
    weight_decay
        Times the weights (not what is of one dimension), added to the gradient.
    tested
        Images of the test part that are validated, from its first; None: all.

    Raises
    ------
    UsageError
        When the images are others.
    """

    def __init__(
        self, data: Dataset | str = "cifar10", weight_decay: float = 0.0, tested: int | None = None
    ) -> None:
        found = load(data) if isinstance(data, str) else data
        if found.shape != (32, 32, 3):
            raise UsageError(
                f"the network takes images of 32 × 32 in three colours, not {found.shape}: give"
                " cifar10"
            )
        super().__init__(self.shapes_for(found.classes))
        self.weight_decay, self.examples = weight_decay, len(found.train_x)
        mean = found.train_x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._x, self._y = _images(found.train_x, mean), torch.tensor(found.train_y)
        self._test = _images(found.test_x[:tested], mean), torch.tensor(found.test_y[:tested])

    @staticmethod
    @abstractmethod
    def shapes_for(classes: int) -> dict[str, tuple[int, ...]]:
        """Return the parameters' shapes, by name."""

    @staticmethod
    @abstractmethod
    def scores_of(weights: Mapping[str, Any], x: Any) -> Any:
        """Return images' scores before the softmax, float32[n, classes]."""

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Return that of He et al. 2015."""
        return math.sqrt(2 / math.prod(shape[1:]))

    def gradient(
        self, params: Mapping[str, Array], rows: Ints, out: Params, *, flipped: bool = False
    ) -> None:
        """Write the gradient of the mini-batch's mean cross-entropy, with the decay's."""
        super().gradient(params, rows, out, flipped=flipped)
        for name, shape in self.shapes.items():
            if len(shape) > 1 and self.weight_decay:
                out[name][...] += self.weight_decay * params[name]

    def scores(self, weights: Mapping[str, Any], rows: Ints) -> tuple[Any, Any]:
        """Return those of some images, and their classes."""
        chosen = torch.from_numpy(rows)
        return self.scores_of(weights, self._x[chosen]), self._y[chosen]

    def tested(self, weights: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield those of the images that are validated."""
        for images, classes in zip(*(each.split(_CHUNK) for each in self._test), strict=True):
            yield self.scores_of(weights, images), classes

    @staticmethod
    def laid_out(tensor: Any) -> Any:
        """Return images, or a weight, with channels last: pooling is ten times as fast."""
        if tensor.dim() != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)


def _images(x: Array, mean: Array) -> Any:
    """Return images as PyTorch has them: float32[n, colours, height, width]."""
    return ImageTask.laid_out(torch.tensor((x - mean).transpose(0, 3, 1, 2)))
