"""Delay-compensated asynchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar, sqrt


def constant(w: Array, g: Array, sent: Array, step: Scalar, lam: Scalar) -> tuple[Array, ...]:
    """One update with a constant λ."""
    return (w - step * (g + lam * g * g * (w - sent)),)


def adaptive(
    w: Array,
    g: Array,
    sent: Array,
    ms: Array,
    step: Scalar,
    lam: Scalar,
    m: Scalar,
    one_minus_m: Scalar,
    eps: Scalar,
) -> tuple[Array, ...]:
    """One update with λ over the root of the gradients' mean square."""
    ms = m * ms + one_minus_m * (g * g)
    return w - step * (g + lam / sqrt(ms + eps) * g * g * (w - sent)), ms


@dataclass(frozen=True, kw_only=True)
class DCASGD(Algorithm):
    """Delay-compensated asynchronous SGD: correct a stale gradient to first order.

    .. math::

        θ ← θ − α · (g + λ_t · g ⊙ g ⊙ (θ − θ_sent))
        constant:  λ_t = λ;    adaptive:  M ← m M + (1−m) g²,  λ_t = λ / sqrt(M + ε)

    θ_sent are the parameters that the gradient's worker was sent. g ⊙ g stands for the diagonal of
    the Hessian, so the correction is the first term of a Taylor series. Workers act as in `ASGD`.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α.
    adaptive : bool, default True
        Whether λ_t is divided by the root of the mean square M of each element.
    lam : float, default 2
        λ, the paper's for the adaptive form; its constant one has 0.04. With 0 this is `ASGD`.
    m : float, default 0.95
        Memory of the mean square M (starts at 0).
    eps : float, default 1e-7
        ε, added to M under the root.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples. By default ``schedule`` counts updates,
    those of all λ workers together: λ for each step of one worker.

    Source
    ------
    Zheng et al. 2017, *Asynchronous stochastic gradient descent with delay compensation*, eq 10,
    algorithm 2 and section 6; the authors' code.

    Note
    ----
    The server keeps the version that each worker computes on. Memory grows with the number of
    distinct versions, at most one per worker.

    Example
    -------
    >>> DCASGD(adaptive=False, lam=0.04).rule().constants
    {'lam': 0.04}
    """

    family = "staleness-aware"
    neighbours = "asgd gap-aware fasgd"
    accepts_sums = False  # a step contains the square of its gradient
    name = "dcasgd"
    lr: float = 0.04
    adaptive: bool = True
    lam: float = 2.0
    m: float = 0.95
    eps: float = 1e-7

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("lam", self.lam >= 0, "0 or more")
        self.require("m", 0 <= self.m < 1, "in [0, 1)")
        self.require("eps", self.eps > 0, "positive")

    def rule(self) -> Rule:
        """Return the compensated update (eq 10)."""
        if not self.adaptive:
            return Rule(constant, constants={"lam": self.lam}, reads=("sent",))
        constants = {
            "lam": self.lam,
            "m": self.m,
            "one_minus_m": 1 - self.m,
            "eps": self.eps,
        }
        return Rule(adaptive, {"ms": 0.0}, constants, reads=("sent",))
