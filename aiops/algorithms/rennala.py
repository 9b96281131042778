"""Rennala SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import IGNORE, Decision, Policy
from aiops.algorithms.policies import EveryNth
from aiops.algorithms.server_optimizer import Optimised


class CurrentOnly(EveryNth):
    """Take a step after every ``count`` gradients of the current version; ignore all others."""

    def push(self, worker: int, staleness: int) -> Decision:
        """Collect the gradient if it is of the current version."""
        return super().push(worker, staleness) if staleness == 0 else IGNORE


@dataclass(frozen=True, kw_only=True)
class Rennala(Optimised):
    """Rennala SGD: mini-batch SGD with the first B gradients at the current point, of any workers.

    .. math:: θ ← θ − α · (1/B) Σ g_l,   all of them computed at θ

    No worker waits: after its push it computes another gradient at the same point. A late gradient
    is ignored, and its worker gets the newest parameters. Fast workers contribute more.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α.
    b : int, default 4
        B, gradients per step. The theory's choice is max(1, σ²/ε).

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of B gradients at one point, and stands for B·µ examples; those that are ignored
    count for nothing. By default ``schedule`` counts updates.

    Source
    ------
    Tyurin & Richtárik 2023, *Optimal time complexities of parallel stochastic optimization methods
    under a fixed computation model*, method 4.

    Example
    -------
    >>> policy = Rennala(b=2).policy(workers=None)
    >>> [policy.push(1, staleness).divide for staleness in (0, 1, 0)]
    [None, None, 2]
    """

    family = "synchronous or bounded"
    neighbours = "hardsync ringmaster softsync"
    name = "rennala"
    lr: float = 0.1
    b: int = 4

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("b", self.b >= 1, "1 or more")

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that steps after B current gradients."""
        return CurrentOnly(self.b)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Add to the plan that gradients of older parameters are of no use."""
        return {**super().plan(workers), "no_overlap": "newest"}
