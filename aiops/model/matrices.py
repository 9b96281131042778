"""Tensors as matrices: for algorithms that treat a matrix as what it does to a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_OBLONG = 64
"""A tensor that is more times as long as wide is no matrix: an embedding, say."""

_FEW = 16
"""With fewer columns this is the most: a layer before a few classes is no matrix, either."""


_SIDE = 64
"""The longer side of a matrix whose direction is taken at the learning rate itself."""


def direction_rate(shape: Sequence[int]) -> float:
    """Return what multiplies the learning rate of a tensor that steps along its direction.

    √(64/m) for a matrix whose longer side is m, and 1 for what is none.

    Example
    -------
    >>> direction_rate((64, 256)), direction_rate((64,))
    (0.5, 1.0)
    """
    matrix = as_matrix(shape)
    return math.sqrt(_SIDE / max(matrix)) if matrix else 1.0


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
    >>> as_matrix((32, 32, 5, 5)), as_matrix((200, 10)), as_matrix((50_000, 64))
    ((32, 800), None, None)
    """
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        return None
    rows, columns = max(((shape[0], size // shape[0]), (size // shape[-1], shape[-1])), key=min)
    narrow = min(rows, columns)
    most = MOST_OBLONG if narrow >= _FEW else _FEW
    return (rows, columns) if narrow > 1 and max(rows, columns) <= most * narrow else None
