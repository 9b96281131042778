"""n-softsync."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import Policy
from aiops.algorithms.modulation import Modulated
from aiops.algorithms.policies import EveryNth
from aiops.algorithms.server_optimizer import Optimised
from aiops.algorithms.trimming import Trimmed
from aiops.errors import ConflictError


@dataclass(frozen=True, kw_only=True)
class Softsync(Modulated, Trimmed, Optimised):
    """n-softsync: update after ⌊λ/n⌋ gradients, from any workers, without a barrier.

    .. math:: θ ← θ − (1/c) Σ α(τ_l) · g_l,   c = ⌊λ/n⌋

    Each gradient is modulated by its own staleness. n = λ is asynchronous SGD; n = 1 updates as
    often as hardsync, but no worker waits. The expected mean staleness is about n.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α.
    n : int, default 1
        The splitting parameter, 1 ≤ n ≤ λ (``--workers``).
    modulate : str, default ``inverse``
        α(τ) = α·s(τ), as in `SASGD`. (``delay-adaptive`` uses this n as its own.)
    rho, a, b : float
        The constants of the modulation.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of c = ⌊λ/n⌋ gradients, and stands for c·µ examples. By default ``schedule`` counts
    updates: about n for each step of one worker.

    Source
    ------
    Zhang, Gupta, Lian & Liu 2015, eqs 3-6; Gupta, Zhang & Milthorpe 2015 (Rudra).

    Example
    -------
    >>> policy = Softsync(n=2).policy(workers=4)
    >>> [policy.push(worker, 0).divide for worker in (1, 2, 1, 1)]
    [None, 2, None, 2]
    """

    family = "asynchronous"
    neighbours = "hardsync sasgd asgd fedbuff"
    name = "softsync"
    needs_workers = True
    lr: float = 0.1
    n: int = 1

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse n > λ."""
        super().check(workers, relaxed)
        if workers is not None and self.n > workers:
            raise ConflictError(
                f"softsync: n = {self.n} groups cannot be made of {workers} workers;"
                f" choose n from 1 to {workers}"
            )

    def gathered(self, workers: int | None) -> int:
        """Return ⌊λ/n⌋."""
        return (workers or self.n) // self.n

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that steps after ⌊λ/n⌋ gradients."""
        return EveryNth((workers or self.n) // self.n)
