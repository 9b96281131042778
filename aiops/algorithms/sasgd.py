"""Staleness-aware asynchronous SGD, and its family."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.algorithms.modulation import MODULATIONS
from aiops.algorithms.optimised import Optimised
from aiops.errors import UsageError, nearest


@dataclass(frozen=True, kw_only=True)
class Modulated(Algorithm):
    """An algorithm whose learning rate depends on staleness: α(τ) = α·s(τ).

    Settings
    --------
    modulate : str, default ``inverse``
        s(τ): ``none``, ``inverse``, ``inverse-plus-one``, ``exponential`` (``rho``),
        ``polynomial`` (``a``), ``hinge`` (``a``, ``b``), ``delay-adaptive`` (``n``); see
        `aiops.algorithms.modulation`.
    rho, a, b, n : float, float, float, int; defaults 0.1, 0.5, 4, 4
        The constants of those.
    """

    modulate: str = "inverse"
    rho: float = 0.1
    a: float = 0.5
    b: float = 4.0
    n: int = 4

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.modulate not in MODULATIONS:
            hint = nearest(self.modulate, MODULATIONS)
            raise UsageError(f"{self.name}: no modulation is called {self.modulate!r}; {hint}")
        self.require("rho", self.rho >= 0, "0 or more")
        self.require("a", self.a >= 0, "0 or more")
        self.require("b", self.b >= 0, "0 or more")
        self.require("n", self.n >= 1, "1 or more")

    def modulation(self, staleness: int) -> float:
        """Return s(τ)."""
        return MODULATIONS[self.modulate](staleness, self)


@dataclass(frozen=True, kw_only=True)
class SASGD(Modulated, Optimised):
    """Staleness-aware asynchronous SGD: divide the learning rate by the staleness.

    .. math:: θ ← θ − α · s(τ) · g,   s(τ) = 1/τ if τ > 0, else 1

    τ = i − j is the number of updates since the parameters that the gradient was computed on.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α; 0.04 is what the FASGD paper found best for this rule on MNIST.
    modulate : str, default ``inverse``
        s(τ), with its constants ``rho``, ``a``, ``b`` and ``n``: see below.

    Source
    ------
    Zhang, Gupta, Lian & Liu 2015, *Staleness-aware async-SGD for distributed deep learning*, eq 1.

    Note
    ----
    FRED's own code and DynSGD divide by τ + 1: say ``--set modulate=inverse-plus-one``.

    Example
    -------
    >>> [SASGD().modulation(tau) for tau in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    family = "staleness-aware"
    neighbours = "asgd exponential fasgd softsync"
    name = "sasgd"
    lr: float = 0.04
