"""Kardam: the Lipschitz filter and the frequency filter of asynchronous Byzantine learning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.filters.arithmetic import Values, dot
from aiops.filters.observation import Objection, Observation, WorkerArrays


class KardamFilter(WorkerArrays):
    """Refuse gradients that change faster than most workers', and many from a few workers.

    .. math::
        K_i = ‖g_i − g_i'‖ / ‖θ_i − θ_i'‖
        g_i is used if  K_i ≤ the (n − f)/n quantile of the workers' last K,
        and if, of the last 2f + 1 gradients used, no f workers have more than f

    g' and θ' are a worker's last gradient, and the parameters that it was computed on. f is a share
    of the n workers seen, rounded down, and less than n / 3 as the method requires. The quantile is
    over the last coefficient of each worker, used or not. What the frequency filter refuses is not
    held against a worker.

    The paper's third part, dampening by staleness, is the policy's here: ``--set
    modulate=exponential`` and its like.

    By the quantile itself about f of n honest pushes are refused, and by the frequency filter all
    of a worker that is among the last 2f, wherever f is 2 or more. The coefficient has no sign:
    minus the gradient passes.

    Parameters
    ----------
    size
        Of the sample.
    share
        f / n, below 1/2.

    Source
    ------
    Damaskinos, El Mhamdi, Guerraoui, Patra & Taziki 2018, *Asynchronous Byzantine machine learning
    (the case of SGD)*, sections 3.1 and 3.2.

    Example
    -------
    >>> kardam = KardamFilter(size=2, share=0.25)
    >>> for worker in range(4):
    ...     kardam.forget(worker)
    >>> used = []
    >>> for turn in range(12):
    ...     theta, growth = np.full(2, turn / 10), 9 if turn == 10 else 1
    ...     seen = Observation(turn % 4, None, None, growth * theta, None, theta, theta)
    ...     used.append(kardam.judge(seen) is None)
    ...     kardam.settle(seen, used[-1])
    >>> used.index(False)
    10
    """

    gradients: Values  # each worker's last one
    points: Values  # the parameters that it was computed on
    coefficients: Values
    counts: Values  # pushes

    def __init__(self, size: int, share: float) -> None:
        rows = dict.fromkeys(("gradients", "points"), ((size,), 0.0))
        super().__init__(**rows, coefficients=((), math.nan), counts=((), 0.0))
        self._share = share
        self._used: list[int] = []  # the workers of the last 2f gradients that were used

    @np.errstate(over="ignore", invalid="ignore")
    def judge(self, seen: Observation) -> Objection | None:
        """Note a push; refuse it by its coefficient, or for the workers of the last pushes."""
        row, base = seen.worker, seen.base
        if base is None:
            return None
        covered = True if seen.covered is None else seen.covered
        if self.counts[row]:
            change = (seen.gradient - self.gradients[row]) * covered
            moved = (base - self.points[row]) * covered
            way = dot(moved, moved)
            if 0 < way < math.inf:
                self.coefficients[row] = math.sqrt(dot(change, change) / way)
        self.gradients[row] = np.where(covered, seen.gradient, self.gradients[row])
        self.points[row] = np.where(covered, base, self.points[row])
        self.counts[row] += 1
        return self._lipschitz(row) or self._frequency(row)

    def _hostile(self) -> int:
        """Return f, the number of workers that may be hostile."""
        workers = int(np.count_nonzero(self.counts))
        return min(int(self._share * workers), (workers - 1) // 3)

    def _lipschitz(self, row: int) -> Objection | None:
        known = np.sort(self.coefficients[~np.isnan(self.coefficients)])
        mine = self.coefficients[row]
        if len(known) < 2 or math.isnan(mine):
            return None
        limit = known[len(known) - 1 - min(self._hostile(), len(known) - 1)]
        if mine <= limit:
            return None
        return Objection(
            f"changes {mine:.3g} times as fast as the parameters, and of most workers it is not"
            f" more than {limit:.3g} (kardam)"
        )

    def _frequency(self, row: int) -> Objection | None:
        hostile = self._hostile()
        if not hostile:
            return None
        counts = Counter(self._used[-2 * hostile :])
        mine = counts.pop(row, 0) + 1
        others = sum(count for _worker, count in counts.most_common(hostile - 1))
        if mine + others <= hostile:
            return None
        return Objection(
            f"would make {mine + others} of the last {2 * hostile + 1} that were used come from"
            f" {hostile} workers (kardam)",
            blamed=False,
        )

    def settle(self, seen: Observation, used: bool) -> None:
        """Note the worker of a push that was used."""
        if used:
            self._used.append(seen.worker)
            del self._used[: -2 * max(self._hostile(), 1)]

    def state(self) -> dict[str, Any]:
        """Return the arrays, and the workers of the last pushes."""
        return {**super().state(), "used": list(self._used)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        self._used = list(state["used"])
