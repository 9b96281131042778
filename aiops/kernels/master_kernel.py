"""Execute rules over 16-bit tensors: update a float32 master copy, and round it to 16 bits.

A 16-bit parameter would lose most updates, since a step smaller than half a unit in the last place
changes nothing. So parameters and state are kept in float32. NumPy converts in every backend, so
that backends agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.interface import Kernel, Spans, check
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array

__all__ = ["BLOCK", "MasterKernel"]

BLOCK = 65_536
"""Elements converted at a time, so that their float32 gradients are in cache when used."""

SINGLE = np.dtype(np.float32)

Piece = tuple[int, int, int, float, int]
"""lo, hi, src and step of a span or a part of one, and the span's index."""


class MasterKernel:
    """A float32 kernel behind 16-bit gradients and parameters; implements ``Kernel``."""

    def __init__(self, rule: Rule, dtype: np.dtype[Any], inner: Kernel) -> None:
        self.rule = rule
        self.dtype = dtype
        self.backend = inner.backend
        self._inner = inner

    def __repr__(self) -> str:
        return f"<MasterKernel {self.rule.name} {self.dtype} over {self._inner!r}>"

    def __call__(
        self,
        spans: Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
        reads: Sequence[Array] = (),
    ) -> npt.NDArray[np.int64]:
        """Update the masters ``base`` (float32), and round them into ``target`` (16 bits)."""
        check(
            *(self.rule, spans, base, grad, target, state, reads),
            compute=SINGLE,
            wire=self.dtype,
        )
        sums = np.zeros(len(spans), np.int64)
        total = int((spans.hi - spans.lo).sum())
        scratch, *held = (np.empty(min(total, BLOCK), SINGLE) for _ in range(1 + len(reads)))
        with np.errstate(all="ignore"):  # overflow to infinity is no error
            for batch in _batches(spans, joined=bool(reads)):
                at = _gather(batch, grad, scratch)
                lo, hi, _, step, rows = (np.array(column) for column in zip(*batch, strict=True))
                # Reads are converted at the places of their spans: the section is the batch.
                first, last = (lo[0], hi[-1]) if reads else (0, base.size)
                if reads:
                    # Rules subtract reads from the master. What rounding took from the master is
                    # added to them, so that the difference of equal parameters is 0.
                    rest = base[first:last] - base[first:last].astype(self.dtype)
                    for array, copy in zip(reads, held, strict=True):
                        np.add(array[first:last], rest, out=copy[: last - first])
                part = Spans(lo - first, hi - first, np.array(at), step, spans.scalars[rows])
                master = base[first:last]
                kept = [array[first:last] for array in state]
                found = self._inner(part, factor, master, scratch, master, kept, held)
                np.add.at(sums, rows, found)
                for start, stop in _runs((piece[0], piece[1]) for piece in batch):
                    target[start:stop] = base[start:stop]
        return sums

    def warm(self) -> MasterKernel:
        """Compile the float32 kernel; return this one."""
        self._inner = self._inner.warm()
        return self


def _gather(batch: Sequence[Piece], grad: Array, scratch: Array) -> list[int]:
    """Convert the gradients of a batch into scratch; return the start of each piece in it."""
    at = [0]
    for lo, hi, *_ in batch:
        at.append(at[-1] + hi - lo)
    filled = 0
    for lo, hi in _runs((src, src + hi - lo) for lo, hi, src, *_ in batch):
        scratch[filled : filled + hi - lo] = grad[lo:hi]
        filled += hi - lo
    return at[:-1]


def _batches(spans: Spans, *, joined: bool) -> Iterator[list[Piece]]:
    """Cut the spans into pieces, and yield batches of pieces, at most ``BLOCK`` elements each.

    ``joined``: each piece of a batch begins where the one before ends.
    """
    batch: list[Piece] = []
    room = BLOCK
    for row, (lo, hi, src, step) in enumerate(spans.rows()):
        at = lo
        if joined and batch and lo < hi and lo != batch[-1][1]:
            yield batch
            batch, room = [], BLOCK
        while at < hi:
            stop = min(hi, at + room)
            batch.append((at, stop, src + at - lo, step, row))
            room -= stop - at
            at = stop
            if not room:
                yield batch
                batch, room = [], BLOCK
    if batch:
        yield batch


def _runs(ranges: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges, with adjacent ones joined: most tensors lie back to back."""
    lo = hi = -1
    for start, stop in ranges:
        if start == hi:
            hi = stop
            continue
        if hi > lo:
            yield lo, hi
        lo, hi = start, stop
    if hi > lo:
        yield lo, hi
