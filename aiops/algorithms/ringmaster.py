"""Ringmaster ASGD."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import APPLY, IGNORE, Decision, Policy
from aiops.algorithms.server_optimizer import Optimised


class IgnoreStale(Policy):
    """Apply a gradient at once if its staleness is below ``delay``; ignore it otherwise."""

    repeatable = True

    def __init__(self, delay: int) -> None:
        self.delay = delay

    def push(self, worker: int, staleness: int) -> Decision:
        """Apply or ignore the gradient."""
        return APPLY if staleness < self.delay else IGNORE


@dataclass(frozen=True, kw_only=True)
class Ringmaster(Optimised):
    """Ringmaster ASGD: asynchronous SGD that ignores gradients R or more versions old.

    .. math:: θ ← θ − α · g  if τ < R,  else nothing

    The worker of an ignored gradient gets the newest parameters and goes on. With R chosen for the
    noise of the gradients, the time to a given accuracy is optimal, however unequal the workers.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α.
    r : int, default 16
        R ≥ 1. The theory's choice is max(1, σ²/ε), the variance of the gradients over the target
        for the squared norm. With R of at least the number of workers, equal workers waste nothing.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples; one that is ignored makes none. By
    default ``schedule`` counts updates, those of all λ workers together: at most λ for each step of
    one worker.

    Source
    ------
    Maranjyan, Tyurin & Richtárik 2025, *Ringmaster ASGD: the first asynchronous SGD with optimal
    time complexity*, algorithm 4 (and its code).

    Example
    -------
    >>> policy = Ringmaster(r=2).policy(workers=None)
    >>> [policy.push(1, staleness).use for staleness in (0, 1, 2)]
    [True, True, False]
    """

    family = "synchronous or bounded"
    neighbours = "rennala asgd sasgd ssp"
    name = "ringmaster"
    lr: float = 0.04
    r: int = 16

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("r", self.r >= 1, "1 or more")

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that ignores a staleness of R or more."""
        return IgnoreStale(self.r)
