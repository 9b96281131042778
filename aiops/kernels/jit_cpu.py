"""What generated CPU kernels import: the words on scalars, and the checks of a call.

Imports Numba, so only modules that are themselves imported when Numba is wanted may import this
one. Each word has the bits of its namesake in :mod:`aiops.kernels.vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

__all__ = [
    "absolute",
    "array_of",
    "bf16_to_float",
    "compiled",
    "disjoint",
    "fp16_to_float",
    "maximum",
    "minimum",
    "misfit",
    "onebit_to_float",
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


_F, _U = np.float32, np.uint32
_S13, _S16, _TOP = _U(13), _U(16), _U(31)
_LEAST_NORMAL, _LEAST_NORMAL_VALUE = _U(113 << 23), _F(2.0**-14)
_BIAS = _U((127 - 15) << 23)
_MAGNITUDE, _SIGN, _EXPONENT = _U(0x7FFF), _U(0x8000), _U(0x7C00)


@_word
def fp16_to_float(half: Any) -> Any:
    """The float32 that the bits of a finite binary16 stand for; no branch, so it runs in vectors.

    Numba has no binary16 on processors. After F. Giesen's half_to_float_fast.
    """
    magnitude = _U(_U(_U(half) & _MAGNITUDE) << _S13)
    normal = _U(magnitude + _BIAS)
    small = _F(_U(magnitude + _LEAST_NORMAL).view(np.float32) - _LEAST_NORMAL_VALUE)
    tiny = _U(_U(half) & _EXPONENT) == _U(0)
    bits = _F(small).view(np.uint32) if tiny else normal
    return _U(bits | _U(_U(_U(half) & _SIGN) << _S16)).view(np.float32)


@_word
def bf16_to_float(half: Any) -> Any:
    """The float32 of which these bits are the upper half."""
    return _U(_U(half) << _S16).view(np.float32)


@_word
def onebit_to_float(word: Any, bit: Any, scale: Any) -> Any:
    """The scale, negative if that bit of a word is set."""
    sign = _U(_U(_U(word) >> _U(bit)) << _TOP)
    return _U(_F(scale).view(np.uint32) | sign).view(np.float32)


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
