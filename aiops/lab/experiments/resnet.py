"""A small residual network on CIFAR-10, in PyTorch: a `Task`.

A convolution, three blocks of 16, 32 and 64 channels, and one fully connected layer: ResNet-8, that
of He et al. 2016 (*Deep residual learning*, section 4.2) with n = 1. It has 77,850 parameters, and
group normalisation (Wu & He 2018) in the place of batch normalisation, whose statistics each worker
would have for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from aiops.lab.experiments.image_task import ImageTask
from aiops.model.layout import Array

_WIDTHS = (16, 32, 64)
_GROUPS = 8


class ResNet(ImageTask):
    """The network, its data, and its gradient."""

    def initial(self, seed: int) -> dict[str, Array]:
        """Return fresh parameters, float32: scales are 1, but a block's last is 0.

        So each block begins as what it is added to (Goyal et al. 2017, section 5.1).
        """
        params = super().initial(seed)
        for name, values in params.items():
            if name.endswith("scale"):
                values[:] = 0 if name.endswith("2.scale") else 1
        return params

    @staticmethod
    def shapes_for(classes: int) -> dict[str, tuple[int, ...]]:
        """Return the parameters' shapes, by name."""
        below = _WIDTHS[0]
        shapes = _normalised("first", below, 3)
        for number, width in enumerate(_WIDTHS, 1):
            shapes |= _normalised(f"block{number}.1", width, below)
            shapes |= _normalised(f"block{number}.2", width, width)
            if width != below:
                shapes[f"block{number}.across"] = (width, below, 1, 1)
            below = width
        return {**shapes, "fc.weight": (classes, below), "fc.bias": (classes,)}

    @staticmethod
    def scores_of(weights: Mapping[str, Any], x: Any) -> Any:
        """Return images' scores before the softmax, float32[n, classes]."""
        x = functional.relu(_convolved(weights, "first", x, 1))
        for number in range(1, len(_WIDTHS) + 1):
            name, stride = f"block{number}", 1 if number == 1 else 2
            inner = functional.relu(_convolved(weights, f"{name}.1", x, stride))
            inner = _convolved(weights, f"{name}.2", inner, 1)
            across = weights.get(f"{name}.across")
            x = x if across is None else functional.conv2d(x, across, stride=stride)
            x = functional.relu(x + inner)
        return functional.linear(x.mean((2, 3)), weights["fc.weight"], weights["fc.bias"])


def _normalised(name: str, width: int, below: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a convolution with its normalisation."""
    weights = {f"{name}.weight": (width, below, 3, 3)}
    return {**weights, f"{name}.scale": (width,), f"{name}.shift": (width,)}


def _convolved(weights: Mapping[str, Any], name: str, x: Any, stride: int) -> Any:
    """Return what a convolution and its normalisation make of x."""
    x = functional.conv2d(x, weights[f"{name}.weight"], stride=stride, padding=1)
    return functional.group_norm(x, _GROUPS, weights[f"{name}.scale"], weights[f"{name}.shift"])
