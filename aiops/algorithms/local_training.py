"""Provide the base of algorithms whose workers take local steps, and push their progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms import optimizers
from aiops.algorithms.base import Algorithm
from aiops.algorithms.schedules import Schedule
from aiops.errors import ConflictError, UsageError


@dataclass(frozen=True, kw_only=True)
class InnerOptimizer:
    """The optimiser of a worker's local steps, as `aiops.algorithms.optimizers.make` takes it.

    ``scale`` multiplies the learning rate; the other fields are settings of `optimizers`.
    """

    optimizer: str
    lr: float
    schedule: str = "constant"
    scale: float = 1.0
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    alpha: float = 0.99
    eps: float = 0.0
    weight_decay: float = 0.0

    @classmethod
    def own_steps(cls, algorithm: Algorithm, workers: int | None) -> InnerOptimizer:
        """Return plain SGD with an algorithm's own learning rate and schedule."""
        scale = float(workers or 1) if algorithm.scale_lr else 1.0
        return cls(optimizer="sgd", lr=algorithm.lr, schedule=algorithm.schedule, scale=scale)

    def plan(self) -> dict[str, Any]:
        """Return the fields as a map, for the client plan."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def refuse_clip(algorithm: Algorithm) -> None:
    """Refuse ``clip`` where workers push finished steps instead of gradients."""
    if algorithm.clip:
        raise ConflictError(
            f"{algorithm.name}: workers take the steps, so the server cannot clip gradients: clip"
            " them before you hand them to step()"
        )


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Algorithm):
    """An algorithm whose workers take local steps with an optimiser of their own.

    Settings
    --------
    local_steps : int
        H, steps between two pushes.
    inner : str
        The workers' optimiser, one of `aiops.algorithms.optimizers`; its state stays with the
        worker.
    inner_lr : float
        The learning rate of ``inner``.
    inner_schedule : str, default ``constant``
        How ``inner_lr`` changes over the worker's steps, as in `aiops.algorithms.schedules`.
    inner_momentum : float, default 0.9
        The momentum of ``momentum`` and ``nesterov``.
    inner_weight_decay : float, default 0
        The weight decay of ``inner``.
    """

    local_steps: int = 10
    inner: str = "sgd"
    inner_lr: float = 0.04
    inner_schedule: str = "constant"
    inner_momentum: float = 0.9
    inner_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("local_steps", self.local_steps >= 1, "1 or more")
        self.require("inner_lr", self.inner_lr > 0, "a positive learning rate")
        self.require("inner_momentum", 0 <= self.inner_momentum < 1, "in [0, 1)")
        self.require("inner_weight_decay", self.inner_weight_decay >= 0, "0 or more")
        try:
            Schedule(self.inner_schedule)
            optimizers.make(self.worker_optimizer())
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def worker_optimizer(self) -> InnerOptimizer:
        """Return the optimiser of the local steps."""
        return InnerOptimizer(
            optimizer=self.inner,
            lr=self.inner_lr,
            schedule=self.inner_schedule,
            momentum=self.inner_momentum,
            weight_decay=self.inner_weight_decay,
        )

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the plan of workers that train locally, and push start − end."""
        inner = self.worker_optimizer()
        return {
            **super().plan(workers),
            "linear": optimizers.make(inner).linear,
            "routine": "local",
            "push_every": self.local_steps,
            "inner": inner.plan(),
        }
