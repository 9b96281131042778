"""Synchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Decision, Policy
from aiops.algorithms.policies import Barrier
from aiops.algorithms.server_optimizer import Optimised
from aiops.algorithms.trimming import Trimmed
from aiops.errors import UsageError


class RejectStale(Policy):
    """Collect gradients of the current version until there are ``count``, and refuse all others."""

    awaits_workers = True

    def __init__(self, count: int) -> None:
        self.count = count
        self.collected = 0

    def push(self, worker: int, staleness: int) -> Decision:
        """Refuse a stale gradient, whose worker recomputes the same mini-batch; collect others."""
        if staleness > 0:
            return Decision(
                False,
                why=f"the gradient is {staleness} versions old, and hardsync takes none that is:"
                " compute it again on the parameters that come with this answer",
            )
        self.collected += 1
        if self.collected < self.count:
            return Decision(True)
        self.collected = 0
        return Decision(True, divide=self.count)


@dataclass(frozen=True, kw_only=True)
class Hardsync(Trimmed, Optimised):
    """Synchronous SGD: wait for every worker, then take one step with the mean gradient.

    .. math:: θ ← θ − α · (1/λ) Σ g_l

    λ workers with mini-batches of µ equal plain SGD with mini-batches of λµ.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α.
    admission : str, default ``wait``
        ``wait``: a worker is answered when the step is done, so none computes ahead; a worker that
        leaves, or exceeds ``--worker-deadline``, is not waited for, and a gradient that comes from
        it after the step is ignored, and counted as wasted.
        ``reject``: gradients are counted, not workers; one whose version is not the current one is
        refused, and its worker computes it again; the wasted work is counted.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient of each of the λ workers, and stands for λ·µ examples. By default
    ``schedule`` counts updates, which are as many as each worker's steps.

    Source
    ------
    Zhang et al. 2015 and Gupta et al. 2015 (``wait``); ElasticDL's design of asynchronous SGD,
    ``grads_to_wait`` (``reject``).

    Example
    -------
    >>> policy = Hardsync().policy(workers=2)
    >>> policy.workers_changed(frozenset({1, 2}))
    >>> [policy.push(worker, 0).divide for worker in (2, 1)]
    [None, 2]
    """

    family = "synchronous or bounded"
    neighbours = "rennala ssp softsync asgd"
    name = "hardsync"
    needs_workers = True
    lr: float = 0.1
    admission: str = "wait"

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.admission not in ("wait", "reject"):
            text = f"hardsync: admission must be 'wait' or 'reject', not {self.admission!r}"
            raise UsageError(text)

    def gathered(self, workers: int | None) -> int:
        """Return one of each worker."""
        return workers or 1

    def policy(self, workers: int | None) -> Policy:
        """Return a barrier, or for ``reject`` the policy that refuses stale gradients."""
        count = workers or 1
        return Barrier(fresh=True) if self.admission == "wait" else RejectStale(count)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Add to the plan whether refused gradients are computed again."""
        return {**super().plan(workers), "recompute": self.admission == "reject"}
