"""``raw``: the elements as they lie in memory, little endian. Nothing is copied on either side."""

from __future__ import annotations

import numpy as np

from aiops.layout import Array

NAME = "raw"


def encode(array: Array) -> memoryview:
    """Return the bytes of a tensor: the array's own memory when it is contiguous.

    Parameters
    ----------
    array
        Any shape; float64, float32, float16 or bfloat16, little endian.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data
