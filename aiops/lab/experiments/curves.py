"""Finished runs of several seeds as one series of a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from aiops.lab.experiments.runs import FinishedRun, Group
from aiops.lab.figures import Series


def curve(
    label: str, runs: Sequence[FinishedRun], y: str, times: float = 1.0, x: str = "iteration"
) -> Series:
    """Return runs that have the same x, as far as they go, as one series.

    Parameters
    ----------
    label
        The series' label.
    runs
        Of several seeds.
    y, x
        Names of the samples' figures.
    times
        A factor of y.
    """
    longest = max((run.series(x) for run in runs), key=len, default=[])
    ys = [[times * value for value in run.series(y)] for run in runs]
    return Series(label, longest, [[*y, *[math.nan] * (len(longest) - len(y))] for y in ys])


def across(
    label: str,
    x: Sequence[float],
    groups: Sequence[Group],
    value: Callable[[FinishedRun], float],
    kind: str = "line",
) -> Series:
    """Return one value of each run of several groups as a series, of the seeds that all have.

    Parameters
    ----------
    label
        The series' label.
    x
        The place of each group.
    groups
        Runs of several seeds, in one order.
    value
        Returns a run's value.
    kind
        As in `Series`.
    """
    seeds = zip(*groups, strict=False)
    return Series(label, x, [[value(run) for run in seed] for seed in seeds], kind)


def interpolated(
    label: str,
    runs: Sequence[FinishedRun],
    x: str,
    y: str = "error",
    times: float = 100.0,
    points: int = 60,
) -> Series:
    """Return runs' test errors (%) as one series over a figure that differs between them.

    Parameters
    ----------
    label
        The series' label.
    runs
        Of several seeds.
    x
        The name of a figure that grows: ``seconds``, ``bytes``.
    y, times
        The name of another figure than the error, and a factor of it.
    points
        The number of places, evenly spread as far as the shortest run goes.
    """
    if not runs:
        return Series(label, [], [])
    begin = max(run.series(x)[0] for run in runs)
    end = min(run.series(x)[-1] for run in runs)
    places = np.linspace(begin, end, points)
    ys = [times * np.interp(places, run.series(x), run.series(y)) for run in runs]
    return Series(label, places.tolist(), [y.tolist() for y in ys])
