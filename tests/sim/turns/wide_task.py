"""A task of cheap gradients, whose tensors have several dtypes and are large enough to code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aiops.client.params import Params
from aiops.model.layout import Array, Ints


class WideTask:
    """A quadratic in each element, with noise that the mini-batch decides."""

    NBYTES = 4 * 640 + 4 * 8 + 2 * 40

    examples = 200

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return tensors of 32 and 16 bits, and one without elements."""
        return {
            "wide": np.linspace(-1, 1, 640, dtype=np.float32).reshape(32, 20),
            "half": np.linspace(1, 2, 40).astype(np.float16),
            "bias": np.full(8, seed, np.float32),
            "none": np.zeros((0, 3), np.float32),
        }

    def gradient(self, params: Mapping[str, Array], rows: Ints, out: Params) -> None:
        """Use nothing but sums of two, which are the same on every machine."""
        noise = (int(rows[0]) % 17 - 8) / 256
        for name in out:
            step = np.arange(out[name].size).reshape(out[name].shape) % 5 * noise
            out[name][...] = params[name] / 16 + step.astype(out[name].dtype)

    def validate(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return one element, twice."""
        value = float(params["wide"][0, 0])
        return value, value
