"""``onebit``: the signs, and one scale per block: a 32nd of a float32 (Seide et al. 2014).

Each block of 1,024 elements is written as the signs of its elements and the mean of their
magnitudes. Meant for error feedback: without it, most of a gradient is lost for good.

Payload of n elements: ``float32[⌈n/1024⌉]``, the scales; then for each block of m elements
``uint32[W]``, W = ⌈m/32⌉: bit b of word w is set where element b·W + w is negative (-0 is), and
bits past the block are 0. An element is its block's scale with that sign.

The mean is a sum divided by m. There are 64 sums in float32 (element i of the block is added to sum
i mod 64, in order); the second half of them is added to the first until one is left. A scale below
2⁻¹²⁶ is written as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from aiops.codecs.base import (
    CHUNK,
    Bytes,
    ChunkEncoder,
    Codec,
    Encoder,
    Floats,
    Shape,
    elements,
    length_fault,
    parts,
)
from aiops.codecs.int8 import SMALLEST, scales_fault, top_scale
from aiops.kernels import at_hand
from aiops.kernels.packed import FORMS, blocks, onebit_values, pieces
from aiops.kernels.packed import ONEBIT_BITS as BITS
from aiops.kernels.packed import ONEBIT_BLOCK as BLOCK

__all__ = ["BITS", "BLOCK", "LANES", "LARGEST", "OneBit"]

Words: TypeAlias = npt.NDArray[np.uint32]

LANES = 64
"""Sums that run side by side in a block."""

LARGEST = top_scale(1.0)


@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """Signs and the mean magnitude of every 1,024 elements: 0.129 bytes per element."""

    name: ClassVar[str] = "onebit"
    saves_up: ClassVar[bool] = True

    def most(self, shape: Shape) -> int:
        """Return the payload's length, which is always the same."""
        return length(elements(shape))

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """See `Codec.encoder`."""
        return _Encoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """See `Codec.check`."""
        size = elements(shape)
        fault = length_fault(payload, length(size))
        return fault or scales_fault(payload[: 4 * blocks(size, BLOCK)], LARGEST)

    @classmethod
    def decode(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> None:
        """See `Codec.decode`."""
        decode(*sections(payload, elements(shape)), out, add, at_hand(backend))

    @classmethod
    def pieces(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> Sequence[Callable[[], None]]:
        """See `Codec.pieces`."""
        (scales, words), who = sections(payload, out.size), at_hand(backend)
        return [
            partial(
                decode,
                scales[low // BLOCK : blocks(high, BLOCK)],
                words[low // BITS : blocks(high, BITS)],
                *(out[low:high], add, who),
            )
            for low, high in parts(out.size)
        ]

    @classmethod
    def warm(cls) -> None:
        """See `Codec.warm`."""
        from aiops.codecs import onebit_cpu

        onebit_cpu.loops()


def length(size: int) -> int:
    """Return how many bytes a payload of so many elements has."""
    return int(FORMS["onebit"].length(size))


def sections(payload: Bytes, size: int) -> tuple[Floats, Words]:
    """Return the scales and the words of signs of a payload, in place."""
    cut = 4 * blocks(size, BLOCK)
    return payload[:cut].view("<f4"), payload[cut:].view("<u4")


class _Encoder(ChunkEncoder):
    def __init__(self, codec: Codec, shape: Shape, *, feedback: bool, backend: str) -> None:
        super().__init__(codec, shape, feedback=feedback, backend=backend)
        self._scales, self._words = sections(self.payload, self.size)

    def write_chunk(self, values: Floats, rest: Floats, start: int) -> None:
        block, word = start // BLOCK, start // BITS
        scales = self._scales[block : block + blocks(values.size, BLOCK)]
        words = self._words[word : word + blocks(values.size, BITS)]
        if self.backend == "numba":
            from aiops.codecs import onebit_cpu

            onebit_cpu.loops()[0](values, rest, scales, words)
        else:
            _encode(values, rest, scales, words)


def _encode(values: Floats, rest: Floats, scales: Floats, words: Words) -> None:
    exact = np.add(values, rest, out=rest) if rest.size else values
    for start, stop, width in pieces(values.size, BLOCK):
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


def _means(block: Any) -> Floats:
    """Return the mean magnitude of each row, float32[rows, width] with width at most a block."""
    rows, width = block.shape
    padded = np.zeros((rows, BLOCK), np.float32)
    np.abs(block, out=padded[:, :width])
    lanes: Floats = np.zeros((rows, LANES), np.float32)
    for start in range(0, BLOCK, LANES):
        lanes += padded[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    means: Floats = np.divide(lanes[:, 0], np.float32(width))
    return means


def decode(scales: Floats, words: Words, out: Floats, add: bool, backend: str) -> None:
    """Write what scales and signs stand for to ``out``, or add it to that."""
    if backend == "numba":
        from aiops.codecs import onebit_cpu

        onebit_cpu.loops()[1](scales, words, out, add)
        return
    for start in range(0, out.size, CHUNK):
        into = out[start : start + CHUNK]
        word = words[start // BITS :][: blocks(into.size, BITS)]
        read = onebit_values(scales[start // BLOCK :], word, into.size)
        np.add(into, read, out=into) if add else np.copyto(into, read)
