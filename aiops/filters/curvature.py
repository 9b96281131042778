"""The curvature filter: refuse a worker whose gradients fall along the way that the model went."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiops.filters.arithmetic import LANES, Values, dot, lower_median, lower_median_loop, total_loop
from aiops.filters.observation import Objection, Observation, WorkerArrays
from aiops.kernels.lazy_numba import disjoint, helper

KEPT = 0.98
"""β: a push counts for half after 34 more of its worker."""

FEWEST = 3
"""Pushes of a worker, and workers with as many, before it is judged."""

FRACTION = 0.25
"""Of the median that a worker's mean must reach."""

ERRORS = 2.0
"""Standard errors by which it must fall short to be refused."""

SPAN = 8
"""Pushes of a worker between the gradients that are compared, where nothing moves meanwhile."""


class CurvatureFilter(WorkerArrays):
    """Judge a worker by the change of its own gradient along the path of the model.

    A worker computes g' at θ', and by the time that g' arrives others have moved the model by Δ.
    Its next gradient is g. A loss that the worker goes down has positive curvature on the way, so
    the gradient grows along Δ, and minus the gradient falls along it; noise does neither.

    .. math::
        c = ⟨g − g', Δ⟩ / (‖g − g'‖ · ‖Δ‖)
        the worker is refused if  mean(c) + 2 · error < ¼ · median of the workers' means > 0

    Kardam's Lipschitz coefficient ‖g − g'‖ / ‖Δθ‖ is the same for g and −g; this has its sign. A
    worker is compared with itself, so data of its own do it no harm: what others unlearn for it
    makes c larger. Δ is the movement while the worker computed g', which g' is not part of, since
    any gradient, noise too, is smaller on the far side of its own step. Where nothing moved
    meanwhile (a barrier), Δ is the difference of the two points, and g' is the gradient of eight
    pushes before: of one step its own noise would be the larger part, of eight the way of all is.
    The seven between are not compared.

    Means are exponential with β = 0.98, over pushes used or not; the error is the lower median of
    the workers' standard errors. Where the median of the means is not positive (a policy whose
    pushes are no gradients) it refuses nothing.

    It does not keep out: gradients of another loss (wrong labels, a pull to some point), whatever
    harm they do; noise, where the curvature of all is weak.

    Parameters
    ----------
    size
        Of the sample.

    Source
    ------
    None that we know of. Damaskinos et al. 2018, *Asynchronous Byzantine machine learning* (the
    unsigned coefficient); a convex function's gradient is monotone (Minty 1962).

    Example
    -------
    Four workers on ½‖θ‖², of which the last sends minus its gradient:

    >>> curvature, draw, theta = CurvatureFilter(size=30), np.random.default_rng(1), np.ones(30)
    >>> for worker in range(4):
    ...     curvature.forget(worker)
    >>> refused = set()
    >>> for turn in range(100):
    ...     base, worker = theta, turn % 4
    ...     theta = base + draw.standard_normal(30)  # others move it meanwhile
    ...     gradient = -base if worker == 3 else base
    ...     seen = Observation(worker, None, None, gradient, None, base, theta)
    ...     if curvature.judge(seen) is not None:
    ...         refused.add(worker)
    >>> refused
    {3}
    """

    gradients: Values  # each worker's last one
    points: Values  # the parameters that it was computed on
    moves: Values  # what the parameters moved by until it came
    sums: Values  # of weights, cosines and their squares; pushes compared and one; pushes since
    # the gradient that is kept; and 1 if nothing moved while it was computed
    means: Values  # of the cosines, and the error of that

    def __init__(self, size: int) -> None:
        rows = dict.fromkeys(("gradients", "points", "moves"), ((size,), 0.0))
        super().__init__(**rows, sums=((6,), 0.0), means=((2,), math.nan))

    @np.errstate(over="ignore", invalid="ignore")
    def judge(self, seen: Observation) -> Objection | None:
        """Note a push; refuse it if its worker's mean is too low."""
        row, base, covered = seen.worker, seen.base, seen.covered
        if base is None or seen.current is None:
            return self._finding(row)
        sums = self.sums[row]
        if sums[3] > 0 and sums[5] and sums[4] + 1 < SPAN:
            sums[4] += 1
            return self._finding(row)
        if sums[3] > 0:
            self._compare(seen, base)
        else:
            sums[3] = 1
        last = {"gradients": seen.gradient, "points": base, "moves": seen.current - base}
        for name, values in last.items():
            rows = getattr(self, name)
            rows[row] = values if covered is None else np.where(covered, values, rows[row])
        sums[4:] = 0, not self.moves[row].any()
        return self._finding(row)

    def _compare(self, seen: Observation, base: Values) -> None:
        """Add the cosine of a push to the sums of its worker."""
        row, before = seen.worker, self.gradients[seen.worker]
        sums = self.sums[row]
        moved = base - self.points[row] if sums[5] else self.moves[row]
        change = seen.gradient - before
        if seen.covered is not None:
            moved, change = moved * seen.covered, change * seen.covered
        way = dot(moved, moved)
        if not 0 < way < math.inf:  # nothing moved, or too far for a float64
            return
        length = math.sqrt(way * dot(change, change))
        cosine = dot(moved, change) / length if length > 0 else 0.0
        sums[:3] *= KEPT
        sums[:4] += (1.0, cosine, cosine * cosine, 1.0)
        mean = sums[1] / sums[0]
        spread = max(sums[2] / sums[0] - mean * mean, 0.0)
        self.means[row] = mean, math.sqrt(spread / sums[0])

    def _finding(self, row: int) -> Objection | None:
        ready = self.sums[:, 3] > FEWEST
        if not ready[row] or np.count_nonzero(ready) < FEWEST:
            return None
        means, errors = self.means[ready].T
        median, mean = lower_median(means), self.means[row, 0]
        if median > 0 and mean + ERRORS * lower_median(errors) < FRACTION * median:
            return Objection(
                f"changes along the model's way with a mean cosine of {mean:.2f}, where the"
                f" workers' median is {median:.2f}: it does not go down a loss (curvature)"
            )
        return None


# ---------------------------------------------------------------- loops


@helper()
def products_loop(
    gradient: Any, before: Any, moved: Any, base: Any, point: Any, still: Any, lanes: Any
) -> Any:
    """Return ⟨Δ, Δ⟩, ⟨Δ, g − g'⟩ and ‖g − g'‖², each as `aiops.filters.arithmetic.dot`.

    ``moved`` is Δ; if ``still`` it is ``base`` − ``point``. ``lanes``: float64[3, `LANES`].
    """
    disjoint()
    size = gradient.size
    for lane in range(LANES):
        lanes[0, lane] = lanes[1, lane] = lanes[2, lane] = 0.0
    for first in range(0, size, LANES):
        for lane in range(min(LANES, size - first)):
            i = first + lane
            way = base[i] - point[i] if still else moved[i]
            change = gradient[i] - before[i]
            lanes[0, lane] += way * way
            lanes[1, lane] += way * change
            lanes[2, lane] += change * change
    return total_loop(lanes[0]), total_loop(lanes[1]), total_loop(lanes[2])


@helper()
def weighed_loop(way: Any, cross: Any, changed: Any, kept: Any, own: Any) -> Any:
    """Add a cosine to a worker's sums, which are in ``own`` with their mean and its error."""
    length = math.sqrt(way * changed)
    cosine = cross / length if length > 0.0 else 0.0
    own[0] = own[0] * kept + 1.0
    own[1] = own[1] * kept + cosine
    own[2] = own[2] * kept + cosine * cosine
    own[3] += 1.0
    mean = own[1] / own[0]
    own[6], own[7] = mean, math.sqrt(max(own[2] / own[0] - mean * mean, 0.0) / own[0])


@helper()
def goes_down_loop(
    sums: Any, means: Any, row: Any, own: Any, fewest: Any, fraction: Any, errors: Any, room: Any
) -> Any:
    """Return whether a worker's mean, which is in ``own``, is not too low."""
    count = 0
    for worker in range(sums.shape[0]):
        seen = own[3] if worker == row else sums[worker, 3]
        if seen > fewest:
            room[count] = own[6] if worker == row else means[worker, 0]
            count += 1
    if own[3] <= fewest or count < fewest:
        return True
    median = lower_median_loop(room, count)
    if not median > 0.0:
        return True
    count = 0
    for worker in range(sums.shape[0]):
        seen = own[3] if worker == row else sums[worker, 3]
        if seen > fewest:
            room[count] = own[7] if worker == row else means[worker, 1]
            count += 1
    return not own[6] + errors * lower_median_loop(room, count) < fraction * median


@helper()
def note_loop(
    row: Any, gradient: Any, base: Any, current: Any, gradients: Any, points: Any, moves: Any
) -> Any:
    """Note a worker's gradient, its point, and what others have moved the model by.

    Return whether that is nothing.
    """
    moved = 0
    for i in range(gradient.size):
        gradients[row, i] = gradient[i]
        points[row, i] = base[i]
        moves[row, i] = current[i] - base[i]
        moved += moves[row, i] != 0.0
    return moved == 0
