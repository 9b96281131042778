"""How many seeds and examples a sweep tries.

A count in a test is for a factor of 1. The suite takes 0.3 of it, so that it ends in its minutes;
``AIOPS_SEEDS=10 make test`` tries ten times the counts. A seed that has failed once gets a test of
its own, or a line in a list beside the sweep.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

_FACTOR = float(os.environ.get("AIOPS_SEEDS", "0.3"))


def examples(count: int) -> int:
    """Return how many examples a sweep tries, of so many at a factor of 1: at least one."""
    return max(1, math.ceil(count * _FACTOR))


def seeds(count: int) -> range:
    """Return the seeds of a sweep, of so many at a factor of 1."""
    return range(examples(count))


def by_turns(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return as many cases as the longest factor has values; each has the next value of every one.

    It stands in the place of a product, for factors of which the values of one do not change what
    those of another do: each value is tried, not each pair. Lengths with a common divisor keep to
    the same pairs.
    """
    tables = [list(factor) for factor in factors]
    return [
        tuple(table[place % len(table)] for table in tables)
        for place in range(max(map(len, tables)))
    ]
