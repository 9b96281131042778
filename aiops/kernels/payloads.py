"""Describe how coded gradients lie in a payload, and read them with NumPy.

A kernel built for one of `FORMATS` reads its gradient out of payloads, so that decoding costs no
pass over memory of its own. docs/codecs.md specifies the payloads; the codecs that write them share
the definitions here. Reading does not check: the codec has refused a bad payload before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError, nearest

__all__ = [
    "FORMATS",
    "INT8_BLOCK",
    "ONEBIT_BITS",
    "ONEBIT_BLOCK",
    "PayloadFormat",
    "block_rows",
    "blocks",
    "format_named",
]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

INT8_BLOCK = 256
"""Elements of ``int8`` that share a scale."""

ONEBIT_BLOCK = 1024
"""Elements of ``onebit`` that share a scale."""

ONEBIT_BITS = 32
"""Signs in a word of ``onebit``."""


def blocks(size: int, block: int) -> int:
    """Return the number of blocks that ``size`` elements fill; the last may be shorter."""
    return -(-size // block)


def block_rows(size: int, block: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, width) of the run of whole blocks, and of the shorter block at the end.

    So each run can be reshaped to rows of ``width`` elements.

    >>> block_rows(600, 256)
    [(0, 512, 256), (512, 600, 88)]
    """
    whole = size - size % block
    cut = [(0, whole, block), (whole, size, size - whole)]
    return [(start, stop, width) for start, stop, width in cut if start < stop]


@dataclass(frozen=True)
class PayloadFormat:
    """The sections of a payload, one after the other without gaps.

    Attributes
    ----------
    name
        The codec's.
    sections
        The dtype of each section's items, and how many elements share an item: ``int8`` has a
        float32 for every 256 elements, then an int8 for each.
    values
        Decodes elements that begin at a block: takes a slice of each section and the number of
        elements, returns float32[n].
    """

    name: str
    sections: tuple[tuple[np.dtype[Any], int], ...]
    values: Callable[..., Floats]

    def length(self, size: Any) -> Any:
        """Return the bytes of a payload of ``size`` elements; also of an int64 array of sizes."""
        return sum(dtype.itemsize * -(-size // per) for dtype, per in self.sections)

    def views(self, payload: Bytes, size: int) -> list[Array]:
        """Return the sections of a payload of ``size`` elements, as views of it."""
        found, at = [], 0
        for dtype, per in self.sections:
            end = at + dtype.itemsize * -(-size // per)
            found.append(payload[at:end].view(dtype))
            at = end
        return found

    def part(self, views: Sequence[Array], start: int, stop: int) -> list[Array]:
        """Return what belongs to elements [start, stop) of each section.

        ``start`` is a multiple of 1,024; ``stop`` is another, or the number of elements.
        """
        return [
            view[start // per : -(-stop // per)]
            for view, (_dtype, per) in zip(views, self.sections, strict=True)
        ]

    def read(self, payload: Bytes, size: int, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of a payload of ``size`` elements; as in `part`."""
        return self.values(*self.part(self.views(payload, size), start, stop), stop - start)


def _fp16_values(halves: Array, size: int) -> Floats:
    return halves.view("<f2").astype(np.float32)


def _bf16_values(halves: Array, size: int) -> Floats:
    wide: npt.NDArray[np.uint32] = halves.astype(np.uint32)
    return (wide << np.uint32(16)).view(np.float32)


def _int8_values(scales: Floats, codes: Array, size: int) -> Floats:
    values: Floats = codes.astype(np.float32)
    for start, stop, width in block_rows(size, INT8_BLOCK):
        rows = values[start:stop].reshape(-1, width)
        rows *= scales[start // INT8_BLOCK : blocks(stop, INT8_BLOCK), None]
    return values


def _onebit_values(scales: Floats, words: Array, size: int) -> Floats:
    values: Floats = np.empty(size, np.float32)
    shifts = np.arange(ONEBIT_BITS, dtype=np.uint32)[:, None]
    for start, stop, width in block_rows(size, ONEBIT_BLOCK):
        wide = blocks(width, ONEBIT_BITS)
        word = words[start // ONEBIT_BITS : blocks(stop, ONEBIT_BITS)].reshape(-1, 1, wide)
        signs = (word >> shifts << np.uint32(31)).reshape(-1, ONEBIT_BITS * wide)[:, :width]
        scale = scales[start // ONEBIT_BLOCK : blocks(stop, ONEBIT_BLOCK)].view("<u4")
        values[start:stop].view(np.uint32).reshape(-1, width)[:] = signs | scale[:, None]
    return values


_U2, _U4, _F4, _I1 = (np.dtype(name) for name in ("<u2", "<u4", "<f4", "i1"))

FORMATS: Mapping[str, PayloadFormat] = {
    form.name: form
    for form in (
        PayloadFormat("fp16", ((_U2, 1),), _fp16_values),
        PayloadFormat("bf16", ((_U2, 1),), _bf16_values),
        PayloadFormat("int8", ((_F4, INT8_BLOCK), (_I1, 1)), _int8_values),
        PayloadFormat("onebit", ((_F4, ONEBIT_BLOCK), (_U4, ONEBIT_BITS)), _onebit_values),
    )
}
"""The payloads that kernels read, by the name of their codec."""


def format_named(name: str) -> PayloadFormat:
    """Return one of `FORMATS`; raise UsageError, with the nearest name, if there is none."""
    if name not in FORMATS:
        raise UsageError(f"kernels cannot read gradients of {name!r}; {nearest(name, FORMATS)}")
    return FORMATS[name]
