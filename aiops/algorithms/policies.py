"""Policies that several algorithms share (`Immediate`, the simplest, is in `base`)."""

from __future__ import annotations

from aiops.algorithms.base import APPLY, COLLECT, IGNORE, Decision, Policy


class Barrier(Policy):
    """Wait for one gradient from every worker that is waited for (``admission=wait``).

    ``fresh``: only gradients of the current version take part; that of a worker which had been
    given up is ignored, and it is back in the next round.
    """

    def __init__(self, *, fresh: bool) -> None:
        self.fresh = fresh
        self.given: set[int] = set()
        self.waited_for: frozenset[int] = frozenset()

    def push(self, worker: int, staleness: int) -> Decision:
        """Collect it; the last one of the round takes the step."""
        if self.fresh and staleness:
            return IGNORE
        if worker in self.given:
            why = "one gradient per worker and round: wait for the answer to your last push"
            return Decision(False, why=why)
        self.given.add(worker)
        return Decision(True, divide=self._complete(), hold=True)

    def crew(self, waited_for: frozenset[int]) -> Decision | None:
        """See whether the round is complete without those who went."""
        self.waited_for = waited_for
        divide = self._complete() if self.given else None
        return None if divide is None else Decision(True, divide=divide)

    def _complete(self) -> int | None:
        """Return how many gave a gradient, when nobody else is waited for."""
        if self.waited_for - self.given:
            return None
        count = len(self.given)
        self.given.clear()
        return count


class Counting(Policy):
    """Take a step after every ``count`` gradients, from whichever workers; nobody waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.collected = 0

    def push(self, worker: int, staleness: int) -> Decision:
        """Collect it, and take the step when it completes the count."""
        if self.count == 1:
            return APPLY
        self.collected += 1
        if self.collected < self.count:
            return COLLECT
        self.collected = 0
        return Decision(True, divide=self.count)
