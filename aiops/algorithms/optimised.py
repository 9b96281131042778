"""Algorithms whose server takes its steps with an optimiser of the user's choice."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from aiops.algorithms import optimizers
from aiops.algorithms.base import Algorithm
from aiops.algorithms.optimizers import Optimizer
from aiops.errors import UsageError
from aiops.kernels.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Optimised(Algorithm):
    """An algorithm whose server may use any optimiser of `aiops.algorithms.optimizers`.

    The optimiser sees the plain gradient (the mean of those collected), and staleness modulates its
    *step*: scaling the gradient would cancel out in Adam. Plain SGD weights each gradient.

    Settings
    --------
    optimizer : str, default ``sgd``
        ``sgd``, ``momentum``, ``nesterov``, ``adagrad``, ``rmsprop``, ``adam`` or ``adamw``; equal
        to PyTorch's where no gradient is stale. (Momentum suffers from staleness: with many workers
        choose a smaller one, Mitliagkas et al. 2016.)
    momentum : float, default 0.9
        Of ``momentum`` and ``nesterov``.
    beta1, beta2 : float, defaults 0.9, 0.999
        Memories of ``adam`` and ``adamw``.
    alpha : float, default 0.99
        Memory of ``rmsprop``.
    eps : float, default 0
        Added to the root of ``adagrad``, ``rmsprop``, ``adam`` and ``adamw``; 0 means PyTorch's:
        1e-10 for ``adagrad``, 1e-8 for the others.
    weight_decay : float, default 0
        Decoupled in ``adamw``, else added to the gradient (L2).
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

    def rule(self) -> Rule:
        """Return the optimiser's."""
        return _optimizer(self).rule

    def scalars(self, update: int) -> tuple[float, ...]:
        """Return the optimiser's."""
        return _optimizer(self).scalars(update)

    @property
    def sparse(self) -> bool:
        """Return the optimiser's."""
        return _optimizer(self).sparse


@functools.lru_cache(maxsize=64)
def _optimizer(settings: Optimised) -> Optimizer:
    return optimizers.make(settings)
