"""Asynchronous SGD without gradient delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Algorithm, Policy
from aiops.algorithms.local_training import InnerOptimizer, refuse_clip, refuse_other_schedules
from aiops.algorithms.policies import Barrier
from aiops.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class NoDelay(Algorithm):
    """Asynchronous SGD without gradient delay: workers go on computing while updates are merged.

    .. math::

        worker:  x ← x − α_i · g(x),  s ← s + 1;   if s = τ_max wait for a new model
                 hand over:  w ← x − x_init,  x_init ← x
                 new model:  x ← PS + (x − x_init),  x_init ← PS
        server:  PS ← PS + (1/|W|) Σ w

    A worker applies every gradient to the parameters that it was computed on, so no gradient is
    stale; the updates of other workers are, by at most τ_max steps. No worker idles while a merge
    takes less time than τ_max of its gradients.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α of the workers' own steps, to which ``schedule`` and ``scale_lr`` apply.
    tau_max : int, default 8
        τ_max, the steps that a worker may be ahead of the last model that it received. Idle time
        vanishes from about 8 on; the distance between workers grows with it.
    variant : int, default 1
        1: hand over whenever no update is in flight (algorithm 1). 2: in cycles of τ_max/2 steps
        (algorithm 2), each of which waits for the merge of the previous one.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and is a local step. An update, and so a
    version, is of what each of the λ workers hands over at once, and stands for as many steps of
    each as it took since its last: 1 to τ_max, or τ_max/2 in variant 2. ``schedule`` counts each
    worker's own steps, since the server merges finished steps.

    Source
    ------
    *Asynchronous SGD without gradient delay for efficient distributed training*, submitted to ICLR
    2019 (anonymous), algorithms 1 and 2.

    Note
    ----
    The paper's listing omits the reset of x_init at the hand-over that its prose intends; without
    it an update counts twice. Its server requests updates when all workers have one; here a worker
    pushes its own as soon as none is in flight, and the server waits for one of each worker: the
    same merges, with one round trip less.

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
        refuse_other_schedules(self)

    @property
    def rate_hint(self) -> str:
        """The learning rate, which is the workers'."""
        return f"the learning rate of the workers' own steps (--set lr=..., now {self.lr:g})"

    def rates(self, workers: int | None) -> float:
        """Return 1: the server merges finished steps."""
        return 1.0

    @property
    def patterned(self) -> tuple[str, ...]:
        """The learning rate of the workers' own steps."""
        return ("lr",)

    def rate_factor(self, tensor: str, shape: Sequence[int] = ()) -> float:
        """Return 1: learning rates are those of the workers' own steps."""
        return 1.0

    def policy(self, workers: int | None) -> Policy:
        """Return the barrier that waits for one update of every worker."""
        return Barrier(fresh=False)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the plan of workers that step locally, up to τ_max steps ahead."""
        inner = InnerOptimizer.own_steps(self, workers)
        cycles = self.variant == 2
        return {
            **super().plan(workers),
            "routine": "local",
            "push_every": self.tau_max // 2 if cycles else 1,
            "overlap": "cycle" if cycles else "free",
            "limit": self.tau_max,
            "inner": inner.plan(),
        }
