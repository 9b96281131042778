"""The convolutional network of the softsync paper, on CIFAR-10, in PyTorch: a `Task`.

Three convolutions, each with pooling, and one fully connected layer, as in Caffe's CIFAR-10 model:
89,578 parameters in all. Source: Zhang et al., "Staleness-aware async-SGD for distributed deep
learning", 2016, section 5.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aiops.client.params import Params
from aiops.errors import UsageError
from aiops.lab.workloads import load
from aiops.lab.workloads.dataset import Dataset
from aiops.model.layout import Array, Ints

_WIDTHS = (32, 32, 64)
_KERNEL = 5
_CHUNK = 1000  # examples validated at a time


class ConvNet:
    """The network, its data, and its gradient.

    Images have the training images' mean taken off, and nothing else is done to them. Weights begin
    as He et al. 2015 have them, biases at 0.

    Parameters
    ----------
    data
        A data set of images of 32 × 32 in three colours, or its name.
    weight_decay
        Times the weights (not the biases), added to the gradient.

    Raises
    ------
    UsageError
        When the images are others.
    """

    def __init__(self, data: Dataset | str = "cifar10", weight_decay: float = 0.004) -> None:
        found = load(data) if isinstance(data, str) else data
        if found.shape != (32, 32, 3):
            raise UsageError(
                f"the network takes images of 32 × 32 in three colours, not {found.shape}: give"
                " cifar10"
            )
        self.weight_decay, self.examples = weight_decay, len(found.train_x)
        mean = found.train_x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._x, self._y = _images(found.train_x, mean), torch.tensor(found.train_y)
        self._test = _images(found.test_x, mean), torch.tensor(found.test_y)
        self.shapes = _shapes(found.classes)
        self._own = threading.local()

    def initial(self, seed: int) -> dict[str, Array]:
        """Return fresh parameters, float32."""
        random = np.random.default_rng([seed, 3])
        params: dict[str, Array] = {}
        for name, shape in self.shapes.items():
            fan_in = int(np.prod(shape[1:]))
            drawn = random.standard_normal(shape) * np.sqrt(2 / fan_in) if len(shape) > 1 else 0
            params[name] = np.full(shape, drawn, np.float32)
        return params

    def gradient(self, params: Mapping[str, Array], rows: Ints, out: Params) -> None:
        """Write the gradient of the mini-batch's mean cross-entropy, with the decay's."""
        weights = self._weights(params)
        for weight in weights.values():
            weight.grad = None
        chosen = torch.from_numpy(np.asarray(rows, np.int64))
        cost = functional.cross_entropy(_scores(weights, self._x[chosen]), self._y[chosen])
        cost.backward()
        for name, weight in weights.items():
            out[name][...] = weight.grad.numpy()
            if weight.dim() > 1:
                out[name][...] += self.weight_decay * params[name]

    def validate(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return the mean cross-entropy in nats, and the share of wrong classes, of the test."""
        weights, (x, y) = self._weights(params), self._test
        cost, wrong = 0.0, 0
        with torch.no_grad():
            for images, labels in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
                scores = _scores(weights, images)
                cost += float(functional.cross_entropy(scores, labels, reduction="sum"))
                wrong += int((scores.argmax(1) != labels).sum())
        return cost / len(y), wrong / len(y)

    def _weights(self, params: Mapping[str, Array]) -> dict[str, Any]:
        """Return the parameters as this thread's tensors."""
        weights: dict[str, Any] | None = getattr(self._own, "weights", None)
        if weights is None:
            weights = {n: _channels_last(torch.zeros(s)) for n, s in self.shapes.items()}
            self._own.weights = {n: w.requires_grad_() for n, w in weights.items()}
        for name, weight in weights.items():
            weight.detach().numpy()[...] = params[name]
        return weights


def _images(x: Array, mean: Array) -> Any:
    """Return images as PyTorch has them: float32[n, colours, height, width]."""
    return _channels_last(torch.tensor((x - mean).transpose(0, 3, 1, 2)))


def _channels_last(tensor: Any) -> Any:
    """Return images, or a convolution's weights, as they lie best: pooling is ten times as fast."""
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


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
