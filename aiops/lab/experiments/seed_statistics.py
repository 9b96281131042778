"""Statistics over seeds, and their text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from aiops.lab.experiments.runs import FinishedRun

TELLING = 3
"""Seeds that it takes to tell a difference."""

AHEAD, BEHIND, LEVEL = "ahead", "behind", "level"


def tails(runs: Iterable[FinishedRun], name: str = "error") -> list[float]:
    """Return each run's mean over its last tenth."""
    return [run.tail(name) for run in runs]


def compare(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Say whether some errors are lower than others: only if the seeds' ranges do not overlap.

    By chance three runs are all better than three others once in twenty times; fewer than three
    tell nothing.

    >>> compare([0.1, 0.2, 0.2], [0.3, 0.4, 0.3]), compare([0.1, 0.35, 0.2], [0.3, 0.4, 0.3])
    ('ahead', 'level')
    >>> compare([0.1, 0.2], [0.3, 0.4])
    'level'
    """
    if min(len(ours), len(theirs)) < TELLING:
        return LEVEL
    if max(ours) < min(theirs):
        return AHEAD
    return BEHIND if min(ours) > max(theirs) else LEVEL


def percents(values: Sequence[float], digits: int = 2) -> str:
    """Return shares of 1 in per cent: the mean, and from the least to the most.

    ``digits``: after the point.

    >>> percents([0.05, 0.07]), percents([0.05]), percents([0.1, math.inf]), percents([])
    ('6.00 (5.00–7.00)', '5.00', 'diverged', '–')
    """
    return spread([100 * value for value in values], digits)


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean of some values, and from the least to the most.

    >>> spread([1.95, 2.05], 2), spread([1.96], 1)
    ('2.00 (1.95–2.05)', '2.0')
    """
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean, least, most = (
        f"{value:.{digits}f}" for value in (fmean(values), min(values), max(values))
    )
    return mean if len(values) == 1 else f"{mean} ({least}–{most})"
