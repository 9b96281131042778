"""Gradients that are still as the wire brought them: how they lie there, and reading them in NumPy.

A kernel built for one of `FORMS` reads its gradient out of payloads, so that decoding costs no pass
over memory of its own. docs/codecs.md describes the payloads; the codecs that write them share the
definitions here. A payload is read whatever its bytes: looking at them first is the codec's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError, nearest

__all__ = [
    "FORMS",
    "INT8_BLOCK",
    "ONEBIT_BITS",
    "ONEBIT_BLOCK",
    "Form",
    "blocks",
    "form_named",
    "half_values",
    "int8_values",
    "onebit_values",
    "pieces",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

INT8_BLOCK = 256
"""Elements of ``int8`` that share a scale."""

ONEBIT_BLOCK = 1024
"""Elements of ``onebit`` that share a scale."""

ONEBIT_BITS = 32


def blocks(size: int, block: int) -> int:
    """Return how many blocks so many elements fill; the last may be shorter."""
    return -(-size // block)


def pieces(size: int, block: int) -> list[tuple[int, int, int]]:
    """Cut elements into rows of a block each: start, stop and width of the whole ones and the last.

    >>> pieces(600, 256)
    [(0, 512, 256), (512, 600, 88)]
    """
    whole = size - size % block
    cut = [(0, whole, block), (whole, size, size - whole)]
    return [(start, stop, width) for start, stop, width in cut if start < stop]


def int8_values(scales: Floats, codes: Any) -> Floats:
    """Return the elements that int8 codes stand for."""
    values: Floats = codes.astype(np.float32)
    for start, stop, width in pieces(values.size, INT8_BLOCK):
        rows = values[start:stop].reshape(-1, width)
        rows *= scales[start // INT8_BLOCK : blocks(stop, INT8_BLOCK), None]
    return values


def onebit_values(scales: Floats, words: Any, size: int) -> Floats:
    """Return the elements that words of signs stand for."""
    values: Floats = np.empty(size, np.float32)
    shifts = np.arange(ONEBIT_BITS, dtype=np.uint32)[:, None]
    for start, stop, width in pieces(size, ONEBIT_BLOCK):
        wide = blocks(width, ONEBIT_BITS)
        word = words[start // ONEBIT_BITS : blocks(stop, ONEBIT_BITS)].reshape(-1, 1, wide)
        signs = (word >> shifts << np.uint32(31)).reshape(-1, ONEBIT_BITS * wide)[:, :width]
        scale = scales[start // ONEBIT_BLOCK : blocks(stop, ONEBIT_BLOCK)].view("<u4")
        values[start:stop].view(np.uint32).reshape(-1, width)[:] = signs | scale[:, None]
    return values


def half_values(name: str, halves: Any) -> Floats:
    """Return the elements that ``"fp16"`` or ``"bf16"`` halves stand for."""
    if name == "fp16":
        exact: Floats = halves.view("<f2").astype(np.float32)
        return exact
    wide: npt.NDArray[np.uint32] = halves.astype(np.uint32)
    return (wide << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Form:
    """One kind of payload: ``sections`` are the bytes and elements of an item of each section.

    ``int8`` is (4 bytes per 256 elements, then 1 per element). ``values`` reads an aligned range.
    """

    name: str
    sections: tuple[tuple[int, int], ...]
    values: Callable[..., Floats]

    def length(self, size: Any) -> Any:
        """Return how many bytes a payload of so many elements has; works on arrays, too."""
        return sum(width * -(-size // per) for width, per in self.sections)

    def read(self, payload: Bytes, size: int, start: int, stop: int) -> Floats:
        """Return elements start to stop of a payload of ``size`` elements.

        ``start`` is a multiple of 1,024; ``stop`` is another, or ``size``.
        """
        cut, at = [], 0
        for width, per in self.sections:
            cut.append(payload[at + width * (start // per) : at + width * blocks(stop, per)])
            at += width * blocks(size, per)
        return self.values(*cut, stop - start)


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("fp16", ((2, 1),), lambda halves, _: half_values("fp16", halves.view("<u2"))),
        Form("bf16", ((2, 1),), lambda halves, _: half_values("bf16", halves.view("<u2"))),
        Form(
            "int8",
            ((4, INT8_BLOCK), (1, 1)),
            lambda scales, codes, _: int8_values(scales.view("<f4"), codes.view(np.int8)),
        ),
        Form(
            "onebit",
            ((4, ONEBIT_BLOCK), (4, ONEBIT_BITS)),
            lambda scales, words, size: onebit_values(scales.view("<f4"), words.view("<u4"), size),
        ),
    )
}
"""The payloads that kernels read, by their codec's name."""


def form_named(name: str) -> Form:
    """Return one of `FORMS`; raise UsageError, with the nearest, if there is none."""
    if name not in FORMS:
        raise UsageError(f"kernels cannot read gradients of {name!r}; {nearest(name, FORMS)}")
    return FORMS[name]
