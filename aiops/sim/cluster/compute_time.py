"""Models of the time that workers take for a mini-batch, seeded per worker.

A model gives one `Pace` per worker: a function from the virtual time at which a mini-batch begins
to the seconds that it takes. A worker's pace depends on the seed and on its number alone.

>>> pace = Straggler(Fixed(0.1), times=4.0).pace(worker=0, seed=7)
>>> pace(12.5)
0.4
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from aiops.errors import UsageError

Pace: TypeAlias = Callable[[float], float]
"""From the virtual time at which a mini-batch begins to the seconds that it takes."""


class Computing(Protocol):
    """A model of compute time."""

    def pace(self, worker: int, seed: int) -> Pace:
        """Return a worker's pace."""


@dataclass(frozen=True)
class Fixed:
    """Every mini-batch takes the same time.

    Parameters
    ----------
    seconds
        0 or more.
    """

    seconds: float

    def __post_init__(self) -> None:
        """Check the setting."""
        _at_least("compute time", self.seconds)

    def pace(self, worker: int, seed: int) -> Pace:
        """Return a worker's pace."""
        return lambda now: self.seconds


@dataclass(frozen=True)
class LogNormal:
    """Every mini-batch's time is drawn from a log-normal distribution.

    Parameters
    ----------
    median
        Seconds; half of all mini-batches take longer.
    sigma
        Standard deviation of the time's natural logarithm; 0.25 makes a quarter take at least
        18 % longer than the median.
    """

    median: float
    sigma: float = 0.25

    def __post_init__(self) -> None:
        """Check the settings."""
        _at_least("median compute time", self.median)
        _at_least("sigma of compute times", self.sigma)

    def pace(self, worker: int, seed: int) -> Pace:
        """Return a worker's pace."""
        draw = random.Random(f"compute times {seed} {worker}").gauss
        return lambda now: self.median * math.exp(self.sigma * draw(0.0, 1.0))


@dataclass(frozen=True)
class Straggler:
    """Some workers are slower than the others.

    Parameters
    ----------
    others
        The model of the other workers.
    times
        The factor by which these workers take longer.
    workers
        Their numbers.
    """

    others: Computing
    times: float = 10.0
    workers: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 0 < self.times < math.inf:
            raise UsageError(
                f"a straggler's factor is {self.times:g}: give a finite number, more than 0"
            )
        _at_least("a straggler's number", min(self.workers, default=0))

    def pace(self, worker: int, seed: int) -> Pace:
        """Return a worker's pace."""
        pace = self.others.pace(worker, seed)
        return (lambda now: self.times * pace(now)) if worker in self.workers else pace


@dataclass(frozen=True)
class Diurnal:
    """All workers are slower at some times of the day than at others, as on shared machines.

    A mini-batch that is begun at time t takes 1 + depth · (1 − cos(2π t / period)) / 2 times as
    long as otherwise: nothing more at t = 0, ``depth`` times more half a period later.

    Parameters
    ----------
    otherwise
        The model of the time at t = 0.
    period
        Seconds of a day.
    depth
        The most that is added to a mini-batch's time, as a multiple of it.
    """

    otherwise: Computing
    period: float = 86400.0
    depth: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        _at_least("a day's depth", self.depth)
        if not 0 < self.period < math.inf:
            raise UsageError(f"a day of {self.period:g} seconds cannot be: give more than 0")

    def pace(self, worker: int, seed: int) -> Pace:
        """Return a worker's pace."""
        pace = self.otherwise.pace(worker, seed)

        def slower(now: float) -> float:
            phase = math.tau * now / self.period
            return pace(now) * (1 + self.depth * (1 - math.cos(phase)) / 2)

        return slower


def _at_least(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UsageError(f"{what} is {value:g}: give 0 or more")
