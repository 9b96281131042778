"""The convolutional network of the softsync paper, on CIFAR-10, in PyTorch: a `Task`.

Three convolutions, each with pooling, and one fully connected layer, as in Caffe's CIFAR-10 model:
89,578 parameters in all. Source: Zhang et al., "Staleness-aware async-SGD for distributed deep
learning", 2016, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from aiops.lab.experiments.image_task import ImageTask

_WIDTHS = (32, 32, 64)
_KERNEL = 5


class ConvNet(ImageTask):
    """The network, its data, and its gradient."""

    @staticmethod
    def shapes_for(classes: int) -> dict[str, tuple[int, ...]]:
        """Return the parameters' shapes, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        below = 3
        for number, width in enumerate(_WIDTHS, 1):
            shapes |= {
                f"conv{number}.weight": (width, below, _KERNEL, _KERNEL),
                f"conv{number}.bias": (width,),
            }
            below = width
        return {**shapes, "fc.weight": (classes, below * 4 * 4), "fc.bias": (classes,)}

    @staticmethod
    def scores_of(weights: Mapping[str, Any], x: Any) -> Any:
        """Return images' scores before the softmax, float32[n, classes]."""
        for number in range(1, len(_WIDTHS) + 1):
            weight, bias = weights[f"conv{number}.weight"], weights[f"conv{number}.bias"]
            x = functional.conv2d(x, weight, bias, padding=_KERNEL // 2)
            if number == 1:
                x = functional.relu(functional.max_pool2d(x, 3, 2, ceil_mode=True))
            else:
                x = functional.avg_pool2d(functional.relu(x), 3, 2, ceil_mode=True)
        return functional.linear(x.flatten(1), weights["fc.weight"], weights["fc.bias"])
