"""``onebit``: encode the signs and one scale per block, a 32nd of a float32 (Seide et al. 2014).

Each block of 1,024 elements is written as the signs of its elements and the mean of their
magnitudes. Meant for error feedback: without it, most of a gradient is lost.

Payload of n elements: ``float32[⌈n/1024⌉]``, the scales; then for each block of m elements
``uint32[W]``, W = ⌈m/32⌉: bit b of word w is set where element b·W + w is negative (-0 is), and
bits past the block are 0. An element is its block's scale with that sign.

The mean is a sum divided by m. There are 64 sums in float32 (element i of the block is added to sum
i mod 64, in order); the second half of them is added to the first until one is left. A scale below
2⁻¹²⁶ is written as 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from aiops.codecs.base import Floats
from aiops.codecs.block_codec import BlockCodec, EntryLoops, are_fit, differ, difference
from aiops.codecs.int8 import (
    SMALLEST,
    add_into,
    are_scales,
    copy_into,
    scales_fault,
    top_scale,
)
from aiops.kernels.lazy_numba import disjoint, helper, read_only, writable
from aiops.kernels.payloads import ONEBIT_BITS as BITS
from aiops.kernels.payloads import ONEBIT_BLOCK as BLOCK
from aiops.kernels.payloads import block_rows, blocks

__all__ = ["BITS", "BLOCK", "LANES", "LARGEST", "OneBit", "loops"]

LANES = 64
"""Sums that run side by side in a block."""

LARGEST = top_scale(1.0)


@dataclass(frozen=True, kw_only=True)
class OneBit(BlockCodec):
    """Signs and the mean magnitude of every 1,024 elements: 0.129 bytes per element."""

    name: ClassVar[str] = "onebit"
    accumulates: ClassVar[bool] = True

    @classmethod
    def sections_fault(cls, sections: Sequence[Any], backend: str) -> str | None:
        """Return which scale cannot be, or None; all words of signs are valid."""
        return scales_fault(sections[0], LARGEST)

    @classmethod
    def encode_numpy(cls, values: Floats, rest: Floats, *sections: Any) -> None:
        """Write the scale and the signs of every block."""
        scales, words = sections
        exact = np.add(values, rest, out=rest) if rest.size else values
        for start, stop, width in block_rows(values.size, BLOCK):
            block = exact[start:stop].reshape(-1, width)
            scale = np.minimum(_means(block), LARGEST)
            scale[scale < SMALLEST] = 0.0
            scales[start // BLOCK : blocks(stop, BLOCK)] = scale
            wide = blocks(width, BITS)
            signs = np.zeros((len(block), BITS * wide), np.uint32)
            signs[:, :width] = np.signbit(block)
            shifted = signs.reshape(-1, BITS, wide) << np.arange(BITS, dtype=np.uint32)[:, None]
            packed = np.bitwise_or.reduce(shifted, axis=1)
            words[start // BITS : blocks(stop, BITS)] = packed.reshape(-1)
            if rest.size:
                block -= np.copysign(scale[:, None], block)

    @classmethod
    def loops(cls) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the compiled loops."""
        return loops()

    @classmethod
    def entry_loops(cls) -> EntryLoops:
        """Return the loops for compiled code."""
        return _encode_at, _decode_at, _check_at, _add_at, _follow_at


def _means(block: Any) -> Floats:
    """Return the mean magnitude of each row, float32[rows, width] with width at most a block."""
    rows, width = block.shape
    padded = np.zeros((rows, BLOCK), np.float32)
    np.abs(block, out=padded[:, :width])
    lanes: Floats = np.zeros((rows, LANES), np.float32)
    for start in range(0, BLOCK, LANES):
        lanes += padded[:, start : start + LANES]
    means: Floats = np.divide(sum_lanes(lanes), np.float32(width))
    return means


def sum_lanes(lanes: Floats) -> Floats:
    """Return the sum of each row, float32[rows, 2**k], by adding halves until one is left."""
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


# ---------------------------------------------------------------- Numba

_F, _U = np.float32, np.uint32
_TOP, _SIGN = _U(31), _U(0x8000_0000)
_WIDE = BLOCK // BITS


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops that encode and decode; they are compiled once, and kept on disk."""
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    read, written = array_of("float32"), array_of("float32", writable=True)
    scales = types.Array(types.float32, 1, "C", aligned=False)  # in a payload, at any address
    made = types.Array(types.uint32, 1, "C", aligned=False)
    return (
        compile_loop(_encode, types.void(read, written, scales, made)),
        compile_loop(_decode, types.void(read, array_of("uint32"), written, types.boolean)),
    )


@helper()
def add_halves(lanes: Any) -> Any:
    """Return the sum of `LANES` numbers, as `sum_lanes` does; they are overwritten."""
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
        half //= 2
    return lanes[0]


@helper()
def _mean(block: Any, lanes: Any) -> Any:
    """Return the mean magnitude of a block, added up in the specified order."""
    disjoint()
    lanes[:] = _F(0.0)
    whole = block.size // LANES
    for row in range(whole):
        at = np.uintp(row * LANES)
        for lane in range(np.uintp(LANES)):
            lanes[lane] += abs(block[at + lane])
    for i in range(whole * LANES, block.size):
        lanes[i - whole * LANES] += abs(block[i])
    return add_halves(lanes) / _F(block.size)


@helper()
def _pack(block: Any, words: Any) -> None:
    disjoint()
    if block.size == BLOCK:  # constant lengths, so LLVM unrolls and vectorises
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


@helper()
def _subtract_coded(rest: Any, scale: Any) -> None:
    bits = _F(scale).view(np.uint32)
    for i in range(rest.size):
        sign = _U(_F(rest[i]).view(np.uint32) & _SIGN)
        rest[i] -= _U(bits | sign).view(np.float32)


@helper()
def _encode(values: Any, rest: Any, scales: Any, words: Any) -> None:
    lanes = np.empty(LANES, np.float32)
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, values.size)
        into = words[number * _WIDE : min((number + 1) * _WIDE, words.size)]
        block = values[start:stop]
        if rest.size:
            left = rest[start:stop]
            add_into(left, block)
            scale = _mean(left, lanes)
            _pack(left, into)
        else:
            scale = _mean(block, lanes)
            _pack(block, into)
        scale = scale if scale < LARGEST else LARGEST
        scale = scale if scale >= SMALLEST else _F(0.0)
        scales[number] = scale
        if rest.size:
            _subtract_coded(rest[start:stop], scale)


@helper()
def _unpack(words: Any, scale: Any, out: Any, add: Any) -> None:
    disjoint()
    bits = _F(scale).view(np.uint32)
    if out.size == BLOCK:
        if not add:  # adding to -0 keeps every bit; LLVM makes slow code of plain stores
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


@helper()
def _decode(scales: Any, words: Any, out: Any, add: Any) -> None:
    for number in range(scales.size):
        start = number * BLOCK
        stop = min(start + BLOCK, out.size)
        from_ = words[number * _WIDE : min((number + 1) * _WIDE, words.size)]
        _unpack(from_, scales[number], out[start:stop], add)


@helper()
def _words(size: Any) -> Any:
    """Return the words of signs of a number of elements."""
    last = size % BLOCK
    return size // BLOCK * _WIDE + -(-last // BITS)


def _encode_at(size: Any, values: Any, rest: Any, before: Any, scales: Any, words: Any) -> bool:
    given, left = read_only(values, size), writable(rest, size)
    if not are_fit(given):
        return False
    copy_into(writable(before, size), left)
    _encode(given, left, writable(scales, -(-size // BLOCK)), writable(words, _words(size)))
    return True


def _decode_at(size: Any, scales: Any, words: Any, out: Any) -> bool:
    given = read_only(scales, -(-size // BLOCK))
    if not are_scales(given, LARGEST):
        return False
    _decode(given, read_only(words, _words(size)), writable(out, size), False)
    return True


def _check_at(size: Any, scales: Any, words: Any) -> bool:
    return bool(are_scales(read_only(scales, -(-size // BLOCK)), LARGEST))


def _add_at(size: Any, scales: Any, words: Any, out: Any) -> None:
    given = read_only(scales, -(-size // BLOCK))
    _decode(given, read_only(words, _words(size)), writable(out, size), True)


def _follow_at(size: Any, values: Any, held: Any, room: Any, scales: Any, words: Any) -> int:
    given, into, block = read_only(values, size), writable(held, size), writable(room, size)
    if not difference(block, given, into):
        return 0
    first, second = writable(scales, -(-size // BLOCK)), writable(words, _words(size))
    _encode(block, writable(room, 0), first, second)
    _decode(first, second, into, True)
    return 1 if differ(into, given) else 2
