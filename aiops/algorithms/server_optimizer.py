"""Provide the base of algorithms whose server steps with an optimiser of the user's choice."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from aiops.algorithms import optimizers
from aiops.algorithms.base import Algorithm
from aiops.algorithms.optimizers import Optimizer
from aiops.errors import UsageError
from aiops.kernels.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Optimised(Algorithm):
    """An algorithm whose server may use any optimiser of `aiops.algorithms.optimizers`.

    The optimiser gets the gradient, or the mean of those collected, and staleness modulates its
    *step*: a factor of the gradient would cancel out in Adam. In plain SGD it is the same.

    Settings
    --------
    optimizer : str, default ``sgd``
        ``sgd``, ``momentum``, ``nesterov``, ``adagrad``, ``rmsprop``, ``adam`` or ``adamw``; equal
        to PyTorch's where no gradient is stale. (Momentum suffers from staleness: with many workers
        choose a smaller one, Mitliagkas et al. 2016.)
    momentum : float, default 0.9
        The momentum of ``momentum`` and ``nesterov``.
    beta1, beta2 : float, defaults 0.9, 0.999
        The memories of the moments of ``adam`` and ``adamw``.
    alpha : float, default 0.99
        The memory of ``rmsprop``.
    eps : float, default 0
        Added to the root of ``adagrad``, ``rmsprop``, ``adam`` and ``adamw``; 0 means PyTorch's:
        1e-10 for ``adagrad``, 1e-8 for the others.
    weight_decay : float, default 0
        Decoupled in ``adamw``, else added to the gradient (L2). For some tensors alone:
        ``--set weight_decay=0@*norm*,*bias``.
    """

    optimizer: str = "sgd"
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    alpha: float = 0.99
    eps: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for name in ("momentum", "beta1", "beta2", "alpha"):
            self.require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        self.require("eps", self.eps >= 0, "0 (the optimiser's own) or more")
        self.require("weight_decay", self.weight_decay >= 0, "0 or more")
        try:
            optimizers.make(self)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    @property
    def second_moments(self) -> bool:
        """True if the optimiser has them, and the rule is its own."""
        own = self.rule().function is _optimizer(self).rule.function
        return own and self.optimizer in optimizers.SECOND_MOMENTS

    def cautions(self) -> tuple[str, ...]:
        """Warn of a rate that is too large for the optimiser, and of settings that it has not."""
        found = super().cautions()
        if self.rule().function is _optimizer(self).rule.function:
            found += self.without_effect("optimizer", optimizers.USED_BY)
        if self.optimizer in optimizers.NORMALISING and self.lr > optimizers.LARGE_RATE:
            found += (
                f"lr={self.lr:g} is a rate for plain SGD: a step of {self.optimizer} changes each"
                f" parameter by about lr, however small its gradient; --lr 0.001 is usual, and less"
                " with many workers",
            )
        return found

    def rule(self) -> Rule:
        """Return the rule of the optimiser."""
        return _optimizer(self).rule

    def scalars(self, update: int, staleness: float, gain: float) -> tuple[float, ...]:
        """Return the scalars of the optimiser, such as Adam's bias corrections."""
        return _optimizer(self).scalars(update)

    @property
    def patterned(self) -> tuple[str, ...]:
        """Add the weight decay."""
        return (*super().patterned, "weight_decay")

    def tensor_scalars(self, tensor: str, shape: Sequence[int] = ()) -> tuple[float, ...]:
        """Return the decay of a tensor, if tensors differ in it."""
        return _optimizer(self).tensor_scalars(tensor)

    @property
    def sparse(self) -> bool:
        """True, unless a derived class has another rule: in tables the optimisers are lazy."""
        return self.rule().function is _optimizer(self).rule.function


@functools.lru_cache(maxsize=64)
def _optimizer(settings: Optimised) -> Optimizer:
    return optimizers.make(settings)
