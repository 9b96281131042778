"""``onebit`` as Numba loops; imported only where Numba is wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from aiops.codecs.int8 import SMALLEST
from aiops.codecs.onebit import BITS, BLOCK, LANES, LARGEST
from aiops.kernels.jit_cpu import array_of, compiled, disjoint

__all__ = ["loops"]

_F, _U = np.float32, np.uint32
_ONE, _TOP, _SIGN = _U(1), _U(31), _U(0x8000_0000)
_WIDE = BLOCK // BITS


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops that encode and decode; they are compiled once, and kept on disk."""
    read, written = array_of("float32"), array_of("float32", writable=True)
    scales = types.Array(types.float32, 1, "C", aligned=False)  # in a payload, at any address
    made = types.Array(types.uint32, 1, "C", aligned=False)
    encode = types.void(read, written, scales, made)
    decode = types.void(read, array_of("uint32"), written, types.boolean)
    return compiled(_encode, encode, cache=True), compiled(_decode, decode, cache=True)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _mean(block: Any, lanes: Any) -> Any:
    """Return the mean magnitude of a block, in the order that the codec's text lays down."""
    disjoint()
    lanes[:] = _F(0.0)
    whole = block.size // LANES
    for row in range(whole):
        at = np.uintp(row * LANES)
        for lane in range(np.uintp(LANES)):
            lanes[lane] += abs(block[at + lane])
    for i in range(whole * LANES, block.size):
        lanes[i - whole * LANES] += abs(block[i])
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
        half //= 2
    return lanes[0] / _F(block.size)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _pack(block: Any, words: Any) -> None:
    disjoint()
    if block.size == BLOCK:  # with lengths that the compiler knows
        for w in range(_WIDE):
            words[w] = _U(0)
        for bit in range(np.uintp(BITS)):
            shift = _U(bit)
            for w in range(np.uintp(_WIDE)):
                negative = _U(_F(block[bit * np.uintp(_WIDE) + w]).view(np.uint32) >> _TOP)
                words[w] = _U(words[w] | _U(negative << shift))
        return
    words[:] = _U(0)
    for i in range(block.size):
        negative = _U(_F(block[i]).view(np.uint32) >> _TOP)
        words[i % words.size] |= _U(negative << _U(i // words.size))


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add(left: Any, block: Any) -> None:
    disjoint()
    for i in range(left.size):
        left[i] += block[i]


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _take(left: Any, scale: Any) -> None:
    bits = _F(scale).view(np.uint32)
    for i in range(left.size):
        sign = _U(_F(left[i]).view(np.uint32) & _SIGN)
        left[i] -= _U(bits | sign).view(np.float32)


def _encode(values: Any, rest: Any, scales: Any, words: Any) -> None:
    lanes = np.empty(LANES, np.float32)
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, values.size)
        into = words[number * _WIDE : min((number + 1) * _WIDE, words.size)]
        block = values[start:stop]
        if rest.size:
            left = rest[start:stop]
            _add(left, block)
            scale = _mean(left, lanes)
            _pack(left, into)
        else:
            scale = _mean(block, lanes)
            _pack(block, into)
        scale = scale if scale < LARGEST else LARGEST
        scale = scale if scale >= SMALLEST else _F(0.0)
        scales[number] = scale
        if rest.size:
            _take(rest[start:stop], scale)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _unpack(words: Any, scale: Any, out: Any, add: Any) -> None:
    disjoint()
    bits = _F(scale).view(np.uint32)
    if out.size == BLOCK:
        if not add:  # adding to -0 gives every value's own bits; LLVM makes slow code of storing
            for i in range(BLOCK):
                out[i] = _F(-0.0)
        for bit in range(np.uintp(BITS)):
            shift = _U(bit)
            for w in range(np.uintp(_WIDE)):
                sign = _U(_U(words[w] >> shift) << _TOP)
                out[bit * np.uintp(_WIDE) + w] += _U(sign | bits).view(np.float32)
        return
    for i in range(out.size):
        sign = _U(_U(words[i % words.size] >> _U(i // words.size)) << _TOP)
        value = _U(sign | bits).view(np.float32)
        out[i] = out[i] + value if add else value


def _decode(scales: Any, words: Any, out: Any, add: Any) -> None:
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, out.size)
        from_ = words[number * _WIDE : min((number + 1) * _WIDE, words.size)]
        _unpack(from_, scales[number], out[start:stop], add)
