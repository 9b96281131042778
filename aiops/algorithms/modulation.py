"""How much a stale gradient counts: α(τ) = α · s(τ), one scalar per gradient.

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

They are computed on the host in double precision: `exp` and powers differ in their last bit
between NumPy and Numba, a scalar computed once does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol


class Constants(Protocol):
    """The settings that a modulation may use."""

    @property
    def rho(self) -> float:
        """Decay ρ of ``exponential``."""

    @property
    def a(self) -> float:
        """Exponent or slope a of ``polynomial`` and ``hinge``."""

    @property
    def b(self) -> float:
        """Staleness b up to which ``hinge`` leaves a gradient alone."""

    @property
    def n(self) -> int:
        """Staleness n up to which ``delay-adaptive`` leaves a gradient alone."""


MODULATIONS: Mapping[str, Callable[[int, Constants], float]] = {
    "none": lambda tau, c: 1.0,
    "inverse": lambda tau, c: 1.0 / tau if tau > 0 else 1.0,
    "inverse-plus-one": lambda tau, c: 1.0 / (tau + 1),
    "exponential": lambda tau, c: math.exp(-c.rho * tau),
    "polynomial": lambda tau, c: float((1.0 + tau) ** -c.a),
    "hinge": lambda tau, c: 1.0 if tau <= c.b else 1.0 / (c.a * (tau - c.b) + 1.0),
    "delay-adaptive": lambda tau, c: c.n / max(c.n, tau),
}
