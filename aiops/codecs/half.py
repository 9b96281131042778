"""``fp16`` and ``bf16``: every element in 16 bits, rounded to nearest, ties to even.

``fp16`` is IEEE 754's binary16: 11 significant bits from 6·10⁻⁵ to 65,504, fewer down to 6·10⁻⁸;
what is larger is written as ±65,504, and error feedback keeps the rest. ``bf16`` is the upper half
of a float32: its range, and 8 significant bits.

Payload of n elements: ``uint16[n]``, little endian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

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
from aiops.kernels import at_hand, reaches
from aiops.kernels.packed import half_values

__all__ = [
    "BF16",
    "BF16_LARGEST",
    "FP16",
    "FP16_LARGEST",
    "decode",
    "encode",
    "halves_fault",
    "warm",
]

Halves: TypeAlias = npt.NDArray[np.uint16]

FP16_LARGEST = np.float32(65_504.0)
BF16_LARGEST = np.uint32(0x5D5E_0000).view(np.float32)  # just below 1e18
_FIRST_UNFIT = {"fp16": 0x7C00, "bf16": 0x5D5F}
_MAGNITUDE = 0x7FFF


@dataclass(frozen=True, kw_only=True)
class _Half(Codec):
    def most(self, shape: Shape) -> int:
        """Return the payload's length, which is always the same."""
        return 2 * elements(shape)

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """See `Codec.encoder`."""
        return _Encoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """See `Codec.check`."""
        fault = length_fault(payload, 2 * elements(shape))
        return fault or halves_fault(cls.name, payload, backend)

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
        decode(cls.name, payload.view("<u2"), out, add, at_hand(backend))

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
        halves, who = payload.view("<u2"), at_hand(backend)
        return [
            partial(decode, cls.name, halves[low:high], out[low:high], add, who)
            for low, high in parts(out.size)
        ]

    @classmethod
    def warm(cls) -> None:
        """See `Codec.warm`."""
        warm(cls.name)


@dataclass(frozen=True, kw_only=True)
class FP16(_Half):
    """IEEE half precision, 2 bytes per element: for values between 1e-7 and 65,504."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True, kw_only=True)
class BF16(_Half):
    """The upper half of a float32, 2 bytes per element: all its range, 8 significant bits."""

    name: ClassVar[str] = "bf16"


class _Encoder(ChunkEncoder):
    def write_chunk(self, values: Floats, rest: Floats, start: int) -> None:
        halves = self.payload[2 * start : 2 * (start + values.size)].view("<u2")
        encode(self.codec.name, values, rest, halves, self.backend)


def warm(form: str) -> None:
    """Compile the loops for ``"fp16"`` or ``"bf16"``."""
    from aiops.codecs import half_cpu
    from aiops.kernels.scan_cpu import compiled_survey

    half_cpu.loops(form)
    compiled_survey(2, _MAGNITUDE, _FIRST_UNFIT[form])


def halves_fault(form: str, section: Bytes, backend: str) -> str | None:
    """Say which of some halves is not finite, or 1e18 or more."""
    index = reaches(section.view("<u2"), _MAGNITUDE, _FIRST_UNFIT[form], backend)
    if index < 0:
        return None
    value = np.empty(1, np.float32)
    decode(form, section[2 * index : 2 * index + 2].view("<u2"), value, False, "numpy")
    return f"has {float(value[0]):g} for element {index}"


def encode(form: str, values: Floats, rest: Floats, halves: Halves, backend: str) -> None:
    """Write ``values``, or ``values + rest`` if there is a rest, which becomes what that loses."""
    if backend == "numba":
        from aiops.codecs import half_cpu

        half_cpu.loops(form)[0](values, rest, halves)
        return
    exact = np.add(values, rest, out=rest) if rest.size else values
    if form == "fp16":
        halves.view(np.float16)[:] = np.clip(exact, -FP16_LARGEST, FP16_LARGEST)
    else:
        bits = np.clip(exact, -BF16_LARGEST, BF16_LARGEST).view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        halves[:] = (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
    if rest.size:
        rest -= half_values(form, halves)


def decode(form: str, halves: Halves, out: Floats, add: bool, backend: str) -> None:
    """Write what halves stand for to ``out``, or add it to that."""
    if backend == "numba":
        from aiops.codecs import half_cpu

        half_cpu.loops(form)[1](halves, out, add)
        return
    for start in range(0, out.size, CHUNK):
        into = out[start : start + CHUNK]
        read = half_values(form, halves[start : start + CHUNK])
        np.add(into, read, out=into) if add else np.copyto(into, read)
