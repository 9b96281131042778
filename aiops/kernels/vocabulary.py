"""Define the functions that a rule may call; it may also use ``+ - * /`` and comparisons.

Each is an ordinary NumPy function, so a rule runs as it stands, and each has the same bits in every
backend. That is why the list is short: there is no ``exp`` and no power, whose last bit differs
between libraries. Compute such a factor once, on the host, and pass it as the step, a scalar or a
constant.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "WORDS",
    "Array",
    "Scalar",
    "Values",
    "abs",
    "absolute",
    "maximum",
    "minimum",
    "sign",
    "sqrt",
    "where",
    "word",
]

Array: TypeAlias = npt.NDArray[Any]
"""A block of a tensor, in the kernel's compute dtype (or of booleans: a comparison)."""

Scalar: TypeAlias = Any
"""A rule's ``step`` or one of its constants: one value of the compute dtype."""

Values: TypeAlias = Array | np.floating[Any] | float


def where(condition: Array, then: Values, otherwise: Values) -> Array:
    """Elementwise ``then`` where the comparison ``condition`` holds, else ``otherwise``."""
    return np.where(condition, then, otherwise)


def sqrt(x: Values) -> Array:
    """Elementwise square root, correctly rounded; NaN below zero."""
    return np.sqrt(x)


def maximum(x: Values, y: Values) -> Array:
    """Elementwise larger value; NaN if either is NaN; a zero comes out as ``+0.0``.

    NumPy leaves the sign of ``maximum(-0.0, 0.0)`` to the processor; adding ``+0.0`` settles it.
    """
    return _positive_zero(np.maximum(x, y))


def minimum(x: Values, y: Values) -> Array:
    """Elementwise smaller value; NaN if either is NaN; a zero comes out as ``+0.0``."""
    return _positive_zero(np.minimum(x, y))


def absolute(x: Values) -> Array:
    """Elementwise absolute value; the builtin ``abs`` is the same word."""
    return np.absolute(x)


def sign(x: Values) -> Array:
    """Elementwise -1, +0 or 1 by the sign of ``x``; NaN for NaN."""
    return np.sign(x)


abs = absolute


def _positive_zero(fresh: Any) -> Array:
    # In place: the array was allocated by the ufunc just before, and blocks live in cache.
    if isinstance(fresh, np.ndarray):
        fresh += 0.0
        return fresh
    return fresh + 0.0  # type: ignore[no-any-return]


WORDS: Mapping[Callable[..., Any], str] = {
    where: "where",
    sqrt: "sqrt",
    maximum: "maximum",
    minimum: "minimum",
    absolute: "absolute",
    builtins.abs: "absolute",
    sign: "sign",
}
"""The word of each callable; the builtin ``abs`` works on arrays and counts as ``absolute``."""


def word(function: object) -> str | None:
    """Return the word of ``function``, or None if it has none."""
    return WORDS.get(function) if callable(function) else None
