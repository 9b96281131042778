"""How many seeds and examples a sweep tries.

A count in a test is for a factor of 1. The suite takes half of it, so that it ends in its minutes;
``AIOPS_SEEDS=10 make test`` tries ten times the counts. A seed that has failed once gets a test of
its own, or a line in a list beside the sweep.
"""

from __future__ import annotations

import math
import os

_FACTOR = float(os.environ.get("AIOPS_SEEDS", "0.5"))


def examples(count: int) -> int:
    """Return how many examples a sweep tries, of so many at a factor of 1: at least one."""
    return max(1, math.ceil(count * _FACTOR))


def seeds(count: int) -> range:
    """Return the seeds of a sweep, of so many at a factor of 1."""
    return range(examples(count))
