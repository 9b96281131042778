"""Elastic averaging SGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiops.algorithms import optimizers
from aiops.algorithms.base import Algorithm
from aiops.algorithms.local import Inner, refuse_clip
from aiops.errors import ConflictError
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar


def elastic(w: Array, g: Array, step: Scalar) -> tuple[Array, ...]:
    """The centre's move: ``g`` is the worker's position, ``step`` the moving rate."""
    return (w + step * (g - w),)


@dataclass(frozen=True, kw_only=True)
class EASGD(Algorithm):
    """Elastic averaging SGD: workers explore by themselves, tied to a centre by a spring.

    .. math::

        worker:  x ← x − α · g;   every p steps  d = κ · (x − θ),  x ← x − d
        server:  θ ← θ + d

    κ = ρα is the moving rate. θ follows the workers' average, and is what is to be evaluated.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α of the workers' own steps; ``schedule`` and ``scale_lr`` are for it.
    p : int, default 10
        Steps between two elastic moves (the communication period).
    kappa : float, default 0
        κ, up to 0.95; 0 means β/λ with the paper's β = 0.9 (and ``--workers`` must be said).

    Source
    ------
    Zhang, Choromanska & LeCun 2015, *Deep learning with elastic averaging SGD*, algorithm 1.

    Note
    ----
    The worker pushes x, the server moves and answers with the new θ', and the worker takes the
    same d from it: d = κ/(1−κ) · (x − θ'). That is one round trip, and no other worker can come
    in between; the paper's algorithm reads and writes the centre separately.

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

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse a moving rate that cannot be known."""
        super().check(workers, relaxed)
        if not self.kappa and workers is None:
            raise ConflictError(
                f"{self.name}: the moving rate is 0.9 divided by the number of workers: say how"
                " many with --workers N, or give --set kappa=..."
            )

    def moving_rate(self, workers: int | None) -> float:
        """Return κ."""
        return self.kappa or min(0.9 / (workers or 1), 0.9)

    def rule(self) -> Rule:
        """Return the centre's move."""
        return Rule(elastic)

    def rates(self, workers: int | None) -> Callable[[int], float]:
        """Return κ."""
        rate = self.moving_rate(workers)
        return lambda update: rate

    def worker_optimizer(self, workers: int | None) -> Inner:
        """Return what workers step with."""
        return Inner.own_steps(self, workers)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Tell workers to explore, and when to move."""
        inner = self.worker_optimizer(workers)
        return {
            **super().plan(workers),
            "linear": optimizers.make(inner).linear,
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

    Source
    ------
    Zhang, Choromanska & LeCun 2015, *Deep learning with elastic averaging SGD*, algorithm 2.

    Note
    ----
    What the training loop sees is x + δv, where gradients are wanted; it is x that the spring is
    tied to. (As PyTorch does, v is kept as −α times a sum of gradients: where a schedule changes α,
    v changes with it.)

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

    def worker_optimizer(self, workers: int | None) -> Inner:
        """Return what workers step with."""
        plain = super().worker_optimizer(workers)
        return dataclasses.replace(plain, optimizer="nesterov", momentum=self.delta)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Tell workers that what they train is ahead of where they are."""
        return {**super().plan(workers), "lookahead": self.delta}
