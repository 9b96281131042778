"""What generated CPU kernels import: the words on scalars, and the checks of a call.

Imports Numba, so only modules that are themselves imported when Numba is wanted may import this
one. Each word has the bits of its namesake in :mod:`aiops.kernels.vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types
from numba.extending import intrinsic

__all__ = [
    "absolute",
    "array_of",
    "compiled",
    "disjoint",
    "maximum",
    "minimum",
    "misfit",
    "overlap",
    "sign",
    "sqrt",
    "where",
]

F = TypeVar("F", bound=Callable[..., Any])


def array_of(dtype: str, *, writable: bool = False) -> Any:
    """Return Numba's type of a one-dimensional contiguous array.

    Arrays that are only read may be read-only and need not be aligned (a gradient lies in a
    receive buffer wherever the wire put it): one compiled variant then serves every array,
    and x86 and ARM lose nothing by it.
    """
    return types.Array(getattr(types, dtype), 1, "C", readonly=not writable, aligned=False)


def compiled(function: F, signature: Any, *, cache: bool) -> F:
    """Compile ``function`` for ``signature`` now; keep the machine code on disk if ``cache``."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: F = numba.njit(signature, cache=cache, **options)(function)
    except RuntimeError as error:
        # Numba found no folder that it may write its cache into.
        if not cache or "cannot cache" not in str(error):
            raise
        compiled = numba.njit(signature, **options)(function)
    return compiled


def _word(function: F) -> F:
    inlined: F = numba.njit(forceinline=True, error_model="numpy")(function)
    return inlined


def _disjoint(typing_context: Any) -> Any:
    """Declare that no two arrays among the enclosing function's arguments overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for argument in builder.function.args:
            if str(argument.type) in ("float*", "double*"):  # an array's data
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), generate


disjoint = intrinsic(_disjoint)


@_word
def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """``then`` if ``condition`` holds, else ``otherwise``; both are at hand, so it is a select."""
    return then if condition else otherwise


@_word
def sqrt(x: Any) -> Any:
    """Square root, NaN below zero."""
    return math.sqrt(x)


@_word
def maximum(x: Any, y: Any) -> Any:
    """The larger value; NaN if either is; a zero is +0."""
    return (x if (x > y or x != x) else y) + type(x)(0.0)


@_word
def minimum(x: Any, y: Any) -> Any:
    """The smaller value; NaN if either is; a zero is +0."""
    return (x if (x < y or x != x) else y) + type(x)(0.0)


@_word
def absolute(x: Any) -> Any:
    """The absolute value."""
    return abs(x)


@_word
def sign(x: Any) -> Any:
    """-1, +0 or 1 by the sign, NaN for NaN."""
    real = type(x)
    if x > real(0.0):
        return real(1.0)
    if x < real(0.0):
        return real(-1.0)
    return x + real(0.0)


@_word
def overlap(one: Any, two: Any) -> Any:
    """Whether two contiguous arrays share memory."""
    first, second = one.ctypes.data, two.ctypes.data
    return first < second + two.size * two.itemsize and second < first + one.size * one.itemsize


@_word
def misfit(lo: Any, hi: Any, src: Any, step: Any, size: Any, grad_size: Any) -> Any:
    """Whether any span reaches outside the arrays, or the columns differ in length."""
    if not (lo.size == hi.size and lo.size == src.size and lo.size == step.size):
        return True
    for row in range(lo.size):
        if lo[row] < 0 or hi[row] < lo[row] or hi[row] > size:
            return True
        if src[row] < 0 or src[row] > grad_size - (hi[row] - lo[row]):
            return True
    return False
