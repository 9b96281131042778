"""The factor of the learning rate that a rule's gauge moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiops.model.layout import Ints

_MEMORY = 16
"""Updates over which the gauge is averaged, and before which the rate is left alone."""

_DOUBLING = 16
"""Updates in which the factor doubles at most, or halves."""


class RateGain:
    """A factor of the learning rate, which rises while the gauge is above 0, and else falls.

    The gauge is `aiops.kernels.rule.Rule.gauge`, of which an update reports the sum; it is averaged
    over 16 updates or so. Each update moves the factor by a 16th of a doubling, between 1 and the
    algorithm's `most_gain`. So it depends on integers alone, and is the same on all backends, on
    any number of servers, and in a replay.

    Parameters
    ----------
    most
        The largest factor, at least 1.

    Attributes
    ----------
    factor
        The factor; 1 at first.
    moves
        False if it stays 1, and nothing need be noted.
    """

    def __init__(self, most: float) -> None:
        self._top = math.floor(_DOUBLING * math.log2(most))
        self.factor, self.moves = 1.0, self._top > 0
        self._steps = 0  # above a factor of 1
        self._count = 0  # of updates, up to the memory
        self._mean = 0.0  # of the gauge's sums

    def note(self, sums: Ints) -> None:
        """Take an update's sums of the gauge into account, int64[tensors]."""
        self.note_total(int(np.add.reduce(sums)))

    def note_total(self, total: int) -> None:
        """Take the sum of these into account."""
        self._mean += (float(total) - self._mean) / _MEMORY
        if self._count < _MEMORY:
            self._count += 1
            return
        self._steps = min(max(self._steps + (1 if self._mean > 0 else -1), 0), self._top)
        self.factor = 2.0 ** (self._steps / _DOUBLING)

    def state(self) -> list[Any]:
        """Return it as plain values, for `restore`."""
        return [self._count, self._mean, self._steps]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned, with a factor that is now allowed."""
        self._count, self._mean, steps = state
        self._steps = min(steps, self._top)
        self.factor = 2.0 ** (self._steps / _DOUBLING)
