"""``topk``: encode the largest elements alone, and their places.

Of n elements the k = max(1, round(fraction · n)) largest in magnitude are written, ties going to
the lowest index; the others count as zero (Aji & Heafield 2017, Lin et al. 2018). Error feedback
keeps those until they are large. They are found by `aiops.codecs.largest`.

Payload: ``uint32`` k, ``uint8`` form (0: int8, 1: bf16), three bytes of 0; the values, in the order
of their indices, as the codec int8 writes k elements, or as k bf16 halves; then k gaps to the end.
A gap is the number of elements skipped since the one before (or since the start), written as a
LEB128 varint: 7 bits to the byte, the lowest first, the top bit set on all but the last, at most 5
bytes. At 1 % that makes 2.3 bytes per entry with int8 values, and 3.3 with bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from aiops.codecs.base import (
    HEADER,
    Bytes,
    Codec,
    Encoder,
    Floats,
    Shape,
    check_choices,
    elements,
    header_fault,
    one_of,
    read_header,
)
from aiops.codecs.block_codec import BlockCodec, parts
from aiops.codecs.half import BF16
from aiops.codecs.int8 import Int8
from aiops.codecs.largest import Indices, histograms, largest, largest_numpy
from aiops.codecs.largest import loops as largest_loops
from aiops.errors import UsageError
from aiops.kernels import current_backend
from aiops.kernels.parallel import LARGE

__all__ = ["GAP_BYTES", "TopK", "loops"]

GAP_BYTES = 5
"""Bytes of the longest gap, which is below 2**35."""

_FORMS: tuple[type[BlockCodec], ...] = (Int8, BF16)
"""The codecs of the values, by the number in the header."""

FORMS = tuple(kind.name for kind in _FORMS)


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The largest elements and their places: 2.3 bytes for each that is kept.

    Settings
    --------
    fraction : float, default 0.01
        The share of a tensor's elements that travel, more than 0, at most 1.
    values : str, default ``int8``
        How their values are encoded: ``int8``, with a scale for every 256 of them, or ``bf16``.
    """

    name: ClassVar[str] = "topk"
    accumulates: ClassVar[bool] = True

    fraction: float = 0.01
    values: str = one_of(*FORMS)

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.0 < self.fraction <= 1.0:
            raise UsageError(
                f"codec 'topk': fraction is the share of elements that travel, and {self.fraction}"
                " is none; give a number above 0 and at most 1, such as 0.01"
            )

    def entries(self, size: int) -> int:
        """Return how many of ``size`` elements are written."""
        return min(size, max(1, round(self.fraction * size)))

    def most(self, shape: Shape) -> int:
        """Return the length of a payload whose gaps take the most bytes that they can."""
        size = elements(shape)
        if not size:
            return 0
        kept = self.entries(size)
        # A gap of one more byte skips at least 2**7, 2**14... elements, and all gaps together n.
        gaps = kept + sum(min(kept, size >> 7 * more) for more in range(1, GAP_BYTES))
        return HEADER + _FORMS[FORMS.index(self.values)].length(kept) + gaps

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """Return an encoder that keeps a histogram of magnitudes per step."""
        return _TopKEncoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """Return what is wrong with the header, the values or the gaps of a payload, or None."""
        size = elements(shape)
        fault = header_fault(payload, size, FORMS)
        if fault or not size:
            return fault
        kept, form = read_header(payload)
        if kept > size:
            return f"has {kept} entries for {size} elements"
        cut = HEADER + _FORMS[form].length(kept)
        if len(payload) < cut + kept:
            return f"has {len(payload)} bytes, and {kept} entries take {cut + kept} or more"
        values = _FORMS[form].sections(payload[HEADER:cut], kept)
        fault = _FORMS[form].sections_fault(values, backend)
        return fault or _gaps_fault(payload[cut:], kept, size, current_backend(backend))

    VALUES: ClassVar[int] = HEADER
    """The byte at which the values of a payload begin."""

    @classmethod
    def read(cls, payload: Bytes) -> tuple[int, str, int]:
        """Return the number of values of a checked payload, their form, and the byte after them."""
        kept, form = read_header(payload)
        return kept, FORMS[form], HEADER + _FORMS[form].length(kept)

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
        """Zero ``out`` unless ``add``, and add each value of a checked payload at its place."""
        if not out.size:
            return
        backend = current_backend(backend)
        kept, form = read_header(payload)
        cut = HEADER + _FORMS[form].length(kept)
        values = np.empty(kept, np.float32)
        sections = _FORMS[form].sections(payload[HEADER:cut], kept)
        _FORMS[form].decode_sections(sections, values, False, backend)
        if not add:
            out[:] = 0.0
        if backend == "numba":
            loops().scatter(payload[cut:], values, out)
        else:
            ends = np.flatnonzero(payload[cut:] < 128)[:kept]
            out[np.cumsum(_gaps(payload[cut:], ends) + 1) - 1] += values

    @classmethod
    def warm(cls) -> None:
        """Compile the loops, and those of both forms of values."""
        loops()
        largest_loops()
        for kind in _FORMS:
            kind.warm()


class _TopKEncoder(Encoder):
    def __init__(self, codec: TopK, shape: Shape, *, feedback: bool, backend: str) -> None:
        super().__init__(codec, shape, feedback=feedback, backend=backend)
        kept = codec.entries(self.size)
        form = FORMS.index(codec.values)
        self._kind = _FORMS[form]
        self._indices = np.empty(kept, np.int64)
        self._values = np.empty(kept, np.float32)
        if self.size:
            self.payload[:HEADER].view("<u4")[:] = kept, form

    def survey(self, values: Floats) -> None:
        """Survey all values first if there is a rest: an error must not change it."""
        if self.rest is not None or self.backend == "numpy":
            super().survey(values)

    def write(self, values: Floats) -> int:
        exact = values if self.rest is None else self.rest
        indices, kept = self._indices, self._values
        if self.backend == "numba":
            self._find(values, exact)
        else:
            if self.rest is not None:
                self.rest += values
            largest_numpy(exact, indices)
        np.take(exact, indices, out=kept, mode="clip")  # any other mode makes a copy first
        cut = HEADER + self._kind.length(kept.size)
        # What the codec of the values loses is left in the array that it is given as the rest.
        lost = np.zeros_like(kept) if self.rest is not None else kept[:0]
        sections = self._kind.sections(self.payload[HEADER:cut], kept.size)
        self._kind.encode_sections(kept, lost, sections, self.backend)
        if self.rest is not None:
            self.rest[indices] = lost
        gaps = self.payload[cut:]
        if self.backend == "numba":
            return cut + loops().write_gaps(indices, gaps)
        return cut + _write_gaps_numpy(indices, gaps)

    def _find(self, values: Floats, exact: Floats) -> None:
        """Find the largest of ``exact``; if that is the rest, ``values`` are added to it first."""
        unfit: list[tuple[int, int]] = []

        def ready(start: int, stop: int) -> None:
            if self.rest is not None:
                self.rest[start:stop] += values[start:stop]
            elif (index := self._survey(values[start:stop])) >= 0:
                unfit.append((start, index))

        cuts = list(parts(self.size)) if values.nbytes >= LARGE else [(0, self.size)]
        counts = histograms(exact, cuts, ready, self.parallel_map)
        if unfit:
            start, index = min(unfit)
            self._refuse_unfit(values[start:], start, index)
        largest(exact, self._indices, cuts, counts, self.parallel_map)


def _write_gaps_numpy(indices: Indices, out: Bytes) -> int:
    """Write the gaps between indices as varints; return the number of bytes written."""
    gaps = np.diff(indices, prepend=-1) - 1
    bounds = 1 << 7 * np.arange(1, GAP_BYTES)
    lengths = 1 + np.searchsorted(bounds, gaps, side="right")
    last = np.cumsum(lengths) - 1
    start = last - lengths + 1
    for place in range(GAP_BYTES):
        here = lengths > place
        more = np.where(lengths[here] > place + 1, 128, 0)
        out[start[here] + place] = (gaps[here] >> 7 * place) & 127 | more
    return int(last[-1]) + 1


def _gaps_fault(gaps: Bytes, kept: int, size: int, backend: str) -> str | None:
    """Return what is wrong with the varints of the gaps before ``kept`` indices, or None."""
    if backend == "numba":
        code, entry = loops().check_gaps(gaps, kept, size)
    else:
        code, entry = _check_gaps_numpy(gaps, kept, size)
    return (
        None,
        f"ends within the gap of entry {entry}",
        f"has a gap of more than {GAP_BYTES} bytes at entry {entry}",
        f"has entry {entry} beyond its {size} elements",
        f"goes on after its {kept} entries",
    )[code]


def _check_gaps_numpy(gaps: Bytes, kept: int, size: int) -> tuple[int, int]:
    """Return the number of the first fault (an index in `_gaps_fault`; 0: none), and its entry."""
    ends = np.flatnonzero(gaps < 128)[:kept]
    lengths = np.diff(ends, prepend=-1)
    short = int(np.argmax(lengths > GAP_BYTES)) if (lengths > GAP_BYTES).any() else len(ends)
    places = np.cumsum(_gaps(gaps, ends[:short]) + 1) - 1
    beyond = places >= size
    if beyond.any():
        return 3, int(np.argmax(beyond))
    if short == kept:
        used = int(ends[-1]) + 1 if kept else 0
        return (4, kept - 1) if used < len(gaps) else (0, 0)
    tail = len(gaps) - (ends[short - 1] + 1 if short else 0)
    return (2, short) if short < len(ends) or tail > GAP_BYTES else (1, short)


def _gaps(gaps: Bytes, ends: Any) -> Indices:
    """Return the varints whose last bytes are at ``ends``."""
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    found = np.zeros(len(ends), np.int64)
    for place in range(GAP_BYTES):
        here = starts + place <= ends
        found[here] |= (gaps[starts[here] + place].astype(np.int64) & 127) << 7 * place
    return found


# ---------------------------------------------------------------- Numba

_S7 = np.int64(7)


@dataclass(frozen=True)
class TopKLoops:
    """The compiled loops."""

    write_gaps: Callable[..., int]
    check_gaps: Callable[..., tuple[int, int]]
    scatter: Callable[..., None]


@functools.cache
def loops() -> TopKLoops:
    """Return the loops; they are compiled once, and kept on disk."""
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    gaps, values = array_of("uint8"), array_of("float32")
    written = array_of("float32", writable=True)
    size, made = types.int64, types.Array(types.uint8, 1, "C", aligned=False)
    checked = types.UniTuple(size, 2)(gaps, size, size)
    return TopKLoops(
        compile_loop(_write_gaps, size(array_of("int64"), made)),
        compile_loop(_check_gaps, checked),
        compile_loop(_scatter, types.void(gaps, values, written)),
    )


def _write_gaps(indices: Any, out: Any) -> Any:
    at, before = 0, -1
    for i in range(indices.size):
        gap = indices[i] - before - 1
        before = indices[i]
        while gap >= 128:
            out[at] = gap & 127 | 128
            gap >>= _S7
            at += 1
        out[at] = gap
        at += 1
    return at


def _check_gaps(gaps: Any, kept: Any, size: Any) -> Any:
    at: Any = 0
    index: Any = -1
    for entry in range(kept):
        gap, place = np.int64(0), np.int64(0)
        while True:
            if place == GAP_BYTES:
                return 2, entry
            if at == gaps.size:
                return 1, entry
            byte = np.int64(gaps[at])
            at += 1
            gap |= (byte & 127) << (_S7 * place)
            place += 1
            if byte < 128:
                break
        index += gap + 1
        if index >= size:
            return 3, entry
    if at < gaps.size:
        return 4, kept - 1
    return 0, 0


def _scatter(gaps: Any, values: Any, out: Any) -> None:
    at: Any = 0
    index: Any = -1
    for entry in range(values.size):
        byte = np.int64(gaps[at])
        at += 1
        gap, shift = byte & 127, _S7
        while byte >= 128:
            byte = np.int64(gaps[at])
            at += 1
            gap |= (byte & 127) << shift
            shift += _S7
        index += gap + 1
        out[index] += values[entry]
