"""PushScreen pushes with a filter, and quarantine workers that are refused too often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.errors import Refused, UsageError
from aiops.filters.norm import NormFilter, parse

QUARANTINE = 16
"""Refusals after which a worker is quarantined, each counted for 1; a push that is used takes 1/2
of one off. So a worker of whose pushes less than a third are refused never is."""


def check(text: str) -> None:
    """Check a filter's description (``--filter``): ``off``, ``norm`` or ``norm:FACTOR``.

    Raises
    ------
    UsageError
        When it is none of these.
    """
    if text == "off":
        return
    factor = parse(text)
    if factor is None or not 1 < factor < 1e6:
        raise UsageError(
            f"--filter must be off, norm or norm:FACTOR (more than 1, default 5), not {text!r}"
        )


class PushScreen:
    """The filter of one run, and its account of each worker.

    Parameters
    ----------
    text
        As `check` takes it, but ``off``.
    tensors
        The names of the model's tensors.

    Attributes
    ----------
    refused
        Pushes that were refused so far.
    quarantined
        By a worker's number, the reason.
    """

    def __init__(self, text: str, tensors: list[str]) -> None:
        self._text, self._tensors = text, tensors
        self._filter = NormFilter(len(tensors), parse(text) or 5.0)
        self._points: dict[int, float] = {}
        self.refused = 0
        self.quarantined: dict[int, str] = {}

    def judge(
        self, worker: int, tensors: npt.NDArray[np.int64], squares: npt.NDArray[np.float64]
    ) -> str | None:
        """Return the reason for which a push is not used, or None.

        The reason is empty while the filter is learning: then nothing is held against the worker.

        Parameters
        ----------
        worker
            Its number.
        tensors, squares
            The tensors that it covers, and the sum of squares of each.
        """
        learning = self._filter.learning
        found = self._filter.judge(worker, tensors, np.sqrt(squares))
        if learning:
            return ""
        points = self._points.get(worker, 0.0)
        if found is None:
            if points:
                self._points[worker] = max(points - 0.5, 0.0)
            return None
        tensor, ratio = found
        why = (
            f"the norm of its gradient of {self._tensors[tensor]!r} is {ratio:.3g} times the median"
            f" of all workers' (--filter {self._text})"
        )
        self.refused += 1
        self._points[worker] = points + 1
        if points + 1 >= QUARANTINE:
            self.quarantined[worker] = why
        return why

    def fault(self, worker: int) -> Refused | None:
        """Return the refusal of all pushes of a worker that is quarantined, or None."""
        why = self.quarantined.get(worker)
        if why is None:
            return None
        return Refused(
            f"this worker is quarantined, because too many of its pushes were refused; of the last"
            f" one, {why}; look for bad data or a wrong loss, and start the worker again"
        )

    def report(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return its row of the statistics; ``names``: of workers, by number."""
        quarantined = [names.get(number, str(number)) for number in sorted(self.quarantined)]
        return {"filter": self._text, "refused": self.refused, "quarantined": quarantined}

    def state(self) -> dict[str, Any]:
        """Return all of it as plain values, for `restore`."""
        accounts = list(self._points.items()), list(self.quarantined.items())
        return {"filter": self._filter.state(), "accounts": accounts, "refused": self.refused}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._filter.restore(state["filter"])
        points, quarantined = state["accounts"]
        self._points, self.quarantined = dict(points), dict(quarantined)
        self.refused = state["refused"]
