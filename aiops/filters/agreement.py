"""The agreement filter: where workers go one way, refuse one that goes another; refuse copies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.filters.arithmetic import (
    LANES,
    Values,
    dot,
    dot_loop,
    dots,
    lower_median,
    lower_median_loop,
)
from aiops.filters.observation import Objection, Observation, WorkerArrays
from aiops.kernels.lazy_numba import helper

FOLDED = 256
"""The numbers that are kept of a worker's direction."""

KEPT = 0.9
"""β of the mean of a worker's directions."""

FEWEST = 3
"""Pushes of a worker before it is compared."""

MOST = 2 / 3
"""Of the workers that have pushed, those that are compared, at least, before any is refused: so
hostile ones that push more often are no majority of them."""

AGREED = 0.25
"""The median agreement from which on workers are held to go one way."""

TWINS = 0.98
"""The cosine of the mean directions of two workers from which on they are the same."""

ALL = 64
"""Workers up to which each push is compared with all others; of n more each ⌈n / 64⌉th is."""

USUAL = 0.9
"""The cosine of the median worker with its closest one, from which on all are twins."""


class AgreementFilter(WorkerArrays):
    """Compare each worker's mean direction with those of all others, in pairs.

    .. math::
        m_i ← β m_i + (1 − β) g_i / ‖g_i‖,   a_i = median_j≠i cos(m_i, m_j),   A = median_i a_i
        i is refused if  A ≥ 0.25  and  a_i < A − max(¾ A, 3 · median of the a_j − A ≥ 0)

    A mean over one worker's pushes has less noise than a push, so workers with the same data agree
    visibly; minus the gradient, noise and wrong labels do not. The median over pairs, where a
    centre of all would be drawn to colluding workers, keeps those apart that agree among
    themselves only. Where honest workers do not agree, because each has data of its own, A is
    about 0 and this refuses nothing.

    Two workers whose means have a cosine of 0.98 are the same one twice, unless the median worker
    has such a twin, too: they are refused. (Full batches of the same data make honest twins; then
    most have one.)

    Directions are folded into 256 numbers each, with a random sign for every value. Of more
    than 64 workers a push is not compared with all others every time, but every second, third or
    fourth time (of 256) that its worker pushes; its last a_i counts meanwhile.

    Parameters
    ----------
    size
        Of the sample.
    seed
        Of the signs.

    Attributes
    ----------
    signs
        float64, 1 or -1 for every value of the sample.

    Source
    ------
    Karimireddy, He & Jaggi 2021, *Learning from history for Byzantine robust optimization* (a mean
    over each worker's past); Fung et al. 2020, *The limitations of federated learning in Sybil
    settings* (twins).

    Example
    -------
    Six workers, of which the first two send minus what the others do:

    >>> agreement, draw = AgreementFilter(size=400, seed=1), np.random.default_rng(1)
    >>> common, refused = draw.standard_normal(400), set()
    >>> for worker in range(6):
    ...     agreement.forget(worker)
    >>> for turn in range(60):
    ...     worker, gradient = turn % 6, common + draw.standard_normal(400)
    ...     gradient = -gradient if worker < 2 else gradient
    ...     seen = Observation(worker, None, None, gradient, None, None, None)
    ...     if agreement.judge(seen) is not None:
    ...         refused.add(worker)
    >>> refused
    {0, 1}
    """

    means: Values  # of each worker's directions
    units: Values  # the same, of length 1
    counts: Values  # pushes
    scores: Values  # the agreement of each
    closest: Values  # the cosine with the closest other worker

    def __init__(self, size: int, seed: int) -> None:
        width = min(FOLDED, max(-(-size // LANES), 1) * LANES)
        super().__init__(
            means=((width,), 0.0),
            units=((width,), 0.0),
            counts=((), 0.0),
            scores=((), math.nan),
            closest=((), math.nan),
        )
        bits = np.random.PCG64(seed).random_raw(size) >> np.uint64(63)
        self.signs = 1.0 - 2.0 * bits

    def judge(self, seen: Observation) -> Objection | None:
        """Note a push; refuse it if its worker's direction is not that of the others."""
        row = seen.worker
        folded = self._fold(seen.gradient)
        length = math.sqrt(dot(folded, folded))
        if length > 0:
            mean = self.means[row]
            mean *= KEPT
            mean += (1 - KEPT) / length * folded
            self.units[row] = mean / math.sqrt(dot(mean, mean) or 1.0)
        self.counts[row] += 1
        ready = self.counts >= FEWEST
        if not ready[row]:
            return None
        self._score(row, ready)
        return self._finding(row, ready)

    def expel(self, worker: int) -> None:
        """Clear the row of a worker that is quarantined: no other agrees with it any more."""
        self.forget(worker)

    def _fold(self, values: Values) -> Values:
        width = self.means.shape[1]
        turned = values * self.signs
        whole = len(values) - len(values) % width
        found: Values = np.add.reduce(turned[:whole].reshape(-1, width), axis=0)
        found[: len(values) - whole] += turned[whole:]
        return found + 0.0  # so that no zero is negative

    def _score(self, row: int, ready: npt.NDArray[np.bool_]) -> None:
        """Work out a worker's agreement with all others, and the closest of them."""
        if self.counts[row] % -(-len(self.counts) // ALL):
            return
        cosines = dots(self.units, self.units[row])
        others = ready.copy()
        others[row] = False
        if others.any():
            found = cosines[others]
            self.scores[row], self.closest[row] = lower_median(found), found.max()

    def _finding(self, row: int, ready: npt.NDArray[np.bool_]) -> Objection | None:
        scores = self.scores[ready & ~np.isnan(self.scores)]
        if len(scores) < max(FEWEST, MOST * np.count_nonzero(self.counts)):
            return None
        median, score = lower_median(scores), self.scores[row]
        above = lower_median(scores[scores >= median]) - median
        if median >= AGREED and score < median - max(0.75 * median, 3 * above):
            return Objection(
                f"has a cosine of {score:.2f} with those of the other workers, where the median"
                f" worker's has {median:.2f} (agreement)"
            )
        closest = self.closest[ready & ~np.isnan(self.closest)]
        if self.closest[row] > TWINS and lower_median(closest) < USUAL:
            return Objection(
                f"is that of another worker, with a cosine of {self.closest[row]:.3f}: give each"
                " worker data, or a seed, of its own (agreement)"
            )
        return None


# ---------------------------------------------------------------- loops


@helper()
def direction_loop(
    values: Any, signs: Any, mean: Any, kept: Any, out: Any, unit: Any, lanes: Any
) -> Any:
    """Fold a gradient into the mean direction of its worker: ``out``, and ``unit`` of length 1.

    Return whether it has a direction: else neither is changed.
    """
    width = out.size
    for i in range(width):
        unit[i] = 0.0
    for first in range(0, values.size, width):
        for i in range(min(width, values.size - first)):
            unit[i] += values[first + i] * signs[first + i]
    for i in range(width):
        unit[i] += 0.0
    length = math.sqrt(dot_loop(unit, unit, lanes))
    if not length > 0.0:
        return False
    by = (1 - kept) / length
    for i in range(width):
        out[i] = mean[i] * kept + by * unit[i]
    square = dot_loop(out, out, lanes)
    by = math.sqrt(square if square != 0.0 else 1.0)
    for i in range(width):
        unit[i] = out[i] / by
    return True


@helper()
def score_loop(
    units: Any, counts: Any, row: Any, unit: Any, fewest: Any, room: Any, lanes: Any
) -> Any:
    """Return a worker's agreement with all others, and its cosine with the closest; or NaN."""
    count, most = 0, -math.inf
    for worker in range(units.shape[0]):
        if worker != row and counts[worker] >= fewest:
            cosine = dot_loop(units[worker], unit, lanes)
            most = max(most, cosine)
            room[count] = cosine
            count += 1
    if not count:
        return math.nan, math.nan
    return lower_median_loop(room, count), most


@helper()
def agrees_loop(
    counts: Any, scores: Any, closest: Any, row: Any, score: Any, twin: Any, limits: Any, room: Any
) -> Any:
    """Return whether a worker goes the common way, if there is one, and has no twin.

    ``score``, ``twin``: its own, in place of those that are kept. ``limits``: `FEWEST`, `AGREED`,
    `TWINS`, `USUAL`, `MOST`.
    """
    fewest, agreed, twins, usual, most = limits
    count = pushed = 0
    for worker in range(counts.size):
        pushed += worker == row or counts[worker] > 0
        value = score if worker == row else scores[worker]
        if (worker == row or counts[worker] >= fewest) and value == value:
            room[count] = value
            count += 1
    if count < max(fewest, most * pushed):
        return True
    median = lower_median_loop(room, count)
    above = 0
    for place in range(count):
        if room[place] >= median:
            room[above] = room[place]
            above += 1
    spread = lower_median_loop(room, above) - median
    if median >= agreed and score < median - max(0.75 * median, 3 * spread):
        return False
    if not twin > twins:
        return True
    count = 0
    for worker in range(counts.size):
        value = twin if worker == row else closest[worker]
        if (worker == row or counts[worker] >= fewest) and value == value:
            room[count] = value
            count += 1
    return not lower_median_loop(room, count) < usual
