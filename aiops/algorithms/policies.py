"""Define the policies that several algorithms share (`Immediate` is in `base`)."""

from __future__ import annotations

from aiops.algorithms.base import APPLY, COLLECT, IGNORE, Decision, Policy


class Barrier(Policy):
    """Take a step after one gradient from every worker that is waited for.

    ``fresh``: gradients of older versions are ignored, such as that of a worker which was no longer
    waited for; it takes part in the next round.
    """

    awaits_workers = True

    def __init__(self, *, fresh: bool) -> None:
        self.fresh = fresh
        self.given: set[int] = set()
        self.waited_for: frozenset[int] = frozenset()

    def push(self, worker: int, staleness: int) -> Decision:
        """Collect the gradient; the last one of the round takes the step."""
        if self.fresh and staleness:
            return IGNORE
        if worker in self.given:
            why = "one gradient per worker and round: wait for the answer to your last push"
            return Decision(False, why=why)
        self.given.add(worker)
        return Decision(True, divide=self._complete(), hold=True)

    def workers_changed(self, waited_for: frozenset[int]) -> Decision | None:
        """Take the step if the round is complete without the workers that left."""
        self.waited_for = waited_for
        divide = self._complete() if self.given else None
        return None if divide is None else Decision(True, divide=divide)

    def _complete(self) -> int | None:
        """Return the number of gradients if no other worker is waited for, else None."""
        if self.waited_for - self.given:
            return None
        count = len(self.given)
        self.given.clear()
        return count


class EveryNth(Policy):
    """Take a step after every ``count`` gradients, from any workers; no worker waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.collected = 0

    def push(self, worker: int, staleness: int) -> Decision:
        """Collect the gradient, and take the step when it completes the count."""
        if self.count == 1:
            return APPLY
        self.collected += 1
        if self.collected < self.count:
            return COLLECT
        self.collected = 0
        return Decision(True, divide=self.count)
