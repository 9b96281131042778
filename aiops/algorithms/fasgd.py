"""Faster asynchronous SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.errors import ConflictError
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import maximum, sqrt
from aiops.model.layout import Array

TINY = 1e-16
"""ε of a relative floor: v is never below 1e-8, the ε of Adam, so that 0 is not divided by 0."""


def fasgd(
    w: Array,
    g: Array,
    n: Array,
    b: Array,
    v: Array,
    step: np.floating[Any],
    gamma: np.floating[Any],
    one_minus_gamma: np.floating[Any],
    beta: np.floating[Any],
    one_minus_beta: np.floating[Any],
    eps: np.floating[Any],
) -> tuple[Array, Array, Array, Array]:
    """Apply equations 4-8 to one tensor; ``step`` is α/max(τ, least)."""
    n = gamma * n + one_minus_gamma * (g * g)
    b = gamma * b + one_minus_gamma * g
    v = beta * v + one_minus_beta * sqrt(maximum(n - b * b, 0.0) + eps)
    return w - step / v * g, n, b, v


def fasgd_relative(
    w: Array,
    g: Array,
    n: Array,
    b: Array,
    v: Array,
    step: np.floating[Any],
    gamma: np.floating[Any],
    one_minus_gamma: np.floating[Any],
    beta: np.floating[Any],
    one_minus_beta: np.floating[Any],
    relative: np.floating[Any],
    eps: np.floating[Any],
) -> tuple[Array, Array, Array, Array]:
    """Apply equations 4-8 with the floor ρ·n + ε; ``step`` is α/max(τ, least)."""
    n = gamma * n + one_minus_gamma * (g * g)
    b = gamma * b + one_minus_gamma * g
    v = beta * v + one_minus_beta * sqrt(maximum(n - b * b, 0.0) + (relative * n + eps))
    return w - step / v * g, n, b, v


@dataclass(frozen=True, kw_only=True)
class FASGD(Algorithm):
    """Faster asynchronous SGD: divide the learning rate by the gradient's standard deviation.

    .. math::

        n ← γ n + (1−γ) g²
        b ← γ b + (1−γ) g
        v ← β v + (1−β) sqrt(max(n − b², 0) + ε)
        θ ← θ − α / (v · max(τ, 1)) · g

    v is the moving average of each gradient element's standard deviation. Its mean v̄, over all
    parameters and per tensor, is part of every acknowledgement: bandwidth gates depend on it.

    Settings
    --------
    lr : float, default 0.005
        Learning rate α; the paper's choice on MNIST.
    gamma : float, default 0.95
        γ, memory of the moments n (starts at 0) and b (starts at 0).
    beta : float, default 0.9
        β, memory of v (starts at 1).
    eps : float, default 1e-4
        ε, which keeps v above sqrt(ε).
    relative : float, default 0
        ρ of a floor in the gradient's own scale: ρ·n takes the place of ε, so that v is at least
        sqrt(ρ) times the root of the element's mean square, whatever its scale. It wants a tenth
        of the usual ``lr``. 0: the paper's ε.
    least : int, default 1
        A staleness τ below this counts as this. Behind a gate staleness varies widely, and the few
        fresh gradients would take steps many times as long as the others; then choose about half of
        the mean staleness.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples. By default ``schedule`` counts updates,
    those of all λ workers together: λ for each step of one worker. Behind a gate an update may be
    of the sum of several mini-batches.

    Source
    ------
    Odena, *Faster Asynchronous SGD*, eqs 4-8; defaults after Graves 2013, on which it builds.

    Note
    ----
    The author's draft prints the reciprocal in eq 6, and early code of his averages \\|g\\|. Both
    contradict the text ("dividing the learning rate by the standard deviation"), the gate of eq 9
    and the results; this follows the equations above.

    Where the gradients' deviation is far below sqrt(ε), v is sqrt(ε) everywhere, and the rule is
    that of `sasgd` with the learning rate α/sqrt(ε). So it is on MNIST after about 1,000 updates,
    and on transformers from the start. The server warns of it, once; ``relative`` avoids it.

    In a sparse table the moments of a row move when the row is pushed, and do not decay while it
    is not: n, b and v then describe the gradients of that row, however rare they are.

    Example
    -------
    >>> [FASGD().modulation(tau) for tau in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    >>> [FASGD(least=2).modulation(tau) for tau in (0, 1, 4)]
    [0.5, 0.5, 0.25]
    """

    family = "staleness-aware"
    neighbours = "sasgd exponential gap-aware asgd"
    name = "fasgd"
    lr: float = 0.005
    gamma: float = 0.95
    beta: float = 0.9
    eps: float = 1e-4
    relative: float = 0.0
    least: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("gamma", 0 <= self.gamma < 1, "in [0, 1)")
        self.require("beta", 0 <= self.beta < 1, "in [0, 1)")
        self.require("eps", self.eps > 0, "positive")
        self.require("relative", 0 <= self.relative <= 1, "from 0 (ε is the floor) to 1")
        if self.relative and self.eps != type(self).eps:
            raise ConflictError(
                "fasgd: with relative the floor of v goes by the gradient's own scale, and eps"
                " is not used: leave one of them out"
            )
        self.require("least", self.least >= 1, "1 or more")

    def rule(self) -> Rule:
        """Return equations 4-8."""
        floor = {"relative": self.relative, "eps": TINY} if self.relative else {"eps": self.eps}
        constants = {
            "gamma": self.gamma,
            "one_minus_gamma": 1 - self.gamma,
            "beta": self.beta,
            "one_minus_beta": 1 - self.beta,
            **floor,
        }
        return Rule(
            fasgd_relative if self.relative else fasgd,
            {"n": 0.0, "b": 0.0, "v": 1.0},
            constants,
            statistic="v",
            statistic_floor=math.sqrt(floor["eps"]),  # v of gradients that are all equal, or 0
        )

    @property
    def sparse(self) -> bool:
        """True: in rows that are not pushed the moments stand still, as the Note explains."""
        return True

    @property
    def second_moments(self) -> bool:
        """True: v is of that kind."""
        return True

    def at_floor(self, vbar: float) -> str:
        """Return the warning that v̄ lies on its floor, and the rule is that of another policy."""
        floor = self.rule().statistic_floor
        text = f"v̄ is {vbar:.3g}, within 10 % of its floor sqrt(eps) = {floor:.3g}"
        if self.relative:
            return f"{text}: the gradients are all but 0"
        return (
            f"{text}: the gradients deviate less than that, so that from here on fasgd is sasgd at"
            f" the learning rate lr/sqrt(eps) = {self.lr / floor:.3g}, and a gate that goes by v̄ is"
            " a coin; for steps that go by the deviation, whatever its scale, give"
            f" --set relative=0.01 with a smaller rate (--lr {self.lr * 0.4:.2g})"
        )

    def modulation(self, staleness: int) -> float:
        """Return 1/max(τ, least)."""
        return 1.0 / max(staleness, self.least)
