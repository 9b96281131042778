"""The convolutional network of the softsync paper, on CIFAR-10, in PyTorch: a `Task`.

Three convolutions, each with pooling, and one fully connected layer, as in Caffe's CIFAR-10 model:
89,578 parameters in all. Source: Zhang et al., "Staleness-aware async-SGD for distributed deep
learning", 2016, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aiops.client.params import Params
from aiops.errors import UsageError
from aiops.lab.experiments.torch_task import TorchTask
from aiops.lab.workloads import load
from aiops.lab.workloads.dataset import Dataset
from aiops.model.layout import Array, Ints

_WIDTHS = (32, 32, 64)
_KERNEL = 5
_CHUNK = 1000  # examples validated at a time


class ConvNet(TorchTask):
    """The network, its data, and its gradient.

    Images have the training images' mean taken off, and nothing else is done to them. Weights begin
    as He et al. 2015 have them, biases at 0.

    Parameters
    ----------
    data
        A data set of images of 32 × 32 in three colours, or its name.
    weight_decay
        Times the weights (not the biases), added to the gradient.
    tested
        Images of the test part that are validated, from its first; None: all.

    Raises
    ------
    UsageError
        When the images are others.
    """

    def __init__(
        self,
        data: Dataset | str = "cifar10",
        weight_decay: float = 0.004,
        tested: int | None = None,
    ) -> None:
        found = load(data) if isinstance(data, str) else data
        if found.shape != (32, 32, 3):
            raise UsageError(
                f"the network takes images of 32 × 32 in three colours, not {found.shape}: give"
                " cifar10"
            )
        super().__init__(_shapes(found.classes))
        self.weight_decay, self.examples = weight_decay, len(found.train_x)
        mean = found.train_x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._x, self._y = _images(found.train_x, mean), torch.tensor(found.train_y)
        self._test = _images(found.test_x[:tested], mean), torch.tensor(found.test_y[:tested])

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Return that of He et al. 2015."""
        return math.sqrt(2 / math.prod(shape[1:]))

    def gradient(
        self, params: Mapping[str, Array], rows: Ints, out: Params, *, flipped: bool = False
    ) -> None:
        """Write the gradient of the mini-batch's mean cross-entropy, with the decay's."""
        super().gradient(params, rows, out, flipped=flipped)
        for name, shape in self.shapes.items():
            if len(shape) > 1:
                out[name][...] += self.weight_decay * params[name]

    def scores(self, weights: Mapping[str, Any], rows: Ints) -> tuple[Any, Any]:
        """Return those of some images, and their classes."""
        chosen = torch.from_numpy(rows)
        return _scores(weights, self._x[chosen]), self._y[chosen]

    def tested(self, weights: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield those of the images that are validated."""
        for images, classes in zip(*(each.split(_CHUNK) for each in self._test), strict=True):
            yield _scores(weights, images), classes

    @staticmethod
    def laid_out(tensor: Any) -> Any:
        """Return images, or a weight, with channels last: pooling is ten times as fast."""
        if tensor.dim() != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)


def _images(x: Array, mean: Array) -> Any:
    """Return images as PyTorch has them: float32[n, colours, height, width]."""
    return ConvNet.laid_out(torch.tensor((x - mean).transpose(0, 3, 1, 2)))


def _shapes(classes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    below = 3
    for number, width in enumerate(_WIDTHS, 1):
        shapes |= {
            f"conv{number}.weight": (width, below, _KERNEL, _KERNEL),
            f"conv{number}.bias": (width,),
        }
        below = width
    return {**shapes, "fc.weight": (classes, below * 4 * 4), "fc.bias": (classes,)}


def _scores(weights: Mapping[str, Any], x: Any) -> Any:
    """Return the scores before the softmax, float32[n, classes]."""
    for number in range(1, len(_WIDTHS) + 1):
        weight, bias = weights[f"conv{number}.weight"], weights[f"conv{number}.bias"]
        x = functional.conv2d(x, weight, bias, padding=_KERNEL // 2)
        if number == 1:
            x = functional.relu(functional.max_pool2d(x, 3, 2, ceil_mode=True))
        else:
            x = functional.avg_pool2d(functional.relu(x), 3, 2, ceil_mode=True)
    return functional.linear(x.flatten(1), weights["fc.weight"], weights["fc.bias"])
