"""The staleness of the gradients that were used: of all in a run, and lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

EXACT = 1024
"""A staleness below this is a bin of its own in the histogram; above, bins are powers of two."""

_MEMORY = 64


class StalenessHistogram:
    """The gradients used in a run.

    Attributes
    ----------
    bins
        How many there were, by the least staleness of the bin.
    total
        The sum of their staleness, in updates.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "bins", "total")

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        self.total = 0

    def note(self, staleness: int, count: int = 1) -> None:
        """Count a gradient that is used, or (-1) that is not after all."""
        self.bins[staleness if staleness < EXACT else bin_of(staleness)] += count
        self.total += count * staleness


def bin_of(staleness: int) -> int:
    """Return the bin of a large staleness: the power of two at or below it."""
    return 1 << (staleness.bit_length() - 1)


class RecentStaleness:
    """A moving mean of staleness; of the first 64 gradients the plain one.

    A gradient counts for at most 64 more than four times the mean before it. So a worker that comes
    back with one of thousands of updates ago does not slow all others down, while a mean that truly
    rises is followed: it may double within 15 gradients.

    Attributes
    ----------
    mean
        The mean, in updates; 0 before the first gradient.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "_count", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0  # of gradients, up to the memory

    def note(self, staleness: float) -> None:
        """Take a gradient into account."""
        if self._count < _MEMORY:
            self._count += 1
        staleness = min(staleness, _MEMORY + 4 * self.mean)
        self.mean += (staleness - self.mean) / self._count

    def state(self) -> list[Any]:
        """Return it as plain values, for `restore`."""
        return [self._count, self.mean]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self._count, self.mean = state
