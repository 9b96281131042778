"""Provide the base of algorithms whose workers take local steps, and push their progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms import optimizers
from aiops.algorithms.base import Algorithm
from aiops.algorithms.per_tensor import PerTensor
from aiops.algorithms.schedules import UPDATES, Schedule
from aiops.errors import ConflictError, UsageError


@dataclass(frozen=True, kw_only=True)
class InnerOptimizer:
    """The optimiser of a worker's local steps, as `aiops.algorithms.optimizers.make` takes it.

    ``scale`` multiplies the learning rate; ``clip`` bounds the norm of each gradient (0: nothing
    does); ``per_tensor`` has other values of ``lr``, ``weight_decay`` and ``clip`` for some
    tensors; with ``orthogonal`` the gradients of matrices are directions, and their rates are those
    of `aiops.model.matrices.direction_rate`; the other fields are settings of `optimizers`.
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
    clip: float = 0.0
    per_tensor: str = ""
    orthogonal: bool = False

    @classmethod
    def own_steps(cls, algorithm: Algorithm, workers: int | None) -> InnerOptimizer:
        """Return plain SGD with an algorithm's own learning rate and schedule."""
        scale = float(workers or 1) if algorithm.scale_lr else 1.0
        rates = str(PerTensor.of(algorithm.per_tensor).renamed({"lr": "lr"}))
        return cls(
            optimizer="sgd",
            lr=algorithm.lr,
            schedule=algorithm.schedule,
            scale=scale,
            per_tensor=rates,
        )

    @property
    def clips(self) -> bool:
        """True if gradients of some tensors at least are scaled down to a norm."""
        return PerTensor.of(self.per_tensor).clip(self.clip, []) is not None

    def plan(self) -> dict[str, Any]:
        """Return the fields as a map, for the client plan."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


_INNER = {"inner_lr": "lr", "inner_weight_decay": "weight_decay", "inner_clip": "clip"}
"""The settings of the workers' optimiser that may differ between tensors, as it calls them."""


def refuse_clip(algorithm: Algorithm) -> None:
    """Refuse ``clip`` where workers push finished steps instead of gradients."""
    if algorithm.clip:
        raise ConflictError(
            f"{algorithm.name}: workers take the steps, so the server cannot clip gradients: clip"
            " them before you hand them to step()"
        )


def refuse_other_schedules(algorithm: Algorithm) -> None:
    """Refuse schedules that workers, which follow them in their own steps, cannot follow."""
    if algorithm.schedule_unit != UPDATES or algorithm.schedule_start:
        raise ConflictError(
            f"{algorithm.name}: workers take steps of their own by the schedule, and count updates"
            " from 0: leave out schedule_unit and schedule_start"
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
    inner_beta1, inner_beta2 : float, defaults 0.9, 0.999
        The memories of the moments of ``adam`` and ``adamw``.
    inner_eps : float, default 0
        Added to the root of ``adagrad``, ``rmsprop``, ``adam`` and ``adamw``; 0: as ``eps``.
    inner_weight_decay : float, default 0
        The weight decay of ``inner``. For some tensors alone: ``--set
        inner_weight_decay=0@*norm*,*bias``.
    inner_clip : float, default 0
        A worker scales down a gradient of its own steps whose norm over all tensors is larger; 0:
        never. For some tensors alone: ``--set inner_clip=0.1@embed*``.
    inner_orthogonal : float, default 0
        Above 0 the workers' own steps take, in the place of a matrix's gradient, its momentum of
        this memory (0.7, say), orthogonalised, as `schedule-free` has it: ``inner_lr`` is √(64/m)
        of itself for a matrix whose longer side is m. 0: gradients.
    """

    lr_meaning = "a positive learning rate, the outer one (the workers' own is inner_lr)"
    local_steps: int = 10
    inner: str = "sgd"
    inner_lr: float = 0.04
    inner_schedule: str = "constant"
    inner_momentum: float = 0.9
    inner_beta1: float = 0.9
    inner_beta2: float = 0.999
    inner_eps: float = 0.0
    inner_clip: float = 0.0
    inner_weight_decay: float = 0.0
    inner_orthogonal: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("local_steps", self.local_steps >= 1, "1 or more")
        self.require("inner_lr", self.inner_lr > 0, "a positive learning rate")
        for name in ("inner_momentum", "inner_beta1", "inner_beta2", "inner_orthogonal"):
            self.require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        for name in ("inner_eps", "inner_weight_decay", "inner_clip"):
            self.require(name, getattr(self, name) >= 0, "0 or more")
        try:
            Schedule(self.inner_schedule)
            optimizers.make(self.worker_optimizer())
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    @property
    def rate_hint(self) -> str:
        """The two learning rates, and whose they are."""
        return (
            f"a learning rate: that of the workers' own steps (--set inner_lr=..., now"
            f" {self.inner_lr:g}), or the outer one, by which the server steps along their changes"
            f" (--set lr=..., now {self.lr:g})"
        )

    def cautions(self) -> tuple[str, ...]:
        """Warn of rates that look as if the inner and the outer one were mixed up, for example."""
        found, usual = super().cautions(), type(self).lr
        users = {f"inner_{name}": those for name, those in optimizers.USED_BY.items()}
        del users["inner_alpha"]  # of which there is no setting
        found += self.without_effect("inner", users)
        outer = (
            f"{self.name}: lr={self.lr:g} is the outer learning rate, by which the server steps"
            f" along the workers' changes (default {usual:g}); that of the workers' own steps is"
            f" inner_lr, now {self.inner_lr:g}"
        )
        if self.lr < usual / 10:
            found += (
                f"{outer}: with so small an outer rate the model hardly moves; if the workers' is"
                f" meant, give --set inner_lr={self.lr:g} and leave out lr",
            )
        elif self.lr > 2 * usual:
            found += (f"{outer}: an outer rate this large overshoots what the workers found",)
        if self.inner in optimizers.NORMALISING and self.inner_lr > optimizers.LARGE_RATE:
            found += (
                f"{self.name}: inner_lr={self.inner_lr:g} is the learning rate of the workers' own"
                f" {self.inner} steps (default {type(self).inner_lr:g}), each of which changes each"
                " parameter by about as much; the outer rate is lr",
            )
        return found

    def worker_optimizer(self) -> InnerOptimizer:
        """Return the optimiser of the local steps."""
        return InnerOptimizer(
            optimizer=self.inner,
            lr=self.inner_lr,
            schedule=self.inner_schedule,
            momentum=self.inner_momentum,
            beta1=self.inner_beta1,
            beta2=self.inner_beta2,
            eps=self.inner_eps,
            clip=self.inner_clip,
            weight_decay=self.inner_weight_decay,
            per_tensor=str(PerTensor.of(self.per_tensor).renamed(_INNER)),
            orthogonal=self.inner_orthogonal > 0,
        )

    @property
    def patterned(self) -> tuple[str, ...]:
        """Add the rate, the decay and the clipping of the workers' own steps."""
        return (*super().patterned, *_INNER)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the plan of workers that train locally, and push start − end."""
        directed = {"orthogonal": self.inner_orthogonal} if self.inner_orthogonal else {}
        return {
            **super().plan(workers),
            "routine": "local",
            "push_every": self.local_steps,
            "inner": self.worker_optimizer().plan(),
            **directed,
        }
