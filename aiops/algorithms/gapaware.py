"""Gap-aware mitigation of staleness."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.errors import ConflictError
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar, absolute, sqrt


def gap_aware(
    w: Array,
    g: Array,
    sent: Array,
    m: Array,
    c: Array,
    step: Scalar,
    unbias: Scalar,
    peak: Scalar,
    mu: Scalar,
    beta: Scalar,
    one_minus_beta: Scalar,
    eps: Scalar,
) -> tuple[Array, ...]:
    """Apply eqs 4-8 to one tensor; ``unbias`` corrects the average C, which starts at 0."""
    gap = 1.0 + absolute(w - sent) / (peak * sqrt(c * unbias) + eps)
    m = mu * m + g / gap
    c = beta * c + one_minus_beta * (m * m)
    return w - step * m, m, c


@dataclass(frozen=True, kw_only=True)
class GapAware(Algorithm):
    """Gap-aware asynchronous SGD: divide a gradient by how far the parameters have moved.

    .. math::

        G = 1 + |θ − θ_sent| / (α_max · sqrt(C) + ε)
        m ← µ m + g / G
        C ← β C + (1−β) m²   (bias-corrected where it is used)
        θ ← θ − α · m

    The gap G measures staleness of each element as the distance that it has moved, in units of the
    usual step. A gradient that many updates made stale, but that moved little, is hardly penalised.

    Settings
    --------
    lr : float, default 0.01
        Learning rate α; also α_max, its largest.
    mu : float, default 0.9
        µ, the momentum.
    beta : float, default 0.999
        β, memory of the squared steps.
    eps : float, default 1e-8
        ε, added to the denominator of the gap.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples. By default ``schedule`` counts updates,
    those of all λ workers together: λ for each step of one worker.

    Source
    ------
    Barkai, Hakimi & Schuster 2020, *Gap-aware mitigation of gradient staleness*, eqs 4-8; the
    authors' code.

    Example
    -------
    >>> GapAware().rule().reads
    ('sent',)
    """

    family = "staleness-aware"
    neighbours = "dcasgd fasgd asgd"
    name = "gap-aware"
    lr: float = 0.01
    mu: float = 0.9
    beta: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("mu", 0 <= self.mu < 1, "in [0, 1)")
        self.require("beta", 0 <= self.beta < 1, "in [0, 1)")
        self.require("eps", self.eps > 0, "positive")

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse ``scale_lr``: α_max in the rule is ``lr``."""
        super().check(workers, relaxed)
        if self.scale_lr:
            raise ConflictError(
                "gap-aware: gaps are measured in steps of the largest learning rate, which is lr,"
                " so it cannot be scaled: set lr to the scaled rate"
            )

    @property
    def patterned(self) -> tuple[str, ...]:
        """The clipping alone: α_max in the rule is ``lr``, for all tensors."""
        return ("clip",)

    def rule(self) -> Rule:
        """Return the update (eqs 4-8)."""
        constants = {
            "peak": self.lr,
            "mu": self.mu,
            "beta": self.beta,
            "one_minus_beta": 1 - self.beta,
            "eps": self.eps,
        }
        state = {"m": 0.0, "c": 0.0}
        return Rule(gap_aware, state, constants, scalars=("unbias",), reads=("sent",))

    def scalars(self, update: int, staleness: float, gain: float) -> tuple[float, ...]:
        """Return 1/(1 − β^t), where t is the number of updates that C averages."""
        return (1 / (1 - self.beta ** (update - 1)) if update > 1 else 1.0,)
