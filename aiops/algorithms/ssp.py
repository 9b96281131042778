"""Stale synchronous parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Decision, Policy
from aiops.algorithms.local import Inner
from aiops.algorithms.optimised import Optimised


class Bounded(Policy):
    """Apply every gradient at once; hold the answer of whoever is too far ahead of the slowest.

    A worker's clock is the number of gradients it has pushed. Who joins (or comes back) starts
    where the slowest is.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.clocks: dict[int, int] = {}  # of those who are waited for
        self.floor = 0  # where the slowest was last

    def push(self, worker: int, staleness: int) -> Decision:
        """Apply it, and count it."""
        self.clocks[worker] = self.clocks.get(worker, self.floor) + 1
        return Decision(True, divide=1, hold=True)

    def crew(self, waited_for: frozenset[int]) -> Decision | None:
        """Start newcomers, and who comes back, at the slowest clock."""
        self.floor = min(self.clocks.values(), default=self.floor)
        # Announced workers that have not come yet (negative numbers) stand at 0.
        start = {worker: self.floor if worker > 0 else 0 for worker in waited_for}
        self.clocks = {worker: self.clocks.get(worker, start[worker]) for worker in waited_for}
        return None

    def may_go(self, worker: int, published: bool) -> bool:
        """Whether the slowest is within the bound."""
        clock = self.clocks.get(worker)
        return clock is None or clock - min(self.clocks.values()) <= self.bound


@dataclass(frozen=True, kw_only=True)
class SSP(Optimised):
    """Stale synchronous parallel: nobody gets more than s steps ahead of the slowest worker.

    .. math:: θ ← θ − α · g,   a worker at clock c waits while min(clocks) < c − s

    Gradients are applied at once; a worker's clock counts its own. Between fast and slow workers
    this is a bounded `ASGD`; with s = 0 they go in lockstep.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α.
    s : int, default 3
        How many steps ahead of the slowest a worker may be.
    get_model_frequency : int, default 1
        With f > 1 a worker fetches every f steps; in between it applies its own gradients locally
        while they are pushed in the background.

    Source
    ------
    Ho et al. 2013, *More effective distributed ML via a stale synchronous parallel parameter
    server*; ElasticDL's design of asynchronous SGD (local steps, ``get_model_frequency``).

    Note
    ----
    A worker that pushes in the background computes one step while it is held; its bound is counted
    one tighter, so that what is promised holds (and s must be at least 1). ``clip`` and
    ``optimizer`` are the server's; local steps are plain.

    Example
    -------
    >>> policy = SSP(s=1).policy(workers=None)
    >>> policy.crew(frozenset({1, 2}))
    >>> [(policy.push(1, 0).hold, policy.may_go(1, published=True)) for _ in range(2)]
    [(True, True), (True, False)]
    """

    family = "synchronous or bounded"
    neighbours = "hardsync asgd ringmaster"
    name = "ssp"
    lr: float = 0.04
    s: int = 3
    get_model_frequency: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("get_model_frequency", self.get_model_frequency >= 1, "1 or more")
        least = 1 if self.get_model_frequency > 1 else 0
        why = " (local steps run one ahead)" if least else ""
        self.require("s", self.s >= least, f"{least} or more{why}")

    @property
    def gated(self) -> bool:
        """Others wait for each worker's pushes."""
        return False

    def policy(self, workers: int | None) -> Policy:
        """Hold who is too far ahead."""
        return Bounded(self.s - (self.get_model_frequency > 1))

    def plan(self, workers: int | None) -> dict[str, Any]:
        """With local steps: push each gradient, fetch now and then."""
        plan = super().plan(workers)
        if self.get_model_frequency == 1:
            return plan
        inner = Inner.own_steps(self, workers)
        return {
            **plan,
            "routine": "accumulate",
            "push_every": 1,
            "fetch_every": self.get_model_frequency,
            "inner": inner.plan(),
        }
