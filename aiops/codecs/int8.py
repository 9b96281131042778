"""``int8``: encode small integers and a scale per block, a quarter of a float32.

Each block of 256 elements is divided by its scale, the largest magnitude over 127, and rounded to
the nearest integer, ties to even. Payload of n elements: ``float32[⌈n/256⌉]``, the scales, then
``int8[n]``; element i is ``codes[i] * scales[i // 256]``, in float32. A scale below 2⁻¹²⁶ is
written as 0, and its block as zeros. The error is at most half a scale per element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from aiops.codecs.base import Floats
from aiops.codecs.block_codec import BlockCodec, EntryLoops, are_fit, difference
from aiops.kernels.lazy_numba import disjoint, helper, read_only, writable
from aiops.kernels.payloads import INT8_BLOCK as BLOCK
from aiops.kernels.payloads import block_rows, blocks

__all__ = [
    "BLOCK",
    "LARGEST",
    "SMALLEST",
    "Int8",
    "add_into",
    "are_scales",
    "copy_into",
    "loops",
    "scales_fault",
    "top_scale",
]


def top_scale(codes: float) -> np.float32:
    """Return the largest float32 whose product with ``codes`` is below 1e18."""
    return np.float32(np.nextafter(np.float32(1e18 / codes), np.float32(0.0)))


LARGEST = top_scale(128.0)
SMALLEST = np.finfo(np.float32).tiny
MOST = np.float32(127.0)


def scales_fault(scales: Floats, largest: np.float32) -> str | None:
    """Return which of these scales is negative, not finite or above ``largest``, or None."""
    bits = scales.view("<u4")  # as an unsigned number, each of these is larger than all that fit
    limit = largest.view(np.uint32)
    if not bits.size or bits.max() <= limit:
        return None
    index = int(np.argmax(bits > limit))
    value = float(scales[index])
    return f"has the scale {value:g} for block {index}: it must be in 0 to {float(largest):g}"


@dataclass(frozen=True, kw_only=True)
class Int8(BlockCodec):
    """Integers of 8 bits and a float32 scale per block of 256: 1.016 bytes per element."""

    name: ClassVar[str] = "int8"

    @classmethod
    def sections_fault(cls, sections: Sequence[Any], backend: str) -> str | None:
        """Return which scale cannot be, or None; every code is valid."""
        return scales_fault(sections[0], LARGEST)

    @classmethod
    def encode_numpy(cls, values: Floats, rest: Floats, *sections: Any) -> None:
        """Write the scale and the codes of every block."""
        scales, codes = sections
        exact = np.add(values, rest, out=rest) if rest.size else values
        for start, stop, width in block_rows(values.size, BLOCK):
            block = exact[start:stop].reshape(-1, width)
            scale = np.minimum(np.abs(block).max(axis=1) / MOST, LARGEST)
            scale[scale < SMALLEST] = 0.0
            inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
            code = np.clip(np.rint(block * inverse[:, None]), -MOST, MOST)
            scales[start // BLOCK : blocks(stop, BLOCK)] = scale
            codes[start:stop] = code.astype(np.int8).reshape(-1)
            if rest.size:
                block -= code * scale[:, None]

    @classmethod
    def loops(cls) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the compiled loops."""
        return loops()

    @classmethod
    def entry_loops(cls) -> EntryLoops:
        """Return the loops for compiled code."""
        return _encode_at, _decode_at, _check_at, _add_at, _follow_at


# ---------------------------------------------------------------- Numba

_F, _U, _I = np.float32, np.uint32, np.int32
_MAGNITUDE = np.uint32(0x7FFF_FFFF)


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops that encode and decode; they are compiled once, and kept on disk."""
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    read, written = array_of("float32"), array_of("float32", writable=True)
    scales = types.Array(types.float32, 1, "C", aligned=False)  # in a payload, at any address
    codes, made = array_of("int8"), array_of("int8", writable=True)
    return (
        compile_loop(_encode, types.void(read, written, scales, made)),
        compile_loop(_decode, types.void(read, codes, written, types.boolean)),
    )


@helper(inline=True)
def _scale_of(top: Any) -> Any:
    """Return the scale of a block whose largest magnitude has these bits."""
    scale = _U(top).view(np.float32) / MOST
    scale = scale if scale < LARGEST else LARGEST
    return scale if scale >= SMALLEST else _F(0.0)


@helper(inline=True)
def _code_of(value: Any, inverse: Any) -> Any:
    code = _I(np.rint(value * inverse))
    code = code if code < _I(127) else _I(127)
    return code if code > _I(-127) else _I(-127)


@helper()
def _quantise(block: Any, codes: Any) -> Any:
    """Write the codes of a block; return its scale."""
    disjoint()
    top = _U(0)
    for i in range(block.size):
        magnitude = _U(_F(block[i]).view(np.uint32) & _MAGNITUDE)
        top = magnitude if magnitude > top else top
    scale = _scale_of(top)
    inverse = _F(1.0) / scale if scale > _F(0.0) else _F(0.0)
    for i in range(block.size):
        codes[i] = _code_of(block[i], inverse)
    return scale


@helper()
def _quantise_with(block: Any, rest: Any, codes: Any) -> Any:
    """Write the codes of a block and its rest, and leave there what they lose; return the scale."""
    disjoint()
    top = _U(0)
    for i in range(block.size):
        exact = _F(rest[i] + block[i])
        rest[i] = exact
        magnitude = _U(exact.view(np.uint32) & _MAGNITUDE)
        top = magnitude if magnitude > top else top
    scale = _scale_of(top)
    inverse = _F(1.0) / scale if scale > _F(0.0) else _F(0.0)
    for i in range(block.size):
        code = _code_of(rest[i], inverse)
        codes[i] = code
        rest[i] -= _F(code) * scale
    return scale


@helper()
def add_into(total: Any, values: Any) -> None:
    """Add an array to another that does not overlap it."""
    disjoint()
    for i in range(total.size):
        total[i] += values[i]


@helper()
def copy_into(copy: Any, values: Any) -> None:
    """Copy an array into another that does not overlap it."""
    disjoint()
    for i in range(copy.size):
        copy[i] = values[i]


@helper()
def are_scales(scales: Any, largest: Any) -> Any:
    """Return whether `scales_fault` finds none."""
    limit, most = _F(largest).view(np.uint32), np.uint32(0)
    for i in range(scales.size):
        most = max(most, _F(scales[i]).view(np.uint32))
    return most <= limit


@helper()
def _encode(values: Any, rest: Any, scales: Any, codes: Any) -> None:
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, values.size)
        block, code = values[start:stop], codes[start:stop]
        if rest.size:
            scales[number] = _quantise_with(block, rest[start:stop], code)
        else:
            scales[number] = _quantise(block, code)


@helper()
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


@helper()
def _add_block(codes: Any, scale: Any, into: Any, values: Any) -> Any:
    """Add a decoded block; return whether the sums differ from ``values``."""
    disjoint()
    count = _U(0)
    for i in range(into.size):
        value = _F(into[i] + _F(codes[i]) * scale)
        into[i] = value
        count = _U(count + (_U(1) if value != values[i] else _U(0)))
    return count > _U(0)


def _encode_at(size: Any, values: Any, rest: Any, before: Any, scales: Any, codes: Any) -> bool:
    given, left = read_only(values, size), writable(rest, size)
    if not are_fit(given):
        return False
    copy_into(writable(before, size), left)
    _encode(given, left, writable(scales, -(-size // BLOCK)), writable(codes, size))
    return True


def _decode_at(size: Any, scales: Any, codes: Any, out: Any) -> bool:
    given = read_only(scales, -(-size // BLOCK))
    if not are_scales(given, LARGEST):
        return False
    _decode(given, read_only(codes, size), writable(out, size), False)
    return True


def _check_at(size: Any, scales: Any, codes: Any) -> bool:
    return bool(are_scales(read_only(scales, -(-size // BLOCK)), LARGEST))


def _add_at(size: Any, scales: Any, codes: Any, out: Any) -> None:
    given = read_only(scales, -(-size // BLOCK))
    _decode(given, read_only(codes, size), writable(out, size), True)


def _follow_at(size: Any, values: Any, held: Any, room: Any, scales: Any, codes: Any) -> int:
    given, into = read_only(values, size), writable(held, size)
    first, second = writable(scales, -(-size // BLOCK)), writable(codes, size)
    behind = False
    for number in range(first.size):  # a block is in the nearest cache from one loop to the next
        start = number * BLOCK
        stop = min(start + BLOCK, size)
        block, code, own = writable(room, stop - start), second[start:stop], into[start:stop]
        if not difference(block, given[start:stop], own):
            return 0
        first[number] = scale = _quantise(block, code)
        if _add_block(code, scale, own, given[start:stop]):
            behind = True
    return 1 if behind else 2
