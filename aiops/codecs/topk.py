"""``topk``: the largest elements alone, and where they are (Aji & Heafield 2017, Lin et al. 2018).

Of n elements the k = max(1, round(fraction · n)) largest in magnitude are written, ties going to
the lowest index; all others count as zero. With error feedback they are kept until they are large.

Payload: ``uint32`` k, ``uint8`` form (0: int8, 1: bf16), three bytes of 0; the values, in the order
of their indices, as the codec int8 writes k elements, or as k bf16 halves; then k gaps to the end.
A gap is the number of elements skipped since the one before (or since the start), written as a
LEB128 varint: 7 bits to the byte, the lowest first, the top bit set on all but the last, at most 5
bytes. At 1 % that makes 2.3 bytes per entry with int8 values, and 3.3 with bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from aiops.codecs import half, int8
from aiops.codecs.base import (
    Bytes,
    Codec,
    Encoder,
    Floats,
    Shape,
    check_choices,
    choice,
    elements,
    parts,
)
from aiops.errors import UsageError
from aiops.kernels import at_hand
from aiops.kernels.packed import blocks
from aiops.kernels.sharing import LARGE

__all__ = ["GAP_BYTES", "HEADER", "TopK"]

Indices = npt.NDArray[np.int64]

HEADER = 8
GAP_BYTES = 5
"""Bytes of the longest gap, which is below 2**35."""

FORMS = ("int8", "bf16")
MAGNITUDE = np.uint32(0x7FFF_FFFF)


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The largest elements and their places: 2.3 bytes for each that is kept.

    ``fraction``: how many of a tensor's elements travel, more than 0, at most 1 (default 0.01).
    ``values``: ``int8`` (default) with a scale for every 256 of them, or ``bf16``.
    """

    name: ClassVar[str] = "topk"
    saves_up: ClassVar[bool] = True

    fraction: float = 0.01
    values: str = choice(*FORMS)

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.0 < self.fraction <= 1.0:
            raise UsageError(
                f"codec 'topk': fraction is the share of elements that travel, and {self.fraction}"
                " is none; give a number above 0 and at most 1, such as 0.01"
            )

    def entries(self, size: int) -> int:
        """Return how many of so many elements are written."""
        return min(size, max(1, round(self.fraction * size)))

    def most(self, shape: Shape) -> int:
        """Return the payload's length if every gap takes as many bytes as it might."""
        size = elements(shape)
        if not size:
            return 0
        kept = self.entries(size)
        # A gap of one more byte skips at least 2**7, 2**14... elements, and all gaps together n.
        gaps = kept + sum(min(kept, size >> 7 * more) for more in range(1, GAP_BYTES))
        return HEADER + _values_length(FORMS.index(self.values), kept) + gaps

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """See `Codec.encoder`."""
        return _Encoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """See `Codec.check`."""
        size = elements(shape)
        if not size:
            return f"has {len(payload)} bytes instead of 0" if len(payload) else None
        if len(payload) < HEADER:
            return f"has {len(payload)} bytes, and its header alone {HEADER}"
        kept, form = _header(payload)
        if kept > size:
            return f"has {kept} entries for {size} elements"
        if form >= len(FORMS) or payload[5:HEADER].any():
            return f"has the form {bytes(payload[4:HEADER]).hex()}, which is none"
        cut = HEADER + _values_length(form, kept)
        if len(payload) < cut + kept:
            return f"has {len(payload)} bytes, and {kept} entries take {cut + kept} or more"
        if FORMS[form] == "int8":
            scales = payload[HEADER : HEADER + 4 * blocks(kept, int8.BLOCK)]
            fault = int8.scales_fault(scales, int8.LARGEST)
        else:
            fault = half.halves_fault("bf16", payload[HEADER:cut], backend)
        return fault or _gaps_fault(payload[cut:], kept, size, at_hand(backend))

    VALUES: ClassVar[int] = HEADER
    """Where the values of a payload begin."""

    @classmethod
    def read(cls, payload: Bytes) -> tuple[int, str, int]:
        """Return how many values a checked payload has, their form, and where the gaps begin."""
        kept, form = _header(payload)
        return kept, FORMS[form], HEADER + _values_length(form, kept)

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
        if not out.size:
            return
        backend = at_hand(backend)
        kept, form = _header(payload)
        cut = HEADER + _values_length(form, kept)
        values = np.empty(kept, np.float32)
        _read_values(payload[HEADER:cut], form, values, backend)
        if not add:
            out[:] = 0.0
        if backend == "numba":
            from aiops.codecs import topk_cpu

            topk_cpu.loops().scatter(payload[cut:], values, out)
        else:
            out[_indices(payload[cut:], kept)] += values

    @classmethod
    def warm(cls) -> None:
        """See `Codec.warm`."""
        from aiops.codecs import topk_cpu

        topk_cpu.loops()
        int8.Int8.warm()
        half.warm("bf16")


class _Encoder(Encoder):
    def __init__(self, codec: TopK, shape: Shape, *, feedback: bool, backend: str) -> None:
        super().__init__(codec, shape, feedback=feedback, backend=backend)
        kept = codec.entries(self.size)
        self._form = FORMS.index(codec.values)
        self._indices = np.empty(kept, np.int64)
        self._values = np.empty(kept, np.float32)
        if self.size:
            self.payload[:HEADER].view("<u4")[:] = kept, self._form

    def look_over(self, values: Floats) -> None:
        """Look over everything first where there is a rest, which an error must not change."""
        if self.rest is not None or self.backend == "numpy":
            super().look_over(values)

    def write(self, values: Floats) -> int:
        exact = values if self.rest is None else self.rest
        indices, kept = self._indices, self._values
        if self.backend == "numba":
            self._find(values, exact)
        else:
            if self.rest is not None:
                self.rest += values
            _largest(exact, indices)
        np.take(exact, indices, out=kept, mode="clip")  # any other mode makes a copy first
        cut = HEADER + _values_length(self._form, kept.size)
        # The encoder of the values leaves what it loses in what it was given as the rest.
        section, none = self.payload[HEADER:cut], kept[:0]
        lost = np.zeros_like(kept) if self.rest is not None else none
        if FORMS[self._form] == "int8":
            int8.encode(kept, lost, *int8.sections(section, kept.size), self.backend)
        else:
            half.encode("bf16", kept, lost, section.view("<u2"), self.backend)
        if self.rest is not None:
            self.rest[indices] = lost
        gaps = self.payload[cut:]
        if self.backend == "numba":
            from aiops.codecs import topk_cpu

            return cut + topk_cpu.loops().write_gaps(indices, gaps)
        return cut + _write_gaps(indices, gaps)

    def _find(self, values: Floats, exact: Floats) -> None:
        """Find the largest of ``exact``, the rest, to which ``values`` are added first, if any."""
        from aiops.codecs import topk_cpu

        unfit: list[tuple[int, int]] = []

        def ready(start: int, stop: int) -> None:
            if self.rest is not None:
                self.rest[start:stop] += values[start:stop]
            elif (index := self._survey(values[start:stop])) >= 0:
                unfit.append((start, index))

        cuts = list(parts(self.size)) if values.nbytes >= LARGE else [(0, self.size)]
        histograms = topk_cpu.histograms(exact, cuts, ready, self.parallel_map)
        if unfit:
            start, index = min(unfit)
            self._refuse_unfit(values[start:], start, index)
        topk_cpu.largest(exact, self._indices, cuts, histograms, self.parallel_map)


def _header(payload: Bytes) -> tuple[int, int]:
    return int(payload[:4].view("<u4")[0]), int(payload[4])


def _values_length(form: int, kept: int) -> int:
    return int8.length(kept) if FORMS[form] == "int8" else 2 * kept


def _read_values(section: Bytes, form: int, values: Floats, backend: str) -> None:
    if FORMS[form] == "int8":
        int8.decode(*int8.sections(section, values.size), values, False, backend)
    else:
        half.decode("bf16", section.view("<u2"), values, False, backend)


def _largest(exact: Floats, indices: Indices) -> None:
    """Write the indices of the elements with the largest magnitudes, in order."""
    bits = exact.view(np.uint32) & MAGNITUDE
    kept = indices.size
    least = np.partition(bits, bits.size - kept)[bits.size - kept]
    above = bits > least
    ties = np.flatnonzero(bits == least)[: kept - int(above.sum())]
    above[ties] = True
    indices[:] = np.flatnonzero(above)


def _write_gaps(indices: Indices, out: Bytes) -> int:
    """Write what lies between indices as varints; return how many bytes that took."""
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
    """Say what is wrong with varints that should be the gaps before ``kept`` indices."""
    if backend == "numba":
        from aiops.codecs import topk_cpu

        code, entry = topk_cpu.loops().check_gaps(gaps, kept, size)
    else:
        code, entry = _check_gaps(gaps, kept, size)
    return (
        None,
        f"ends within the gap of entry {entry}",
        f"has a gap of more than {GAP_BYTES} bytes at entry {entry}",
        f"has entry {entry} beyond its {size} elements",
        f"goes on after its {kept} entries",
    )[code]


def _check_gaps(gaps: Bytes, kept: int, size: int) -> tuple[int, int]:
    """Return what is wrong first (see `_gaps_fault`; 0: nothing), and at which entry."""
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
    """Read the varints that end there."""
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    found = np.zeros(len(ends), np.int64)
    for place in range(GAP_BYTES):
        here = starts + place <= ends
        found[here] |= (gaps[starts[here] + place].astype(np.int64) & 127) << 7 * place
    return found


def _indices(gaps: Bytes, kept: int) -> Indices:
    return np.cumsum(_gaps(gaps, np.flatnonzero(gaps < 128)[:kept]) + 1) - 1
