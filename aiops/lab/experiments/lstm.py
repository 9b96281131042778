"""A small LSTM that learns to write the documentation of Python, in PyTorch: a `Task`.

One layer (Hochreiter & Schmidhuber 1997; forget gates as Gers et al. 2000), whose state begins at 0
in each window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aiops.errors import UsageError
from aiops.lab.experiments.byte_text import BYTES, ByteTask
from aiops.model.layout import Array

_GATES = 4  # input, forget, cell, output: PyTorch's order


class ByteLSTM(ByteTask):
    """The network, its text, and its gradient.

    Parameters
    ----------
    width
        Of the embedding of a byte.
    units
        Of the layer.
    context
        Bytes that it sees.

    Raises
    ------
    UsageError
        When one of them is not 1 or more.
    """

    def __init__(self, width: int = 32, units: int = 96, context: int = 32) -> None:
        if min(width, units, context) < 1:
            raise UsageError("an LSTM needs a width, units and a context of 1 or more")
        shapes = {
            "bytes": (BYTES, width),
            "in": (_GATES * units, width),
            "again": (_GATES * units, units),
            "gates": (_GATES * units,),
            "out": (BYTES, units),
            "out.bias": (BYTES,),
        }
        super().__init__(shapes, context)
        self._units = units
        # PyTorch adds two biases, of which one is enough.
        self._no_bias = torch.zeros(_GATES * units)

    def initial(self, seed: int) -> dict[str, Array]:
        """Return fresh parameters, float32: forget gates are open."""
        params = super().initial(seed)
        params["gates"][self._units : 2 * self._units] = 1
        return params

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Return 1 of the bytes' vectors, and of others one that keeps the length of a vector."""
        return 1.0 if name == "bytes" else float(shape[1] ** -0.5)

    def following(self, weights: Mapping[str, Any], seen: Any) -> Any:
        """Return the scores of the byte after each of some windows'."""
        zeros = torch.zeros(1, len(seen), self._units)
        layer = [weights["in"], weights["again"], weights["gates"], self._no_bias]
        states, _last, _cell = torch.lstm(
            *(weights["bytes"][seen], (zeros, zeros), layer),
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=True,
            bidirectional=False,
            batch_first=True,
        )
        return states @ weights["out"].T + weights["out.bias"]
