"""``topk`` as Numba loops; imported only where Numba is wanted.

The k-th largest magnitude is found as a radix sort would: the bits of magnitudes, read as integers,
are in the magnitudes' order, so a histogram of the upper 11 tells in which bin the k-th lies. What
lies in that bin or above is gathered in one pass, in the order of the indices; only the candidates
of that one bin are looked at twice more, for the lower 10 and 10 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from aiops.codecs.base import CHUNK, Floats
from aiops.codecs.topk import GAP_BYTES, MAGNITUDE
from aiops.kernels.jit_cpu import array_of, compiled
from aiops.kernels.sharing import ParallelMap

__all__ = ["Loops", "histograms", "largest", "loops"]

Indices = npt.NDArray[np.int64]
Histograms = npt.NDArray[np.int64]

_U = np.uint32
_S7, _S10, _S20, _M10 = np.int64(7), _U(10), _U(20), _U(1023)
BINS = 2048
STRANDS = 4
"""Histograms filled in turn: adding to a bin just added to would have to wait for that."""

RUN = 32
"""Elements of which only the largest is looked at first: at 1 % most runs hold none to keep."""


@dataclass(frozen=True)
class Loops:
    """The compiled loops."""

    count: Callable[..., None]
    gather: Callable[..., None]
    write_gaps: Callable[..., int]
    check_gaps: Callable[..., tuple[int, int]]
    scatter: Callable[..., None]


@functools.cache
def loops() -> Loops:
    """Return the loops; they are compiled once, and kept on disk."""
    bits, gaps, sizes = array_of("uint32"), array_of("uint8"), array_of("int64", writable=True)
    values, written = array_of("float32"), array_of("float32", writable=True)
    size, made = types.int64, types.Array(types.uint8, 1, "C", aligned=False)
    gather = types.void(bits, size, types.uint32, array_of("uint32", writable=True), sizes)
    checked = types.UniTuple(size, 2)(gaps, size, size)
    return Loops(
        compiled(_count, types.void(bits, types.Array(types.int32, 2, "C")), cache=True),
        compiled(_gather, gather, cache=True),
        compiled(_write_gaps, size(array_of("int64"), made), cache=True),
        compiled(_check_gaps, checked, cache=True),
        compiled(_scatter, types.void(gaps, values, written), cache=True),
    )


def histograms(
    exact: Floats,
    cuts: Sequence[tuple[int, int]],
    ready: Callable[[int, int], None],
    parallel_map: ParallelMap,
) -> Histograms:
    """Return how many elements each of some ``cuts`` has in every bin, int64[cuts, BINS].

    ``ready`` is told of every `CHUNK` before it is read, by who reads it: what is to be done with
    it is done while it is in the cache.
    """
    bits, strands = exact.view(np.uint32), np.zeros((len(cuts), STRANDS, BINS), np.int32)

    def count(number: int, low: int, high: int) -> None:
        for start in range(low, high, CHUNK):
            stop = min(start + CHUNK, high)
            ready(start, stop)
            loops().count(bits[start:stop], strands[number])

    parallel_map([partial(count, number, *cut) for number, cut in enumerate(cuts)])
    found: Histograms = strands.sum(axis=1, dtype=np.int64)
    return found


def largest(
    exact: Floats,
    indices: Indices,
    cuts: Sequence[tuple[int, int]],
    histograms: Histograms,
    parallel_map: ParallelMap,
) -> None:
    """Write the indices of the elements with the largest magnitudes, in order."""
    bits, kept = exact.view(np.uint32), indices.size
    edge, above, inside = _edge(histograms.sum(axis=0), kept)
    ends = np.cumsum(histograms[:, edge:].sum(axis=1)).tolist()  # of what each has to gather
    places = np.empty(above + inside, np.int64)
    candidates = np.empty(above + inside, np.uint32)

    def gather(number: int, low: int, high: int) -> None:
        at = slice(ends[number - 1] if number else 0, ends[number])
        loops().gather(bits[low:high], low, _U(edge) << _S20, candidates[at], places[at])

    parallel_map([partial(gather, number, *cut) for number, cut in enumerate(cuts)])
    bound, wanted = _U(edge) << _S20, kept - above
    close = candidates[candidates < _U(edge + 1) << _S20]
    for shift, mask in ((_S10, _M10), (_U(0), _M10)):
        digits = close >> shift & mask
        digit, more, _ = _edge(np.bincount(digits, minlength=int(mask) + 1), wanted)
        close = close[digits == digit]
        bound, wanted = bound | _U(digit) << shift, wanted - more
    chosen = candidates > bound
    chosen[np.flatnonzero(candidates == bound)[:wanted]] = True
    np.compress(chosen, places, out=indices)


def _edge(histogram: Histograms, kept: int) -> tuple[int, int, int]:
    """Return the bin of the kept-th largest, how many lie above that bin, and how many in it."""
    down = np.cumsum(histogram[::-1])
    back = int(np.searchsorted(down, kept))
    inside = int(histogram[-1 - back])
    return len(histogram) - 1 - back, int(down[back]) - inside, inside


def _count(bits: Any, strands: Any) -> None:
    whole = bits.size - bits.size % STRANDS
    for i in range(0, whole, STRANDS):
        at = np.uintp(i)
        for strand in range(np.uintp(STRANDS)):
            strands[strand, np.uintp(_U(bits[at + strand] & MAGNITUDE) >> _S20)] += 1
    for i in range(whole, bits.size):
        strands[0, np.uintp(_U(bits[i] & MAGNITUDE) >> _S20)] += 1


def _gather(bits: Any, low: Any, bound: Any, candidates: Any, places: Any) -> None:
    found = 0
    for start in range(0, bits.size, RUN):
        run = bits[start : start + RUN]
        top = _U(0)
        for i in range(run.size):
            magnitude = _U(run[i] & MAGNITUDE)
            top = magnitude if magnitude > top else top
        if top >= bound:
            for i in range(run.size):
                magnitude = _U(run[i] & MAGNITUDE)
                if magnitude >= bound:
                    candidates[found] = magnitude
                    places[found] = low + start + i
                    found += 1


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
