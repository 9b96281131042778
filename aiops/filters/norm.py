"""The norm filter: refuse a gradient whose norm, in any tensor, is far above the median."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiops.filters.observation import Objection, Observation, WorkerArrays
from aiops.filters.sample import Values

EACH = 8
"""The last pushes of each worker that are kept."""

FACTOR = 20.0
"""c, unless another is given: with data of its own for each worker, the gradient of a class that
was not seen for a while is ten times as large as the others."""


class NormFilter(WorkerArrays):
    """Compare the norm of each tensor with its median over the last pushes of all workers.

    .. math:: g is used if ‖g_k‖ ≤ c · median_j ‖g_k⁽ʲ⁾‖ for every tensor k

    The median is over the workers, of each worker's own over its last 8 pushes, used or not: it
    follows gradients that grow, and one that pushes often does not move it. Of an even number the
    lower is taken. While fewer than half of the workers are hostile, the median is not above norms
    of honest ones. The norm of a large tensor is that of its sample. The largest magnitude of the
    whole gradient is compared in the same way, so nothing large is hidden beside the sample. A
    gradient is not scaled down: a norm that large is not that of its mini-batch.

    It keeps out magnitudes (9e17, 100 times the gradient), and nothing that has the size of a
    gradient: flipped signs, wrong labels, noise of the right norm.

    Parameters
    ----------
    tensors
        The names of the model's tensors.
    factor
        c, more than 1.

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
    "has a norm in 'w' of 100 times the median of all workers' (norm)"
    """

    norms: Values  # of each worker's last pushes
    medians: Values  # of those
    counts: Values  # pushes

    def __init__(self, tensors: Sequence[str], factor: float) -> None:
        self._names, self._factor = tensors, factor
        count = len(tensors) + 1
        empty = math.nan
        super().__init__(norms=((EACH, count), empty), medians=((count,), empty), counts=((), 0.0))
        self._median: Values = np.full(count, empty)  # over the workers
        self._due = 0  # pushes until it is computed again

    def judge(self, seen: Observation) -> Objection | None:
        """Note a push; refuse it if any of its norms is more than c medians.

        Tensors whose median is 0 pass, or of which no worker has pushed any.
        """
        if not self._due:
            self._median = _lower_median(self.medians)
            self._due = max(len(self.medians) // 8, 1)
        self._due -= 1
        medians = self._median[seen.tensors]
        self._note(seen)
        judged = medians > 0  # NaN: no worker has pushed the tensor
        ratios = np.divide(seen.norms, medians, out=np.zeros(len(medians)), where=judged)
        worst = int(ratios.argmax())
        ratio = float(ratios[worst])
        if not ratio > self._factor:
            return None
        tensor = int(seen.tensors[worst])
        largest = tensor == len(self._names)
        what = "largest value" if largest else f"norm in {self._names[tensor]!r}"
        return Objection(f"has a {what} of {ratio:.3g} times the median of all workers' (norm)")

    def _note(self, seen: Observation) -> None:
        """Keep the norms of a push in place of its worker's eighth last."""
        row = seen.worker
        place = int(self.counts[row]) % EACH
        self.norms[row, place] = math.nan
        self.norms[row, place, seen.tensors] = seen.norms
        self.medians[row] = _lower_median(self.norms[row])
        self.counts[row] += 1

    def state(self) -> dict[str, Any]:
        """Return the arrays, and the medians in use."""
        return {**super().state(), "median": self._median.copy(), "due": self._due}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        self._median, self._due = np.array(state["median"], float), state["due"]


def _lower_median(rows: Values) -> Values:
    """Return the lower median of each column, of its elements that are not NaN; NaN without any."""
    if not len(rows):
        return np.full(rows.shape[1:], math.nan)
    counts = np.add.reduce(~np.isnan(rows), axis=0)  # those that are not NaN, which is sorted last
    middle = np.maximum(counts - 1, 0) // 2
    ordered = rows.copy()
    ordered.sort(axis=0)
    found: Values = ordered[middle, np.arange(rows.shape[1])]
    return found
