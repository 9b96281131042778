"""How long to wait before connecting again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

FIRST, LONGEST = 0.05, 5.0
"""Seconds: the first pause, and the longest."""


def delays(below: Callable[[int], int]) -> Iterator[float]:
    """Yield pauses in seconds, each about twice the last, each a random half of its length.

    The randomness (``below(n)`` is uniform in 0..n−1) keeps a hundred workers of a restarted
    server from knocking all at once.
    """
    pause = FIRST
    while True:
        yield pause * (0.5 + below(1000) / 2000)
        pause = min(2 * pause, LONGEST)
