"""16-bit floats as Numba loops; imported only where Numba is wanted.

Numba has no binary16 on processors, so it is made of and read with integers, without a branch
(after F. Giesen's float_to_half_fast3_rtne): the loops then run in vectors on any processor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from aiops.codecs.half import BF16_LARGEST, FP16_LARGEST
from aiops.kernels.jit_cpu import (
    array_of,
    bf16_to_float,
    compiled,
    disjoint,
    float_to_fp16,
    fp16_to_float,
)

__all__ = ["loops"]

_F, _U = np.float32, np.uint32
_S16, _ONE, _ROUND = _U(16), _U(1), _U(0x7FFF)


@functools.cache
def loops(form: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops that encode and decode ``"fp16"`` or ``"bf16"``."""
    read, written = array_of("float32"), array_of("float32", writable=True)
    halves, made = array_of("uint16"), array_of("uint16", writable=True)
    encode, decode = _LOOPS[form]
    return (
        compiled(encode, types.void(read, written, made), cache=True),
        compiled(decode, types.void(halves, written, types.boolean), cache=True),
    )


@numba.njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _fp16(value: Any) -> Any:
    """Return the bits of a float32 rounded to binary16."""
    return float_to_fp16(max(-FP16_LARGEST, min(FP16_LARGEST, value)))


@numba.njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _bf16(value: Any) -> Any:
    """Return the upper half of a float32, rounded."""
    bits = _F(max(-BF16_LARGEST, min(BF16_LARGEST, value))).view(np.uint32)
    odd = _U(_U(bits >> _S16) & _ONE)
    return _U(_U(_U(bits + odd) + _ROUND) >> _S16)


# One pair of loops for each format, in full: Numba does not keep closures on disk.


def _encode_fp16(values: Any, rest: Any, halves: Any) -> None:
    disjoint()
    if rest.size:
        for i in range(values.size):
            exact = _F(values[i] + rest[i])
            half = _fp16(exact)
            halves[i] = half
            rest[i] = exact - fp16_to_float(half)
    else:
        for i in range(values.size):
            halves[i] = _fp16(values[i])


def _encode_bf16(values: Any, rest: Any, halves: Any) -> None:
    disjoint()
    if rest.size:
        for i in range(values.size):
            exact = _F(values[i] + rest[i])
            half = _bf16(exact)
            halves[i] = half
            rest[i] = exact - bf16_to_float(half)
    else:
        for i in range(values.size):
            halves[i] = _bf16(values[i])


def _decode_fp16(halves: Any, out: Any, add: Any) -> None:
    disjoint()
    if add:
        for i in range(out.size):
            out[i] += fp16_to_float(halves[i])
    else:
        for i in range(out.size):
            out[i] = fp16_to_float(halves[i])


def _decode_bf16(halves: Any, out: Any, add: Any) -> None:
    disjoint()
    if add:
        for i in range(out.size):
            out[i] += bf16_to_float(halves[i])
    else:
        for i in range(out.size):
            out[i] = bf16_to_float(halves[i])


_LOOPS = {"fp16": (_encode_fp16, _decode_fp16), "bf16": (_encode_bf16, _decode_bf16)}
