"""Asynchronous SGD without gradient delay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Algorithm, Policy
from aiops.algorithms.local import Inner, refuse_clip
from aiops.algorithms.policies import Barrier
from aiops.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class NoDelay(Algorithm):
    """Asynchronous SGD without gradient delay: compute goes on while updates are merged.

    .. math::

        worker:  x ← x − α_i · g(x),  s ← s + 1;   if s = τ_max wait for a new model
                 hand over:  w ← x − x_init,  x_init ← x
                 new model:  x ← PS + (x − x_init),  x_init ← PS
        server:  PS ← PS + (1/|W|) Σ w

    Every gradient is applied at once to the parameters it was computed at, so none is ever late;
    what is late, by at most τ_max steps, is the news from the others. No worker idles while a merge
    takes less time than τ_max of its gradients.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α of the workers' own steps; ``schedule`` and ``scale_lr`` are for it.
    tau_max : int, default 8
        τ_max, steps that a worker may be ahead of the last model it got. Idle time vanishes from
        about 8 on; the distance between workers grows with it.
    variant : int, default 1
        1: hand over whenever nothing is on its way (algorithm 1). 2: in cycles of τ_max/2 steps
        (algorithm 2), of which each waits for the merge of the one before.

    Source
    ------
    *Asynchronous SGD without gradient delay for efficient distributed training*, submitted to ICLR
    2019 (anonymous), algorithms 1 and 2.

    Note
    ----
    The paper's listing omits the reset of x_init at the hand-over that its prose intends; without
    it an update counts twice. Its server asks for updates when all have one; here a worker hands
    its own over as soon as nothing of it is on its way, and the server waits for one of each: the
    same merges, with a round trip less.

    Example
    -------
    >>> NoDelay(tau_max=8, variant=2).plan(workers=4)["push_every"]
    4
    """

    family = "local training"
    neighbours = "hardsync downpour easgd"
    name = "no-delay"
    needs_workers = True
    lr: float = 0.1
    tau_max: int = 8
    variant: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("tau_max", self.tau_max >= 1, "1 or more")
        self.require("variant", self.variant in (1, 2), "1 or 2")
        if self.variant == 2 and self.tau_max % 2:
            raise UsageError(
                f"no-delay: variant 2 has cycles of tau_max/2 steps: tau_max must be even, not"
                f" {self.tau_max}"
            )
        refuse_clip(self)

    def rates(self, workers: int | None) -> Callable[[int], float]:
        """Return 1: what the server merges are finished steps."""
        return lambda update: 1.0

    def policy(self, workers: int | None) -> Policy:
        """Wait for one update of every worker."""
        return Barrier(fresh=False)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Tell workers to step by themselves, and how far."""
        inner = Inner.own_steps(self, workers)
        cycles = self.variant == 2
        return {
            **super().plan(workers),
            "routine": "local",
            "push_every": self.tau_max // 2 if cycles else 1,
            "overlap": "cycle" if cycles else "free",
            "limit": self.tau_max,
            "inner": inner.plan(),
        }
