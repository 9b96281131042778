"""The norm filter: refuse a gradient whose norm, in any tensor, is far above the median."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Norms = npt.NDArray[np.float64]

WORKERS = 64
"""The workers whose norms are kept: those that pushed last."""

EACH = 8
"""The last pushes of each that are kept."""

LEARNT = 8
"""Pushes that are measured before the first is used."""


class NormFilter:
    """Compare the norm of each tensor with its median over the last pushes of all workers.

    .. math:: g is used if ‖g_k‖ ≤ c · median_j ‖g_k⁽ʲ⁾‖ for every tensor k

    The median is over the workers, of each worker's own over its last 8 pushes, used or not: it
    follows gradients that grow, and one that pushes often does not move it. Of an even number the
    lower is taken. While fewer than half of the workers are hostile, the median is not above norms
    of honest ones. The first 8 pushes are measured, and not used: there is nothing to compare them
    with. A gradient is not scaled down: a norm that large is not that of its mini-batch.

    It keeps out magnitudes (9e17, 100 times the gradient), and nothing that has the size of a
    gradient: flipped signs, wrong labels, noise of the right norm.

    Parameters
    ----------
    tensors
        The number of the model's tensors.
    factor
        c, more than 1.

    Source
    ------
    The median is that of Yin et al. 2018, *Byzantine-robust distributed learning*, taken of norms;
    bounding norms so is Sun et al. 2019, *Can you really backdoor federated learning?*

    Example
    -------
    >>> norms = NormFilter(tensors=1, factor=5.0)
    >>> found = [norms.judge(worker, np.array([0]), np.array([1.0])) for worker in range(8)]
    >>> norms.judge(1, np.array([0]), np.array([4.0])), norms.learning
    (None, False)
    >>> norms.judge(2, np.array([0]), np.array([100.0]))
    (0, 100.0)
    """

    def __init__(self, tensors: int, factor: float) -> None:
        self.factor = factor
        self._norms = np.full((WORKERS, EACH, tensors), np.nan)
        self._medians = np.full((WORKERS, tensors), np.nan)  # of each worker
        self._workers = np.full(WORKERS, -1, np.int64)
        self._counts = np.zeros(WORKERS, np.int64)  # pushes of each
        self._times = np.full(WORKERS, -1, np.int64)  # the number of each one's last push
        self._next = 0  # pushes so far

    @property
    def learning(self) -> bool:
        """True while pushes are measured only."""
        return self._next < LEARNT

    def judge(
        self, worker: int, tensors: npt.NDArray[np.int64], norms: Norms
    ) -> tuple[int, float] | None:
        """Note a push; return the tensor that is furthest beyond c, and its norm over the median.

        Parameters
        ----------
        worker
            The number of its worker.
        tensors, norms
            The tensors that it covers, and the norm of each. Those whose median is 0 pass.

        Returns
        -------
        tuple or None
            None: the push may be used, unless `learning`.
        """
        medians = _lower_median(self._medians[:, tensors])
        self._note(worker, tensors, norms)
        judged = medians > 0  # NaN: no worker has pushed the tensor
        ratios = np.divide(norms, medians, out=np.zeros(len(norms)), where=judged)
        worst = int(np.argmax(ratios))
        if not ratios[worst] > self.factor:
            return None
        return int(tensors[worst]), float(ratios[worst])

    def _note(self, worker: int, tensors: npt.NDArray[np.int64], norms: Norms) -> None:
        """Keep a push of a worker, in place of its eighth last or of the worker seen least."""
        mine = np.flatnonzero(self._workers == worker)
        row = int(mine[0]) if len(mine) else int(np.argmin(self._times))
        if not len(mine):
            self._workers[row], self._counts[row] = worker, 0
            self._norms[row], self._medians[row] = np.nan, np.nan
        place = int(self._counts[row]) % EACH
        self._norms[row, place] = np.nan
        self._norms[row, place, tensors] = norms
        self._medians[row] = _lower_median(self._norms[row])
        self._counts[row] += 1
        self._times[row] = self._next
        self._next += 1

    def state(self) -> dict[str, Any]:
        """Return what is kept, for `restore`."""
        return {name: getattr(self, name).copy() for name in _ARRAYS} | {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in _ARRAYS:
            array = getattr(self, name)
            array[...] = np.asarray(state[name]).reshape(array.shape)
        self._next = state["next"]


_ARRAYS = ("_norms", "_medians", "_workers", "_counts", "_times")


def _lower_median(rows: Norms) -> Norms:
    """Return the lower median of each column, of its elements that are not NaN; NaN without any."""
    counts = (~np.isnan(rows)).sum(axis=0)
    middle = np.maximum(counts - 1, 0) // 2
    found: Norms = np.take_along_axis(np.sort(rows, axis=0), middle[None], axis=0)[0]
    return found  # NaN is sorted last


def parse(text: str) -> float | None:
    """Return the factor of ``norm`` or ``norm:FACTOR``; None: it is something else.

    >>> parse("norm"), parse("norm:8"), parse("nrom")
    (5.0, 8.0, None)
    """
    name, _colon, factor = text.partition(":")
    if name != "norm":
        return None
    try:
        return float(factor or 5.0)
    except ValueError:
        return None
