"""The norm filter: refuse a gradient whose norm, in any tensor, is far above what is usual."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiops.filters.arithmetic import Values, lower_median_loop, lower_medians, squares_loop
from aiops.filters.observation import Objection, Observation, WorkerArrays
from aiops.kernels.lazy_numba import helper
from aiops.model.layout import Ints

EACH = 8
"""The last pushes of each worker that are kept."""

FACTOR = 20.0
"""c, unless another is given: with data of its own for each worker, the gradient of a class that
was not seen for a while is ten times as large as the others."""

BLAMED = 3.0
"""The factors c from which on a refusal counts in full against the worker. Honest ones reach up to
two, if the model has unlearnt their data, and would be kept away from it for good."""

_TURNS = 4  # the times that all medians are recomputed while each worker pushes once

_FALL = math.log(2) / 256
"""The share by which what is usual falls at most with a push of each worker; half in 256."""

_RISE = 0.05
"""The share by which it rises at most with a push of each worker."""


class NormFilter(WorkerArrays):
    """Compare the norm of each tensor with its median over the last pushes of all workers.

    .. math:: g is used if ‖g_k‖ ≤ c · max(m_k, u_k) for every tensor k, m_k = median_j ‖g_k⁽ʲ⁾‖

    The median is over the workers, of each worker's own over its last 8 pushes, used or not: it
    follows gradients that grow, and one that pushes often does not move it. Of an even number the
    lower is taken. Each push recomputes the medians of a few tensors: those of all are recomputed
    every λ/4 pushes, of λ workers. While fewer than half of the workers are hostile, the median is
    not above norms of honest ones. The norm of a large tensor is that of its sample. The largest
    magnitude of the whole gradient is compared in the same way, so nothing large is hidden beside
    the sample. A gradient is not scaled down: a norm that large is not that of its mini-batch.

    u is what is *usual*: the median too, but it falls slowly, by half in 256 pushes of each worker.
    For workers that have data of their own have next to no gradients once the model has learnt
    these, and those of a worker whose data it unlearns then are a thousand times as large as the
    median, and no larger than all were at the start. (They would be refused until it has unlearnt
    them altogether.) The price: where gradients have fallen to a thousandth within few pushes, what
    passes is up to 20,000 times their median. u rises by at most 5 % with a push of each worker, so
    that a majority of hostile ones that comes and goes leaves little; it begins once there have
    been 8 pushes for each worker.

    It keeps out magnitudes (9e17, 100 times the gradient), and nothing that has the size of a
    gradient: flipped signs, wrong labels, noise of the right norm.

    Parameters
    ----------
    tensors
        The names of the model's tensors.
    factor
        c, more than 1.

    Attributes
    ----------
    median
        float64[tensors + 1], the medians over the workers.
    usual
        float64[tensors + 1], u.
    turn
        int64[1], the tensor whose median is recomputed next.

    Source
    ------
    The median is that of Yin et al. 2018, *Byzantine-robust distributed learning*, taken of norms;
    bounding norms so is Sun et al. 2019, *Can you really backdoor federated learning?*

    Example
    -------
    >>> norms = NormFilter(["w"], factor=5.0)
    >>> def push(worker, norm):
    ...     seen = Observation(worker, np.array([0]), np.array([norm]), None, None, None, None)
    ...     return norms.judge(seen)
    >>> for worker in range(8):
    ...     norms.forget(worker)
    ...     assert push(worker, 1.0) is None
    >>> push(1, 4.0)
    >>> push(2, 100.0).why
    "has a norm in 'w' of 100 times the usual median of all workers' (norm)"
    """

    norms: Values  # of each worker's last pushes
    medians: Values  # of those
    counts: Values  # pushes

    def __init__(self, tensors: Sequence[str], factor: float) -> None:
        self._names, self.factor = tensors, factor
        count = len(tensors) + 1
        empty = math.nan
        super().__init__(norms=((EACH, count), empty), medians=((count,), empty), counts=((), 0.0))
        self.median: Values = np.full(count, empty)
        self.usual: Values = np.full(count, empty)
        self.turn = np.zeros(1, np.int64)

    def judge(self, seen: Observation) -> Objection | None:
        """Note a push; refuse it if any of its norms is more than c times what is usual.

        Tensors whose median is 0 pass, or of which no worker has pushed any lately.
        """
        self._renew(self._due())
        medians = self.median[seen.tensors]
        judged = medians > 0  # NaN: no worker has pushed the tensor
        medians = np.fmax(medians, self.usual[seen.tensors])
        self._note(seen)
        ratios = np.divide(seen.norms, medians, out=np.zeros(len(medians)), where=judged)
        worst = int(ratios.argmax())
        ratio = float(ratios[worst])
        if not ratio > self.factor:
            return None
        tensor = int(seen.tensors[worst])
        largest = tensor == len(self._names)
        what = "largest value" if largest else f"norm in {self._names[tensor]!r}"
        why = f"has a {what} of {ratio:.3g} times the usual median of all workers' (norm)"
        return Objection(why, blamed=ratio > BLAMED * self.factor)

    def _due(self) -> Ints:
        """Return the tensors whose medians this push recomputes."""
        count, rows = len(self.median), len(self.medians)
        due = min(-(-_TURNS * count // rows), count)
        first = int(self.turn[0])
        self.turn[0] = (first + due) % count
        return (first + np.arange(due)) % count

    def _renew(self, columns: Ints) -> None:
        """Recompute the medians of some tensors, and have what is usual follow them."""
        fresh, usual = lower_medians(self.medians[:, columns]), self.usual[columns]
        followed, workers = fresh, int(np.count_nonzero(self.counts))
        if 0 < EACH * workers < self.counts.sum():
            each = len(self.median) / (len(columns) * workers)  # pushes of each since the last time
            followed = np.minimum(fresh, usual * (1 + _RISE * each))
            followed = np.maximum(followed, usual * max(1 - _FALL * each, 0.0))
            followed = np.where(usual > 0, followed, fresh)
        self.median[columns] = fresh
        self.usual[columns] = np.where(np.isnan(fresh), usual, followed)

    def _note(self, seen: Observation) -> None:
        """Keep the norms of a push in place of its worker's eighth last."""
        row = seen.worker
        place = int(self.counts[row]) % EACH
        self.norms[row, place] = math.nan
        self.norms[row, place, seen.tensors] = seen.norms
        self.medians[row] = lower_medians(self.norms[row])
        self.counts[row] += 1

    def state(self) -> dict[str, Any]:
        """Return the arrays, and the medians in use."""
        own = {"median": self.median.copy(), "usual": self.usual.copy()}
        return {**super().state(), **own, "turn": int(self.turn[0])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        self.median[:], self.usual[:] = state["median"], state["usual"]
        self.turn[0] = state["turn"]


# ---------------------------------------------------------------- loops


@helper()
def norms_loop(values: Any, ends: Any, largest: Any, out: Any, lanes: Any) -> Any:
    """Work out the norms of `aiops.filters.sample.Sample.norms`."""
    tensors = out.size - 1
    for tensor in range(tensors):
        out[tensor] = math.sqrt(squares_loop(values, ends[tensor], ends[tensor + 1], lanes))
    out[tensors] = largest


@helper()
def refresh_loop(median: Any, usual: Any, turn: Any, medians: Any, counts: Any, room: Any) -> Any:
    """Recompute the medians that are due, as `NormFilter.judge` does; return the next one."""
    count, rows, workers, pushes = median.size, medians.shape[0], 0, 0.0
    due = min((_TURNS * count + rows - 1) // rows, count)
    for row in range(rows):
        workers += counts[row] > 0.0
        pushes += counts[row]
    each = count / (due * max(workers, 1))
    for number in range(due):
        column = (turn[0] + number) % count
        found = 0
        for row in range(rows):
            if medians[row, column] == medians[row, column]:
                room[found] = medians[row, column]
                found += 1
        if not found:
            median[column] = math.nan
            continue
        fresh, before = lower_median_loop(room, found), usual[column]
        median[column] = fresh
        if pushes > EACH * workers and before > 0.0:
            fresh = max(
                min(fresh, before * (1 + _RISE * each)), before * max(1 - _FALL * each, 0.0)
            )
        usual[column] = fresh
    return (turn[0] + due) % count


@helper()
def own_medians_loop(norms: Any, place: Any, fresh: Any, ordered: Any, out: Any) -> Any:
    """Work out a worker's medians with ``fresh`` norms at a place of its last ones.

    ``ordered``: room for as many norms as ``norms``. Between the two loops over pushes it is
    sorted, all tensors at once, each odd place with the next and then each even one.
    """
    each, count = norms.shape
    for push in range(each):
        for k in range(count):
            norm = fresh[k] if push == place else norms[push, k]
            ordered[push, k] = norm if norm == norm else math.inf
    for turn in range(each):
        for push in range(turn % 2, each - 1, 2):
            for k in range(count):
                one, other = ordered[push, k], ordered[push + 1, k]
                ordered[push, k] = min(one, other)
                ordered[push + 1, k] = max(one, other)
    for k in range(count):
        known = 0
        for push in range(each):
            known += ordered[push, k] < math.inf
        out[k] = ordered[(known - 1) // 2, k]


@helper()
def has_norms_loop(fresh: Any, median: Any, usual: Any, factor: Any) -> Any:
    """Return whether no norm is more than ``factor`` times what is usual."""
    beyond = 0
    for k in range(fresh.size):
        level = usual[k] if usual[k] > median[k] else median[k]
        beyond += median[k] > 0.0 and fresh[k] / level > factor
    return beyond == 0
