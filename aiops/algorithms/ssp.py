"""Stale synchronous parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Decision, Policy
from aiops.algorithms.local_training import InnerOptimizer, refuse_other_schedules
from aiops.algorithms.server_optimizer import Optimised


class BoundedLead(Policy):
    """Apply every gradient at once; hold the answer of a worker too far ahead of the slowest.

    A worker's clock is the number of gradients that it has pushed. A worker that joins, or comes
    back, starts at the slowest clock.
    """

    awaits_workers = True
    rows_at_once = True

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.clocks: dict[int, int] = {}  # of the workers that are waited for
        self.floor = 0  # the last slowest clock

    def push(self, worker: int, staleness: int) -> Decision:
        """Apply the gradient, advance the clock of its worker, and hold the answer.

        A worker may have left while its push was queued: no other waits for it any more.
        """
        if worker in self.clocks:
            self.clocks[worker] += 1
        return Decision(True, divide=1, hold=True)

    def workers_changed(self, waited_for: frozenset[int]) -> Decision | None:
        """Start new and returning workers at the slowest clock."""
        self.floor = min(self.clocks.values(), default=self.floor)
        # Announced workers that have not come yet (negative numbers) stand at 0.
        start = {worker: self.floor if worker > 0 else 0 for worker in waited_for}
        self.clocks = {worker: self.clocks.get(worker, start[worker]) for worker in waited_for}
        return None

    def may_go(self, worker: int, published: bool) -> bool:
        """Return whether the slowest worker is within the bound."""
        clock = self.clocks.get(worker)
        return clock is None or clock - min(self.clocks.values()) <= self.bound


@dataclass(frozen=True, kw_only=True)
class SSP(Optimised):
    """Stale synchronous parallel: no worker gets more than s steps ahead of the slowest.

    .. math:: θ ← θ − α · g,   a worker at clock c waits while min(clocks) < c − s

    Gradients are applied at once; the clock of a worker counts its own. This is `ASGD` with a bound
    on how far workers drift apart; with s = 0 they step in lockstep.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α.
    s : int, default 3
        The number of steps that a worker may be ahead of the slowest.
    get_model_frequency : int, default 1
        With f > 1 a worker fetches every f steps; in between it applies its own gradients locally
        while they are pushed in the background.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient, also where it is a
    local step too. An update, and so a version, is of one gradient, and stands for µ examples. By
    default ``schedule`` counts updates, those of all λ workers together: λ for each step of one
    worker. A clock counts one worker's steps.

    Source
    ------
    Ho et al. 2013, *More effective distributed ML via a stale synchronous parallel parameter
    server*; ElasticDL's design of asynchronous SGD (local steps, ``get_model_frequency``).

    Note
    ----
    A worker that pushes in the background computes one step while its answer is held, so its bound
    is one tighter, and s must be at least 1. ``clip`` and ``optimizer`` apply to the server; local
    steps are plain SGD.

    Rows of sparse tables are pushed and fetched directly, as in the source: a push of rows is
    applied and answered at once, a fetch brings the newest rows, and local steps do not touch them.
    The clock counts the pushes of tensors, of which each step has one; held back, it holds the next
    step's rows back too. So a model under SSP has a tensor beside its tables.

    Example
    -------
    >>> policy = SSP(s=1).policy(workers=None)
    >>> policy.workers_changed(frozenset({1, 2}))
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
        if self.get_model_frequency > 1:
            refuse_other_schedules(self)

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that holds workers that are too far ahead."""
        return BoundedLead(self.s - (self.get_model_frequency > 1))

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the plan; with local steps, push each gradient and fetch every f steps."""
        plan = super().plan(workers)
        if self.get_model_frequency == 1:
            return plan
        inner = InnerOptimizer.own_steps(self, workers)
        return {
            **plan,
            "routine": "accumulate",
            "push_every": 1,
            "fetch_every": self.get_model_frequency,
            "inner": inner.plan(),
        }
