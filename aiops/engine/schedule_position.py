"""Count where training is in a schedule of examples, tokens or seconds (of updates, see versions).

All of it follows from the events: the examples from the pushes that were used, the seconds from the
times at which they came. So a replay, a standby and a server that goes on from its state are at the
same place. When a server goes on, the time since the last push that was used does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.algorithms.schedules import SECONDS, UPDATES


class SchedulePosition:
    """The position of one run, in the unit of its schedule.

    Parameters
    ----------
    algorithm, workers
        They give the unit, and the examples of a mini-batch.
    most
        The mini-batches that a push counts as at most, whatever its worker says. More would let one
        worker move the schedule of all to its end.

    Attributes
    ----------
    now
        The time of the present event, in seconds.
    """

    def __init__(self, algorithm: Algorithm, workers: int | None, most: int) -> None:
        self._seconds = algorithm.schedule_unit == SECONDS
        plan = algorithm.plan(workers)
        steps = int(plan.get("push_every", 1)) if plan.get("routine") == "local" else 1
        self._most = most
        self._each = steps * algorithm.mini_batch  # examples of a push of one mini-batch, or cycle
        self.now = 0.0
        self._begun: float | None = None  # the time of the first push
        self._paused: float | None = None  # the time at which the present pause began
        self._last = 0.0  # the time of the last push
        self._away = 0.0  # seconds since the first push that do not count
        self._batches = 0  # of pushes that the current version was made of
        self._collected = 0  # of those in the sum in progress

    @classmethod
    def of(cls, algorithm: Algorithm, workers: int | None, most: int) -> SchedulePosition | None:
        """Return the position at the start of a run; None: the schedule counts updates."""
        return None if algorithm.schedule_unit == UPDATES else cls(algorithm, workers, most)

    def at(self, batches: int = 0) -> float:
        """Return the position of an update.

        These are the seconds since the first push; or the number, from 0, of the last example that
        the update learns from, as the first update has the number 0 where updates are counted.
        ``batches``: those of its last push, if that is not counted yet.
        """
        if self._seconds:
            now = self.now if self._paused is None else self._paused
            return 0.0 if self._begun is None else max(0.0, now - self._begun - self._away)
        return max(0, (self._batches + self._collected + batches) * self._each - 1)

    def used(self, batches: int) -> None:
        """Count a push that is used: ``batches`` mini-batches, or cycles of local steps."""
        self._note()
        self._collected += min(batches, self._most)

    def rows_used(self) -> None:
        """Note a push of rows, which belongs to a mini-batch that is counted elsewhere."""
        self._note()

    def _note(self) -> None:
        self._last = self.now
        if self._begun is None:
            self._begun, self._away = self.now, 0.0

    def end(self, *, published: bool) -> None:
        """Count the pushes of an update that was published, or forget those of one refused."""
        if published:
            self._batches += self._collected
        self._collected = 0

    def pause(self, now: float, *, paused: bool) -> None:
        """Begin or end a pause, which does not count as time."""
        if paused and self._paused is None:
            self._paused = now
        elif not paused and self._paused is not None:
            self._away += now - self._paused
            self._paused = None

    def resumed(self, now: float) -> None:
        """Go on in another process: the time since the last push does not count, as in a pause."""
        if self._paused is None:
            self._away += now - self._last
            self._last = now

    def state(self) -> list[Any]:
        """Return it as plain values, for `restore`."""
        times = self._begun, self._paused, self._last, self._away
        return [*times, self._batches, self._collected]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self._begun, self._paused, self._last, self._away, self._batches, self._collected = state
        self.now = self._last
