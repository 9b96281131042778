"""Find the elements of a tensor with the largest magnitudes.

The k-th largest magnitude is found as a radix sort would find it. The bits of magnitudes, read as
integers, are in the magnitudes' order, so a histogram of the upper 11 bits tells the bin of the
k-th. One pass gathers the elements of that bin and of those above, in the order of the indices;
only the candidates of that one bin are compared by their lower 10 and 10 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.codecs.base import Floats
from aiops.codecs.block_codec import CHUNK
from aiops.kernels.parallel import ParallelMap

__all__ = ["Histograms", "Indices", "histograms", "largest", "largest_numpy", "loops"]

Indices = npt.NDArray[np.int64]
Histograms = npt.NDArray[np.int64]

MAGNITUDE = np.uint32(0x7FFF_FFFF)


def largest_numpy(exact: Floats, indices: Indices) -> None:
    """Write the indices of the elements with the largest magnitudes, in order."""
    bits = exact.view(np.uint32) & MAGNITUDE
    kept = indices.size
    least = np.partition(bits, bits.size - kept)[bits.size - kept]
    above = bits > least
    ties = np.flatnonzero(bits == least)[: kept - int(above.sum())]
    above[ties] = True
    indices[:] = np.flatnonzero(above)


# ---------------------------------------------------------------- Numba

_U = np.uint32
_S10, _S20, _M10 = _U(10), _U(20), _U(1023)
BINS = 2048
STRANDS = 4
"""Histograms filled in turn: an addition to a bin waits for the one before to the same bin."""

RUN = 32
"""Elements whose largest alone is compared first: at 1 %, most runs hold none to keep."""


@functools.cache
def loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops that count and gather; they are compiled once, and kept on disk."""
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    bits, sizes = array_of("uint32"), array_of("int64", writable=True)
    made = array_of("uint32", writable=True)
    return (
        compile_loop(_count, types.void(bits, types.Array(types.int32, 2, "C"))),
        compile_loop(_gather, types.void(bits, types.int64, types.uint32, made, sizes)),
    )


def histograms(
    exact: Floats,
    cuts: Sequence[tuple[int, int]],
    ready: Callable[[int, int], None],
    parallel_map: ParallelMap,
) -> Histograms:
    """Return the number of elements in every bin, for each of the ``cuts``: int64[cuts, BINS].

    ``ready(start, stop)`` is called for every `CHUNK` just before it is read, on the same thread:
    what it does to the chunk is done while that is in the cache.
    """
    bits, strands = exact.view(np.uint32), np.zeros((len(cuts), STRANDS, BINS), np.int32)

    def count(number: int, low: int, high: int) -> None:
        for start in range(low, high, CHUNK):
            stop = min(start + CHUNK, high)
            ready(start, stop)
            loops()[0](bits[start:stop], strands[number])

    parallel_map([partial(count, number, *cut) for number, cut in enumerate(cuts)])
    found: Histograms = strands.sum(axis=1, dtype=np.int64)
    return found


def largest(
    exact: Floats,
    indices: Indices,
    cuts: Sequence[tuple[int, int]],
    counts: Histograms,
    parallel_map: ParallelMap,
) -> None:
    """Write the indices of the elements with the largest magnitudes, in order.

    ``counts`` are the `histograms` of the ``cuts``.
    """
    bits, kept = exact.view(np.uint32), indices.size
    edge, above, inside = _edge(counts.sum(axis=0), kept)
    ends = np.cumsum(counts[:, edge:].sum(axis=1)).tolist()  # what each cut gathers
    places = np.empty(above + inside, np.int64)
    candidates = np.empty(above + inside, np.uint32)

    def gather(number: int, low: int, high: int) -> None:
        at = slice(ends[number - 1] if number else 0, ends[number])
        loops()[1](bits[low:high], low, _U(edge) << _S20, candidates[at], places[at])

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
    """Return the bin of the kept-th largest, the number of elements above that bin, and in it."""
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
