"""Elastic averaging SGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.algorithms.local_training import InnerOptimizer, refuse_clip, refuse_other_schedules
from aiops.errors import ConflictError
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar


def elastic(w: Array, g: Array, step: Scalar) -> tuple[Array, ...]:
    """Move the centre: ``g`` is the position of a worker, ``step`` the moving rate κ."""
    return (w + step * (g - w),)


@dataclass(frozen=True, kw_only=True)
class EASGD(Algorithm):
    """Elastic averaging SGD: workers explore locally, and an elastic force ties them to a centre.

    .. math::

        worker:  x ← x − α · g;   every p steps  d = κ · (x − θ),  x ← x − d
        server:  θ ← θ + d

    κ = ρα is the moving rate. θ follows the average of the workers; evaluate θ.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α of the workers' own steps, to which ``schedule`` and ``scale_lr`` apply.
    p : int, default 10
        Steps between two elastic moves (the communication period).
    kappa : float, default 0
        κ, up to 0.95; 0 means β/λ with the paper's β = 0.9, and requires ``--workers``.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and is a local step; every p steps its
    position is pushed. An update, and so a version, is of one such move, and stands for p·µ
    examples of one worker. ``schedule`` counts each worker's own steps, since κ is constant.

    Source
    ------
    Zhang, Choromanska & LeCun 2015, *Deep learning with elastic averaging SGD*, algorithm 1.

    Note
    ----
    The worker pushes x, the server moves and answers with the new θ', and the worker takes the same
    d from it: d = κ/(1−κ) · (x − θ'). That takes one round trip, and no other worker's move can
    come in between; the paper's algorithm reads and writes the centre separately.

    Example
    -------
    >>> EASGD().plan(workers=3)["moving_rate"]
    0.3
    """

    family = "local training"
    neighbours = "eamsgd downpour diloco fedbuff"
    name = "easgd"
    lr: float = 0.1
    p: int = 10
    kappa: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("p", self.p >= 1, "1 or more")
        self.require("kappa", 0 <= self.kappa <= 0.95, "0 (β/λ), or up to 0.95")
        refuse_clip(self)
        refuse_other_schedules(self)

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse a moving rate that depends on an unknown number of workers."""
        super().check(workers, relaxed)
        if not self.kappa and workers is None:
            raise ConflictError(
                f"{self.name}: the moving rate is 0.9 divided by the number of workers: say how"
                " many with --workers N, or give --set kappa=..."
            )

    @property
    def patterned(self) -> tuple[str, ...]:
        """The learning rate of the workers' own steps."""
        return ("lr",)

    def moving_rate(self, workers: int | None) -> float:
        """Return κ; ``workers``: how many take part, or None."""
        return self.kappa or min(0.9 / (workers or 1), 0.9)

    def rule(self) -> Rule:
        """Return the move of the centre."""
        return Rule(elastic)

    @property
    def rate_hint(self) -> str:
        """The learning rate, which is the workers'."""
        return f"the learning rate of the workers' own steps (--set lr=..., now {self.lr:g})"

    def rates(self, workers: int | None) -> float:
        """Return κ."""
        return self.moving_rate(workers)

    def rate_factor(self, tensor: str, shape: Sequence[int] = ()) -> float:
        """Return 1: learning rates are those of the workers' own steps."""
        return 1.0

    def worker_optimizer(self, workers: int | None) -> InnerOptimizer:
        """Return the optimiser of the workers' own steps: plain SGD."""
        return InnerOptimizer.own_steps(self, workers)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the plan of exploring workers, and when they move."""
        inner = self.worker_optimizer(workers)
        return {
            **super().plan(workers),
            "routine": "elastic",
            "push_every": self.p,
            "moving_rate": self.moving_rate(workers),
            "inner": inner.plan(),
        }


@dataclass(frozen=True, kw_only=True)
class EAMSGD(EASGD):
    """Elastic averaging SGD whose workers step with Nesterov's momentum.

    .. math::

        worker:  v ← δ v − α · g(x + δ v),  x ← x + v;   every p steps  d = κ · (x − θ),  x ← x − d
        server:  θ ← θ + d

    Settings
    --------
    lr : float, default 0.01
        Learning rate α of the workers' own steps.
    p : int, default 10
        Steps between two elastic moves.
    kappa : float, default 0
        κ, as `EASGD`'s.
    delta : float, default 0.9
        δ, the workers' momentum.

    Steps
    -----
    As of `EASGD`: a step of a worker is a local one, with one mini-batch of µ examples. An update,
    and so a version, is of one elastic move, and stands for p·µ examples of one worker.
    ``schedule`` counts each worker's own steps.

    Source
    ------
    Zhang, Choromanska & LeCun 2015, *Deep learning with elastic averaging SGD*, algorithm 2.

    Note
    ----
    ``worker.params`` are x + δv, where the gradient is to be computed; the elastic force acts on x.
    As in PyTorch, v is kept as −α times a sum of gradients: where a schedule changes α, v changes
    with it.

    Example
    -------
    >>> EAMSGD().plan(workers=4)["inner"]["momentum"]
    0.9
    """

    neighbours = "easgd downpour diloco"
    name = "eamsgd"
    lr: float = 0.01
    delta: float = 0.9

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("delta", 0 <= self.delta < 1, "in [0, 1)")

    @property
    def patterned(self) -> tuple[str, ...]:
        """None: ``worker.params`` look ahead by one rate for all tensors."""
        return ()

    def worker_optimizer(self, workers: int | None) -> InnerOptimizer:
        """Return the optimiser of the workers' own steps: Nesterov's momentum."""
        plain = super().worker_optimizer(workers)
        return dataclasses.replace(plain, optimizer="nesterov", momentum=self.delta)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Add to the plan that ``worker.params`` look ahead by δ."""
        return {**super().plan(workers), "lookahead": self.delta}
