"""Keep the sampled parameters of the last versions, for gradients that were computed on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.filters.arithmetic import Values
from aiops.model.layout import Ints

VERSIONS = 256
"""The versions that are kept, the last ones that pushes met: as many as workers are compared, since
each of n workers that push in turns computes on a version n updates old."""


class SampledVersions:
    """The sampled parameters of some versions, by number.

    Attributes
    ----------
    values
        float64[256, the sample's size]; version n is in row n mod 256.
    numbers
        int64[256], the version that is in each row, or -1.
    """

    def __init__(self, size: int) -> None:
        self.values: Values = np.zeros((VERSIONS, size))
        self.numbers: Ints = np.full(VERSIONS, -1, np.int64)

    def find(self, number: int) -> Values | None:
        """Return the sampled values of a version, or None if they are not kept."""
        row = number % VERSIONS
        found: Values = self.values[row]
        return found if self.numbers[row] == number else None

    def keep(self, number: int, values: Values) -> None:
        """Keep the sampled values of a version."""
        row = number % VERSIONS
        self.values[row], self.numbers[row] = values, number

    def state(self) -> list[Any]:
        """Return the numbers and the values, for `restore`."""
        rows = np.flatnonzero(self.numbers >= 0)
        return [self.numbers[rows].tolist(), [self.values[row].copy() for row in rows]]

    def restore(self, state: list[Any]) -> None:
        """Continue from what `state` returned."""
        for number, values in zip(*state, strict=True):
            self.keep(number, values)
