"""``int8`` as Numba loops; imported only where Numba is wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from aiops.codecs.int8 import BLOCK, LARGEST, MOST, SMALLEST
from aiops.kernels.jit_cpu import array_of, compiled, disjoint

__all__ = ["loops"]

_F, _U, _I = np.float32, np.uint32, np.int32
_MAGNITUDE = np.uint32(0x7FFF_FFFF)


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops that encode and decode; they are compiled once, and kept on disk."""
    read, written = array_of("float32"), array_of("float32", writable=True)
    scales = types.Array(types.float32, 1, "C", aligned=False)  # in a payload, at any address
    codes, made = array_of("int8"), array_of("int8", writable=True)
    encode = types.void(read, written, scales, made)
    decode = types.void(read, codes, written, types.boolean)
    return compiled(_encode, encode, cache=True), compiled(_decode, decode, cache=True)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _quantise(block: Any, codes: Any) -> Any:
    """Write the codes of a block; return its scale."""
    disjoint()
    top = _U(0)
    for i in range(block.size):
        magnitude = _U(_F(block[i]).view(np.uint32) & _MAGNITUDE)
        top = magnitude if magnitude > top else top
    scale = _U(top).view(np.float32) / MOST
    scale = scale if scale < LARGEST else LARGEST
    scale = scale if scale >= SMALLEST else _F(0.0)
    inverse = _F(1.0) / scale if scale > _F(0.0) else _F(0.0)
    for i in range(block.size):
        code = _I(np.rint(block[i] * inverse))
        code = code if code < _I(127) else _I(127)
        codes[i] = code if code > _I(-127) else _I(-127)
    return scale


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add(left: Any, block: Any) -> None:
    disjoint()
    for i in range(left.size):
        left[i] += block[i]


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _take(left: Any, codes: Any, scale: Any) -> None:
    disjoint()
    for i in range(left.size):
        left[i] -= _F(codes[i]) * scale


def _encode(values: Any, rest: Any, scales: Any, codes: Any) -> None:
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, values.size)
        block, code = values[start:stop], codes[start:stop]
        if rest.size:
            left = rest[start:stop]
            _add(left, block)
            scale = _quantise(left, code)
            _take(left, code, scale)
        else:
            scale = _quantise(block, code)
        scales[number] = scale


def _decode(scales: Any, codes: Any, out: Any, add: Any) -> None:
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, out.size)
        into, code, scale = out[start:stop], codes[start:stop], scales[number]
        if add:
            for i in range(into.size):
                into[i] += _F(code[i]) * scale
        else:
            for i in range(into.size):
                into[i] = _F(code[i]) * scale
