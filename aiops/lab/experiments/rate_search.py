"""Learning rates chosen from a pool, on a seed of their own, at a stated cost.

Every rate is tried on every panel for a share of the iterations; the best few of each panel, and
the best few over all panels, are then tried in full. Of these the choice is made twice: the rate
with the least mean error over all panels, as papers do it, and the best for each panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from statistics import fmean
from typing import TypeAlias

from aiops.lab.experiments.experiment import MOST_SEEDS
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import Runs

Make: TypeAlias = Callable[[str, float, float], PlannedRun]
"""From a panel, a learning rate and a share of the iterations to the run of a pool."""


@dataclass(frozen=True)
class RateSearch:
    """The search for learning rates: the candidates and the rounds.

    Attributes
    ----------
    rates
        Each policy's candidates.
    share
        Of the iterations, at which all candidates are tried.
    finalists
        How many of a panel are then tried in full; 0: the first round decides.
    seed
        Of all these runs: none that is reported has it.
    """

    rates: tuple[tuple[str, tuple[float, ...]], ...]
    share: float
    finalists: int
    seed: int = MOST_SEEDS

    def of(self, policy: str) -> tuple[float, ...]:
        """Return a policy's candidates."""
        return dict(self.rates)[policy]


@dataclass(frozen=True)
class ChosenRates:
    """The learning rates chosen for a policy.

    Attributes
    ----------
    once
        The rate that is best over all panels.
    panels
        The best for each panel.
    errors
        What the choice goes by: the error of each panel and rate; infinity where it diverged.
    """

    once: float
    panels: dict[str, float]
    errors: dict[tuple[str, float], float]

    @property
    def spread(self) -> float:
        """By what factor the panels' best rates differ: 1 if one rate is the best for all."""
        return max(self.panels.values()) / min(self.panels.values())


def ladder(middle: float, step: float, below: int, above: int) -> tuple[float, ...]:
    """Return candidates that differ by a factor, with a middle one among them.

    >>> ladder(0.04, 2, 1, 2)
    (0.02, 0.04, 0.08, 0.16)
    """
    return tuple(float(f"{middle * step**k:.3g}") for k in range(-below, above + 1))


def search_rates(
    pool: RateSearch, policy: str, panels: Sequence[str], make: Make, runs: Runs
) -> tuple[list[PlannedRun], ChosenRates | None]:
    """Return the runs of a pool that can be known by now, and the choice once they are finished."""
    first = {(p, lr): make(p, lr, pool.share) for p in panels for lr in pool.of(policy)}
    cases = list(first.values())
    if not runs.settled(cases):
        return cases, None
    errors = {place: runs.tail(case) for place, case in first.items()}
    across = pool.of(policy)
    of_panel = dict.fromkeys(panels, across)
    if pool.finalists:
        best = {p: _best(pool.finalists, across, errors, [p]) for p in panels}
        across = _best(pool.finalists, across, errors, panels)
        of_panel = {p: tuple(dict.fromkeys((*best[p], *across))) for p in panels}
        last = {(p, lr): make(p, lr, 1.0) for p in panels for lr in of_panel[p]}
        cases += last.values()
        if not runs.settled(last.values()):
            return cases, None
        errors = {place: runs.tail(case) for place, case in last.items()}
    each = {p: _best(1, of_panel[p], errors, [p])[0] for p in panels}
    return cases, ChosenRates(_best(1, across, errors, panels)[0], each, errors)


def _best(
    count: int,
    rates: Iterable[float],
    errors: Mapping[tuple[str, float], float],
    panels: Sequence[str],
) -> tuple[float, ...]:
    """Return the rates of the least mean error over some panels, the best first."""

    def error(rate: float) -> tuple[float, float]:
        found = [errors[panel, rate] for panel in panels]
        return (fmean(found) if all(map(math.isfinite, found)) else math.inf), rate

    return tuple(nsmallest(count, rates, key=error))
