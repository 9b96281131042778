"""The mean staleness of the gradients used lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MEMORY = 64


class Lag:
    """A moving mean of staleness; of the first 64 gradients the plain one.

    Attributes
    ----------
    mean
        The mean, in updates; 0 before the first gradient.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0  # of gradients, up to the memory

    def note(self, staleness: int) -> None:
        """Take a gradient into account."""
        if self._count < _MEMORY:
            self._count += 1
        self.mean += (staleness - self.mean) / self._count

    def state(self) -> list[Any]:
        """Return it as plain values, for `restore`."""
        return [self._count, self.mean]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self._count, self.mean = state
