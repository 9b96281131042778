"""How long to wait: for an answer, and before connecting again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiops.errors import UsageError

FIRST, LONGEST = 0.05, 5.0
"""Seconds: the first pause, and the longest."""

LONGEST_TIMEOUT = 1e9
"""Seconds (30 years): what every clock and timer can still count."""


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that nothing can wait for.

    Raises
    ------
    UsageError
        When it is not more than 0, or endless.
    """
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise UsageError(
            f"timeout must be more than 0 seconds and at most {LONGEST_TIMEOUT:g}, not {seconds}"
        )


def delays(below: Callable[[int], int]) -> Iterator[float]:
    """Yield pauses in seconds, each about twice the last, each a random half of its length.

    The randomness (``below(n)`` is uniform in 0..n−1) keeps a hundred workers of a restarted
    server from knocking all at once.
    """
    pause = FIRST
    while True:
        yield pause * (0.5 + below(1000) / 2000)
        pause = min(2 * pause, LONGEST)
