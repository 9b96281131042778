"""Bound the norms of groups of tensors, each by the norm over all tensors of the group.

Kernels multiply all gradients of a call with one factor, so an update whose groups have different
ones takes a call for each (`by_factor`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aiops.kernels.interface import Spans
from aiops.kernels.vocabulary import Array

__all__ = ["Clip", "by_factor", "clipping"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """The groups of some tensors, and the largest norm of each.

    Attributes
    ----------
    limits
        The largest norm of each group; 0: any.
    groups
        int64[n], the group of each tensor; None: all are of the first.
    """

    limits: tuple[float, ...]
    groups: Ints | None = None

    def of(self, tensors: Ints | slice) -> Clip:
        """Return the same limits for some of the tensors, by their indices."""
        return self if self.groups is None else Clip(self.limits, self.groups[tensors])

    def runs(self, rows: Ints, lo: Ints, hi: Ints) -> Iterator[tuple[int, slice]]:
        """Yield the elements to be measured: their group, and their range.

        Neighbours of one group are joined, and groups without a limit are left out.

        Parameters
        ----------
        rows
            int64[n], the indices of some of the tensors, rising.
        lo, hi
            int64[n], the range of elements of each, rising.
        """
        if not len(rows):
            return
        groups = np.zeros(len(rows), np.int64) if self.groups is None else self.groups[rows]
        begins = (groups[1:] != groups[:-1]) | (lo[1:] != hi[:-1])
        first = np.concatenate(([0], np.flatnonzero(begins) + 1))
        last = np.concatenate((first[1:], [len(rows)])) - 1
        ranges = zip(groups[first].tolist(), lo[first].tolist(), hi[last].tolist(), strict=True)
        for group, low, high in ranges:
            if self.limits[group]:
                yield group, slice(low, high)

    def clipped(self, factor: float, squares: Sequence[float]) -> tuple[float, Array | None]:
        """Return the numbers that bring the norm of each group within its limit.

        Parameters
        ----------
        factor
            What the gradient is multiplied by in any case.
        squares
            The sum of squares of each group, without the factor.

        Returns
        -------
        tuple
            The factor of all tensors, and float64[n], what it is multiplied by for each; None: 1.
        """
        each = [
            clipping(limit, factor, mine) if limit else 1.0
            for limit, mine in zip(self.limits, squares, strict=True)
        ]
        if self.groups is None:
            return factor * each[0], None
        scales = np.array(each)[self.groups]
        return factor, scales if (scales != 1.0).any() else None


def clipping(limit: float, factor: float, squares: float) -> float:
    """Return the factor that brings ``factor · √squares`` down to ``limit``; at most 1."""
    norm = abs(factor) * math.sqrt(squares)
    return limit / norm if norm > limit else 1.0


def by_factor(
    spans: Spans, factor: float, scales: Array | None
) -> Iterator[tuple[Ints | slice, Spans, float]]:
    """Yield the spans of each factor: their indices, they themselves, and the factor.

    ``scales``: float64[spans], what the factor is multiplied by for each; None: 1.
    """
    if scales is None:
        yield slice(None), spans, factor
        return
    for scale in np.unique(scales).tolist():
        rows = np.flatnonzero(scales == scale)
        yield rows, spans.take(rows), factor * scale
