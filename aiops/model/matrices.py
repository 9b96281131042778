"""Tensors as matrices: for algorithms that treat a matrix as what it does to a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_OBLONG = 16
"""A tensor that would be more times as long as wide is no matrix: an embedding, or the layer before
a few classes."""


def as_matrix(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the rows and columns of a tensor as a matrix, or None if it is none.

    One of more than two dimensions is a matrix whose rows are its first dimension, or whose columns
    are its last, whichever is nearer to a square. So the weights of a convolution are one where
    they are (out, in, height, width), as in PyTorch, and where they are (height, width, in, out),
    as in Flax.

    Example
    -------
    >>> as_matrix((64, 32, 3, 3)), as_matrix((3, 3, 32, 64)), as_matrix((64,))
    ((64, 288), (288, 64), None)
    """
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        return None
    rows, columns = max(((shape[0], size // shape[0]), (size // shape[-1], shape[-1])), key=min)
    narrow = min(rows, columns)
    return (rows, columns) if narrow > 1 and max(rows, columns) <= MOST_OBLONG * narrow else None
