"""The updates that a run makes per second, lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any


class Pace:
    """Updates per second over the last ten seconds or so."""

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "due")

    def __init__(self) -> None:
        self._seconds: deque[tuple[float, int]] = deque(maxlen=12)  # (time, version then)
        self.due = -math.inf  # when a version is to be noted again

    def note(self, now: float, version: int) -> None:
        """Note the version at a time; more than once a second is ignored."""
        if now >= self.due:
            self._seconds.append((now, version))
            self.due = now + 1

    def state(self) -> list[Any]:
        """Return the versions noted and the next time as plain values, for `restore`."""
        return [self.due, list(self._seconds)]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self.due = state[0]
        self._seconds.extend((time, version) for time, version in state[1])

    def rate(self, now: float, version: int) -> float:
        """Return updates per second."""
        if not self._seconds:
            return 0.0
        since, before = self._seconds[0]
        return (version - before) / max(now - since, 1e-9)
