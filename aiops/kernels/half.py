"""Rules over 16-bit tensors: a float32 master is updated, and its rounding is what others see.

A 16-bit parameter would lose most updates (a step smaller than half a unit in the last place
changes nothing), so parameters and state are kept in float32. NumPy does every conversion,
whatever the backend, so backends agree to the bit here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.rule import Rule
from aiops.kernels.spans import Kernel, Spans, check
from aiops.kernels.vocabulary import Array

__all__ = ["BLOCK", "MasterKernel"]

BLOCK = 65_536
"""Elements converted at a time: their float32 gradients are still in cache when they are used."""

SINGLE = np.dtype(np.float32)

Piece = tuple[int, int, int, float, int]
"""lo, hi, src and step of a span or a part of one, and the span's row."""


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
        """Update ``base`` (float32) and round it into ``target``; see ``Kernel``."""
        check(
            self.rule,
            spans,
            base,
            grad,
            target,
            state,
            reads,
            compute=SINGLE,
            wire=self.dtype,
        )
        sums = np.zeros(len(spans), np.int64)
        total = int((spans.hi - spans.lo).sum())
        scratch, *held = (np.empty(min(total, BLOCK), SINGLE) for _ in range(1 + len(reads)))
        with np.errstate(all="ignore"):  # what is too large becomes infinite, silently
            for batch in _batches(spans, joined=bool(reads)):
                at = _gather(batch, grad, scratch)
                lo, hi, _, step, rows = (np.array(column) for column in zip(*batch, strict=True))
                # What a rule reads is converted where its span lies, so the batch is all there is.
                first, last = (lo[0], hi[-1]) if reads else (0, base.size)
                if reads:
                    # A 16-bit array is to be compared with the master: it gets the remainder that
                    # rounding took from that, or a difference of nothing would not be nothing.
                    rest = base[first:last] - base[first:last].astype(self.dtype)
                    for array, copy in zip(reads, held, strict=True):
                        np.add(array[first:last], rest, out=copy[: last - first])
                part = Spans(lo - first, hi - first, np.array(at), step, spans.more[rows])
                master = base[first:last]
                kept = [array[first:last] for array in state]
                found = self._inner(part, factor, master, scratch, master, kept, held)
                np.add.at(sums, rows, found)
                for start, stop in _runs((piece[0], piece[1]) for piece in batch):
                    target[start:stop] = base[start:stop]
        return sums

    def warm(self) -> None:
        """Compile the float32 kernel ahead."""
        self._inner.warm()


def _gather(batch: Sequence[Piece], grad: Array, scratch: Array) -> list[int]:
    """Convert the gradients of a batch into scratch; return where each piece's begins."""
    at = [0]
    for lo, hi, *_ in batch:
        at.append(at[-1] + hi - lo)
    filled = 0
    for lo, hi in _runs((src, src + hi - lo) for lo, hi, src, *_ in batch):
        scratch[filled : filled + hi - lo] = grad[lo:hi]
        filled += hi - lo
    return at[:-1]


def _batches(spans: Spans, *, joined: bool) -> Iterator[list[Piece]]:
    """Cut the spans into pieces, and yield batches of them of at most ``BLOCK`` elements.

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
    """Join each range to the one before where it continues it: most tensors lie back to back."""
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
