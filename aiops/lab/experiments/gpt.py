"""A small transformer that learns to write the documentation of Python, in PyTorch: a `Task`.

Blocks are those of GPT-2 (Radford et al. 2019), with the embedding as the last layer too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from aiops.errors import UsageError
from aiops.lab.experiments.byte_text import BYTES, ByteTask
from aiops.model.layout import Array

_DEVIATION = 0.02  # of initial weights, as GPT-2's


class ByteGPT(ByteTask):
    """The transformer, its text, and its gradient.

    Parameters
    ----------
    width
        Of the residual stream; a head has 32.
    blocks
        Of attention and perceptron.
    context
        Bytes that it sees.

    Raises
    ------
    UsageError
        When the width is no multiple of 32.
    """

    def __init__(self, width: int = 64, blocks: int = 3, context: int = 64) -> None:
        if width % 32 or width < 32:
            raise UsageError(f"a width of {width}: give a multiple of 32")
        super().__init__(_shapes(width, blocks, context), context)
        self._heads, self._blocks = width // 32, blocks

    def initial(self, seed: int) -> dict[str, Array]:
        """Return fresh parameters, float32: scales are 1."""
        params = super().initial(seed)
        for name, values in params.items():
            if name.endswith("scale"):
                values[:] = 1
        return params

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Return GPT-2's: less for what is added to the stream, once in each block."""
        last = name.endswith(("out", "down"))
        return _DEVIATION / math.sqrt(2 * self._blocks) if last else _DEVIATION

    def following(self, weights: Mapping[str, Any], seen: Any) -> Any:
        """Return the scores of the byte after each of some windows'."""
        x = weights["bytes"][seen] + weights["places"]
        for block in range(self._blocks):
            x = self._block(x, {n: weights[f"{block}.{n}"] for n in _IN_BLOCK})
        x = functional.layer_norm(x, x.shape[-1:], weights["norm.scale"], weights["norm.shift"])
        return x @ weights["bytes"].T

    def _block(self, x: Any, own: Mapping[str, Any]) -> Any:
        many, length, width = x.shape
        h = functional.layer_norm(x, (width,), own["norm1.scale"], own["norm1.shift"])
        split = (h @ own["in"].T).view(many, length, 3, self._heads, 32).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + seen.transpose(1, 2).reshape(many, length, width) @ own["out"].T
        h = functional.layer_norm(x, (width,), own["norm2.scale"], own["norm2.shift"])
        return x + functional.gelu(h @ own["up"].T) @ own["down"].T


_IN_BLOCK = (
    *("norm1.scale", "norm1.shift", "in", "out"),
    *("norm2.scale", "norm2.shift", "up", "down"),
)


def _shapes(width: int, blocks: int, context: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"bytes": (BYTES, width), "places": (context, width)}
    norm = (width,)
    each = {
        "norm1.scale": norm,
        "norm1.shift": norm,
        "in": (3 * width, width),
        "out": (width, width),
        "norm2.scale": norm,
        "norm2.shift": norm,
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    for block in range(blocks):
        shapes |= {f"{block}.{name}": shape for name, shape in each.items()}
    return {**shapes, "norm.scale": norm, "norm.shift": norm}
