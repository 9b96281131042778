"""``fp16`` and ``bf16``: encode every element in 16 bits, rounded to nearest, ties to even.

``fp16`` is IEEE 754's binary16: 11 significant bits from 6·10⁻⁵ to 65,504, fewer down to 6·10⁻⁸. A
larger magnitude is encoded as 65,504, and error feedback keeps the rest. ``bf16`` is the upper half
of a float32: its range, and 8 significant bits.

Payload of n elements: ``uint16[n]``, little endian.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from aiops.codecs.base import Floats
from aiops.codecs.block_codec import BlockCodec, EntryLoops, are_fit, differ, difference
from aiops.codecs.int8 import copy_into
from aiops.kernels import reaches, scan
from aiops.kernels.lazy_numba import (
    bf16_to_float,
    disjoint,
    float_to_fp16,
    fp16_to_float,
    helper,
    read_only,
    writable,
)
from aiops.kernels.payloads import FORMATS

__all__ = ["BF16", "BF16_LARGEST", "FP16", "FP16_LARGEST", "loops"]

FP16_LARGEST = np.float32(65_504.0)
BF16_LARGEST = np.uint32(0x5D5E_0000).view(np.float32)  # just below 1e18
_FIRST_UNFIT = {"fp16": 0x7C00, "bf16": 0x5D5F}
_MAGNITUDE = 0x7FFF


@dataclass(frozen=True, kw_only=True)
class HalfCodec(BlockCodec):
    """The base of the two formats; ``name`` tells which."""

    @classmethod
    def sections_fault(cls, sections: Sequence[Any], backend: str) -> str | None:
        """Return which element is not finite, or is 1e18 or more in magnitude, or None."""
        (halves,) = sections
        index = reaches(halves, _MAGNITUDE, _FIRST_UNFIT[cls.name], backend)
        if index < 0:
            return None
        value = FORMATS[cls.name].values(halves[index : index + 1], 1)
        return f"has {float(value[0]):g} for element {index}"

    @classmethod
    def encode_numpy(cls, values: Floats, rest: Floats, *sections: Any) -> None:
        """Round ``values``, or ``values + rest``."""
        (halves,) = sections
        exact = np.add(values, rest, out=rest) if rest.size else values
        if cls.name == "fp16":
            halves.view(np.float16)[:] = np.clip(exact, -FP16_LARGEST, FP16_LARGEST)
        else:
            bits = np.clip(exact, -BF16_LARGEST, BF16_LARGEST).view(np.uint32)
            odd = bits >> np.uint32(16) & np.uint32(1)
            halves[:] = (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
        if rest.size:
            rest -= FORMATS[cls.name].values(halves, halves.size)

    @classmethod
    def loops(cls) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the compiled loops of this format."""
        return loops(cls.name)

    @classmethod
    def entry_loops(cls) -> EntryLoops:
        """Return the loops for compiled code."""
        return _ENTRY_LOOPS[cls.name]

    @classmethod
    def warm(cls) -> None:
        """Compile the loops, and the scan that `sections_fault` uses."""
        super().warm()
        scan.compiled_survey(2, _MAGNITUDE, _FIRST_UNFIT[cls.name])


@dataclass(frozen=True, kw_only=True)
class FP16(HalfCodec):
    """IEEE half precision, 2 bytes per element: for values between 1e-7 and 65,504."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True, kw_only=True)
class BF16(HalfCodec):
    """The upper half of a float32, 2 bytes per element: all its range, 8 significant bits."""

    name: ClassVar[str] = "bf16"


# ---------------------------------------------------------------- Numba

_F, _U, _H = np.float32, np.uint32, np.uint16
_UNFIT_FP16, _UNFIT_BF16 = _H(_FIRST_UNFIT["fp16"]), _H(_FIRST_UNFIT["bf16"])
_S16, _ONE, _ROUND = _U(16), _U(1), _U(0x7FFF)
_NEAR = 1024
"""Elements that stay in the nearest cache from one loop over them to the next."""


@functools.cache
def loops(form: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the compiled loops that encode and decode ``"fp16"`` or ``"bf16"``."""
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    read, written = array_of("float32"), array_of("float32", writable=True)
    halves, made = array_of("uint16"), array_of("uint16", writable=True)
    encode, decode = _LOOPS[form]
    return (
        compile_loop(encode, types.void(read, written, made)),
        compile_loop(decode, types.void(halves, written, types.boolean)),
    )


@helper(inline=True)
def _to_fp16(value: Any) -> Any:
    """Return the bits of a float32 rounded to binary16."""
    return float_to_fp16(max(-FP16_LARGEST, min(FP16_LARGEST, value)))


@helper(inline=True)
def _to_bf16(value: Any) -> Any:
    """Return the upper half of a float32, rounded."""
    bits = _F(max(-BF16_LARGEST, min(BF16_LARGEST, value))).view(np.uint32)
    odd = _U(_U(bits >> _S16) & _ONE)
    return _U(_U(_U(bits + odd) + _ROUND) >> _S16)


# The loops of the formats differ in the helpers alone. They are written in full because Numba keeps
# no closure over a compiled function on disk.


@helper()
def _encode_fp16(values: Any, rest: Any, halves: Any) -> None:
    disjoint()
    if rest.size:
        for i in range(values.size):
            exact = _F(values[i] + rest[i])
            half = _to_fp16(exact)
            halves[i] = half
            rest[i] = exact - fp16_to_float(half)
    else:
        for i in range(values.size):
            halves[i] = _to_fp16(values[i])


@helper()
def _encode_bf16(values: Any, rest: Any, halves: Any) -> None:
    disjoint()
    if rest.size:
        for i in range(values.size):
            exact = _F(values[i] + rest[i])
            half = _to_bf16(exact)
            halves[i] = half
            rest[i] = exact - bf16_to_float(half)
    else:
        for i in range(values.size):
            halves[i] = _to_bf16(values[i])


@helper()
def _decode_fp16(halves: Any, out: Any, add: Any) -> None:
    disjoint()
    if add:
        for i in range(out.size):
            out[i] += fp16_to_float(halves[i])
    else:
        for i in range(out.size):
            out[i] = fp16_to_float(halves[i])


@helper()
def _decode_bf16(halves: Any, out: Any, add: Any) -> None:
    disjoint()
    if add:
        for i in range(out.size):
            out[i] += bf16_to_float(halves[i])
    else:
        for i in range(out.size):
            out[i] = bf16_to_float(halves[i])


_LOOPS = {"fp16": (_encode_fp16, _decode_fp16), "bf16": (_encode_bf16, _decode_bf16)}


@helper()
def _are_fit(halves: Any, limit: Any) -> Any:
    """Return whether all magnitudes are below a limit."""
    largest = _H(0)
    for i in range(halves.size):
        magnitude = _H(halves[i] & _H(_MAGNITUDE))
        largest = magnitude if magnitude > largest else largest
    return largest < limit


def _encode_fp16_at(
    size: Any, values: Any, rest: Any, before: Any, halves: Any, nothing: Any
) -> bool:
    given, left = read_only(values, size), writable(rest, size)
    if not are_fit(given):
        return False
    copy_into(writable(before, size), left)
    _encode_fp16(given, left, writable(halves, size))
    return True


def _encode_bf16_at(
    size: Any, values: Any, rest: Any, before: Any, halves: Any, nothing: Any
) -> bool:
    given, left = read_only(values, size), writable(rest, size)
    if not are_fit(given):
        return False
    copy_into(writable(before, size), left)
    _encode_bf16(given, left, writable(halves, size))
    return True


def _decode_fp16_at(size: Any, halves: Any, nothing: Any, out: Any) -> bool:
    given = read_only(halves, size)
    if not _are_fit(given, _UNFIT_FP16):
        return False
    _decode_fp16(given, writable(out, size), False)
    return True


def _decode_bf16_at(size: Any, halves: Any, nothing: Any, out: Any) -> bool:
    given = read_only(halves, size)
    if not _are_fit(given, _UNFIT_BF16):
        return False
    _decode_bf16(given, writable(out, size), False)
    return True


def _check_fp16_at(size: Any, halves: Any, nothing: Any) -> bool:
    return bool(_are_fit(read_only(halves, size), _UNFIT_FP16))


def _add_fp16_at(size: Any, halves: Any, nothing: Any, out: Any) -> None:
    _decode_fp16(read_only(halves, size), writable(out, size), True)


def _follow_fp16_at(size: Any, values: Any, held: Any, room: Any, halves: Any, nothing: Any) -> int:
    given, into, made = read_only(values, size), writable(held, size), writable(halves, size)
    behind = False
    for start in range(0, size, _NEAR):
        stop = min(start + _NEAR, size)
        block, half, own = writable(room, stop - start), made[start:stop], into[start:stop]
        if not difference(block, given[start:stop], own):
            return 0
        _encode_fp16(block, writable(room, 0), half)
        _decode_fp16(half, own, True)
        if differ(own, given[start:stop]):
            behind = True
    return 1 if behind else 2


def _check_bf16_at(size: Any, halves: Any, nothing: Any) -> bool:
    return bool(_are_fit(read_only(halves, size), _UNFIT_BF16))


def _add_bf16_at(size: Any, halves: Any, nothing: Any, out: Any) -> None:
    _decode_bf16(read_only(halves, size), writable(out, size), True)


def _follow_bf16_at(size: Any, values: Any, held: Any, room: Any, halves: Any, nothing: Any) -> int:
    given, into, made = read_only(values, size), writable(held, size), writable(halves, size)
    behind = False
    for start in range(0, size, _NEAR):
        stop = min(start + _NEAR, size)
        block, half, own = writable(room, stop - start), made[start:stop], into[start:stop]
        if not difference(block, given[start:stop], own):
            return 0
        _encode_bf16(block, writable(room, 0), half)
        _decode_bf16(half, own, True)
        if differ(own, given[start:stop]):
            behind = True
    return 1 if behind else 2


_ENTRY_LOOPS = {
    "fp16": (_encode_fp16_at, _decode_fp16_at, _check_fp16_at, _add_fp16_at, _follow_fp16_at),
    "bf16": (_encode_bf16_at, _decode_bf16_at, _check_bf16_at, _add_bf16_at, _follow_bf16_at),
}
