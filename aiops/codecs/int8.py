"""``int8``: a quarter of a float32: small integers, and a scale per block.

Each block of 256 elements is divided by its scale, the largest magnitude over 127, and rounded to
the nearest integer, ties to even. Payload of n elements: ``float32[⌈n/256⌉]``, the scales, then
``int8[n]``; element i is ``codes[i] * scales[i // 256]``, in float32. A scale below 2⁻¹²⁶ is
written as 0, and its block as zeros. The error is at most half a scale per element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

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
from aiops.kernels import at_hand
from aiops.kernels.packed import FORMS, blocks, int8_values, pieces
from aiops.kernels.packed import INT8_BLOCK as BLOCK

__all__ = ["BLOCK", "Int8", "decode", "encode", "scales_fault", "top_scale"]


def top_scale(codes: float) -> np.float32:
    """Return the largest scale whose product with ``codes`` is below 1e18."""
    return np.float32(np.nextafter(np.float32(1e18 / codes), np.float32(0.0)))


LARGEST = top_scale(128.0)
SMALLEST = np.finfo(np.float32).tiny
MOST = np.float32(127.0)


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """Integers of 8 bits and a float32 scale per block of 256: 1.016 bytes per element."""

    name: ClassVar[str] = "int8"

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
        (scales, codes), who = sections(payload, out.size), at_hand(backend)
        return [
            partial(
                decode,
                scales[low // BLOCK : blocks(high, BLOCK)],
                *(codes[low:high], out[low:high], add, who),
            )
            for low, high in parts(out.size)
        ]

    @classmethod
    def warm(cls) -> None:
        """See `Codec.warm`."""
        from aiops.codecs import int8_cpu

        int8_cpu.loops()


def length(size: int) -> int:
    """Return how many bytes a payload of so many elements has."""
    return int(FORMS["int8"].length(size))


def sections(payload: Bytes, size: int) -> tuple[Floats, npt.NDArray[np.int8]]:
    """Return the scales and the codes of a payload, in place."""
    cut = 4 * blocks(size, BLOCK)
    return payload[:cut].view("<f4"), payload[cut:].view(np.int8)


def scales_fault(section: Bytes, largest: np.float32) -> str | None:
    """Say which of some float32 scales is negative, not finite or too large."""
    bits = section.view("<u4")  # as an unsigned number, each of these is larger than all that fit
    limit = largest.view(np.uint32)
    if not bits.size or bits.max() <= limit:
        return None
    index = int(np.argmax(bits > limit))
    value = float(section.view("<f4")[index])
    return f"has the scale {value:g} for block {index}: it must be in 0 to {float(largest):g}"


class _Encoder(ChunkEncoder):
    def __init__(self, codec: Codec, shape: Shape, *, feedback: bool, backend: str) -> None:
        super().__init__(codec, shape, feedback=feedback, backend=backend)
        self._scales, self._codes = sections(self.payload, self.size)

    def write_chunk(self, values: Floats, rest: Floats, start: int) -> None:
        stop, block = start + values.size, start // BLOCK
        scales = self._scales[block : block + blocks(values.size, BLOCK)]
        encode(values, rest, scales, self._codes[start:stop], self.backend)


def encode(values: Floats, rest: Floats, scales: Floats, codes: Any, backend: str) -> None:
    """Write ``values``, or ``values + rest`` if there is a rest, which becomes what that loses."""
    if backend == "numba":
        from aiops.codecs import int8_cpu

        int8_cpu.loops()[0](values, rest, scales, codes)
        return
    exact = np.add(values, rest, out=rest) if rest.size else values
    for start, stop, width in pieces(values.size, BLOCK):
        block = exact[start:stop].reshape(-1, width)
        scale = np.minimum(np.abs(block).max(axis=1) / MOST, LARGEST)
        scale[scale < SMALLEST] = 0.0
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        code = np.clip(np.rint(block * inverse[:, None]), -MOST, MOST)
        scales[start // BLOCK : blocks(stop, BLOCK)] = scale
        codes[start:stop] = code.astype(np.int8).reshape(-1)
        if rest.size:
            block -= code * scale[:, None]


def decode(scales: Floats, codes: Any, out: Floats, add: bool, backend: str) -> None:
    """Write what codes and scales stand for to ``out``, or add it to that."""
    if backend == "numba":
        from aiops.codecs import int8_cpu

        int8_cpu.loops()[1](scales, codes, out, add)
        return
    for start in range(0, out.size, CHUNK):
        into, code = out[start : start + CHUNK], codes[start : start + CHUNK]
        read = int8_values(scales[start // BLOCK :][: blocks(code.size, BLOCK)], code)
        np.add(into, read, out=into) if add else np.copyto(into, read)
