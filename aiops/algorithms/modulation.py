"""Modulate the learning rate by staleness: α(τ) = α · s(τ), one scalar per gradient.

======================  ===========================  =============================================
name                    s(τ)                         source
======================  ===========================  =============================================
``none``                1                            Downpour SGD, Dean et al. 2012
``inverse``             1/τ if τ > 0, else 1         Zhang et al. 2015, eq 1 (SASGD)
``inverse-plus-one``    1/(τ+1)                      DynSGD, Jiang et al. 2017; FRED's code
``exponential``         exp(−ρτ)                     Chan & Lane 2014
``polynomial``          (1+τ)^(−a)                   FedAsync, Xie et al. 2019
``hinge``               1 if τ ≤ b else              FedAsync, Xie et al. 2019
                        1/(a(τ−b)+1)
``delay-adaptive``      n/max(n, τ)                  Mishchenko et al. 2022
======================  ===========================  =============================================

s(τ) is computed on the host in double precision, because the last bit of `exp` and powers differs
between NumPy and Numba.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.errors import UsageError, nearest


@dataclass(frozen=True, kw_only=True)
class Modulated(Algorithm):
    """An algorithm whose learning rate depends on staleness: α(τ) = α·s(τ).

    Settings
    --------
    modulate : str, default ``inverse``
        s(τ): ``none``, ``inverse``, ``inverse-plus-one``, ``exponential`` (``rho``), ``polynomial``
        (``a``), ``hinge`` (``a``, ``b``), ``delay-adaptive`` (``n``), as in the table of
        `aiops.algorithms.modulation`.
    rho, a, b, n : float, float, float, int; defaults 0.1, 0.5, 4, 4
        The constants ρ, a, b and n of those.
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

    def cautions(self) -> tuple[str, ...]:
        """Warn of constants that s(τ) does not have."""
        own = type(self).modulation is Modulated.modulation
        return super().cautions() + (self.without_effect("modulate", _CONSTANTS) if own else ())

    def modulation(self, staleness: int) -> float:
        """Return s(τ)."""
        return MODULATIONS[self.modulate](staleness, self)


MODULATIONS: Mapping[str, Callable[[int, Modulated], float]] = {
    "none": lambda tau, c: 1.0,
    "inverse": lambda tau, c: 1.0 / tau if tau > 0 else 1.0,
    "inverse-plus-one": lambda tau, c: 1.0 / (tau + 1),
    "exponential": lambda tau, c: math.exp(-c.rho * tau),
    "polynomial": lambda tau, c: float((1.0 + tau) ** -c.a),
    "hinge": lambda tau, c: 1.0 if tau <= c.b else 1.0 / (c.a * (tau - c.b) + 1.0),
    "delay-adaptive": lambda tau, c: c.n / max(c.n, tau),
}
"""s(τ) of each modulation, of the staleness τ and the constants."""

_CONSTANTS = {"rho": ("exponential",), "a": ("polynomial", "hinge"), "b": ("hinge",)}
"""The modulations that have a constant; ``n`` is that of another setting in derived classes."""
