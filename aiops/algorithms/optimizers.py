"""Define the optimisers: the rules with which a server steps by a gradient.

With g ← g + δ·θ first (δ is ``weight_decay``; not in adamw), and all states starting at 0:

============  =====================================================  ============================
name          equations                                              source
============  =====================================================  ============================
``sgd``       θ ← θ − α·g                                            Robbins & Monro 1951
``momentum``  m ← µ·m + g;  θ ← θ − α·m                              Polyak 1964
``nesterov``  m ← µ·m + g;  θ ← θ − α·(g + µ·m)                      Nesterov 1983; Sutskever et
                                                                     al. 2013
``adagrad``   s ← s + g²;  θ ← θ − α·g/(√s + ε)                      Duchi et al. 2011
``rmsprop``   v ← ρ·v + (1−ρ)·g²;  θ ← θ − α·g/(√v + ε)              Tieleman & Hinton 2012
``adam``      m ← β₁·m + (1−β₁)·g;  v ← β₂·v + (1−β₂)·g²;            Kingma & Ba 2015, alg 1
              θ ← θ − α·m̂/(√v̂ + ε), where
              m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ)
``adamw``     as adam, but                                           Loshchilov & Hutter 2019,
              θ ← θ·(1 − α·δ) − α·m̂/(√v̂ + ε)                         alg 2
============  =====================================================  ============================

They are those of ``torch.optim`` with the same settings. The step α is the learning rate times the
schedule times the modulation for staleness: the *step* is modulated and never the gradient, since a
factor of the gradient cancels out in adagrad, rmsprop and adam. t counts the updates of the tensor,
from 1. The powers βᵗ are computed on the host in double precision, because their last bit differs
between NumPy and Numba.

**In sparse tables** every optimiser is lazy: a push updates the parameters and the states of the
rows that it names, by the equations above with the sum of each row's gradients, and all other rows
stand still. Their moments do not decay, and ``weight_decay`` shrinks a row once for each push that
names it. t counts the pushes applied to the table, and not those that named the row. So adam is
``torch.optim.SparseAdam`` but for the place of ε, which that adds to √v instead of √v̂
(TensorFlow's ``LazyAdam`` and ElasticDL's Adam on embeddings count t the same way); momentum and
rmsprop are TensorFlow's sparse ``ApplyMomentum`` and ``ApplyRMSProp``; sgd and adagrad are those of
``torch.optim`` for sparse gradients. A row whose first push comes late starts with moments of 0 but
a correction for many updates: its first step with adam is up to (1−β₁)/√(1−β₂) = 3.2 times α, as in
those libraries.

Note
----
Momentum and staleness add up: asynchrony alone acts like momentum (Mitliagkas et al. 2016), so µ
and β₁ that suit one worker are too large for many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from aiops.algorithms.per_tensor import PerTensor
from aiops.errors import UsageError, nearest
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Scalar, sqrt
from aiops.model.layout import Array

__all__ = ["OPTIMIZERS", "Optimizer", "OptimizerSettings", "make", "sgd"]


class OptimizerSettings(Protocol):
    """The settings of optimisers; each ignores those that its equations do not contain."""

    @property
    def optimizer(self) -> str:
        """The name of one of `OPTIMIZERS`."""

    @property
    def momentum(self) -> float:
        """Memory µ of momentum and nesterov, in [0, 1); usually 0.9."""

    @property
    def beta1(self) -> float:
        """Memory β₁ of adam's and adamw's first moment, in [0, 1); usually 0.9."""

    @property
    def beta2(self) -> float:
        """Memory β₂ of adam's and adamw's second moment, in [0, 1); usually 0.999."""

    @property
    def alpha(self) -> float:
        """Memory ρ of rmsprop, in [0, 1) (``alpha`` is torch's name for it); usually 0.99."""

    @property
    def eps(self) -> float:
        """ε ≥ 0, added to the root; 0: the optimiser's own (adagrad 1e-10, the others 1e-8)."""

    @property
    def weight_decay(self) -> float:
        """δ ≥ 0: an L2 penalty on the loss, δ/2·‖θ‖²; in adamw decoupled from it."""

    @property
    def per_tensor(self) -> str:
        """Other values of ``weight_decay`` for some tensors (`aiops.algorithms.per_tensor`)."""


@dataclass(frozen=True)
class Optimizer:
    """An optimiser with its settings.

    Attributes
    ----------
    name
        One of `OPTIMIZERS`.
    rule
        The update.
    scalars
        Returns the first of ``rule.scalars`` for the number t ≥ 1 of a tensor's update.
    tensor_scalars
        Returns the others for the name of a tensor: its decay, if the tensors differ in it.
    """

    name: str
    rule: Rule
    scalars: Callable[[int], tuple[float, ...]]
    tensor_scalars: Callable[[str], tuple[float, ...]]


def make(settings: OptimizerSettings) -> Optimizer:
    """Return the optimiser that the settings name.

    Raises
    ------
    UsageError
        When no optimiser has that name (it names the nearest), or when a setting is out of its
        range.

    Example
    -------
    >>> from types import SimpleNamespace
    >>> settings = SimpleNamespace(optimizer="adam", momentum=0.9, beta1=0.9, beta2=0.999,
    ...                            alpha=0.99, eps=0.0, weight_decay=0.0, per_tensor="")
    >>> adam = make(settings)
    >>> adam.rule.state, adam.rule.scalars
    ({'m': 0.0, 'v': 0.0}, ('unbias', 'root'))
    >>> [round(scalar, 3) for scalar in adam.scalars(1)]
    [10.0, 31.623]
    """
    name = settings.optimizer
    if name not in OPTIMIZERS:
        raise UsageError(f"no optimizer is called {name!r}; {nearest(name, OPTIMIZERS)}")
    for setting in ("momentum", "beta1", "beta2", "alpha"):
        value = getattr(settings, setting)
        if not 0 <= value < 1:
            raise UsageError(f"optimizer {name}: {setting} must be in [0, 1), not {value!r}")
    for setting in ("eps", "weight_decay"):
        value = getattr(settings, setting)
        if not 0 <= value < math.inf:
            raise UsageError(f"optimizer {name}: {setting} must be 0 or more, not {value!r}")
    return OPTIMIZERS[name](settings)


def sgd(w: Array, g: Array, step: Scalar) -> tuple[Array]:
    """Plain stochastic gradient descent: θ ← θ − step · g."""
    return (w - step * g,)


def decayed_sgd(w: Array, g: Array, step: Scalar, decay: Scalar) -> tuple[Array]:
    """Plain stochastic gradient descent with weight decay."""
    return (w - step * (g + decay * w),)


def momentum(
    w: Array, g: Array, m: Array, step: Scalar, decay: Scalar, mu: Scalar
) -> tuple[Array, Array]:
    """Gradient descent with a heavy ball (Polyak), undamped."""
    m = mu * m + (g + decay * w)
    return w - step * m, m


def nesterov(
    w: Array, g: Array, m: Array, step: Scalar, decay: Scalar, mu: Scalar
) -> tuple[Array, Array]:
    """Momentum whose gradient is taken one step ahead (Nesterov)."""
    g = g + decay * w
    m = mu * m + g
    return w - step * (g + mu * m), m


def adagrad(
    w: Array, g: Array, s: Array, step: Scalar, decay: Scalar, eps: Scalar
) -> tuple[Array, Array]:
    """Divide by the root of the sum of all squared gradients."""
    g = g + decay * w
    s = s + g * g
    return w - step * g / (sqrt(s) + eps), s


def rmsprop(
    w: Array,
    g: Array,
    v: Array,
    step: Scalar,
    decay: Scalar,
    rho: Scalar,
    one_minus_rho: Scalar,
    eps: Scalar,
) -> tuple[Array, Array]:
    """Divide by the root of the moving average of squared gradients."""
    g = g + decay * w
    v = rho * v + one_minus_rho * (g * g)
    return w - step * g / (sqrt(v) + eps), v


def adam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    step: Scalar,
    unbias: Scalar,
    root: Scalar,
    decay: Scalar,
    beta1: Scalar,
    one_minus_beta1: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> tuple[Array, Array, Array]:
    """Adam; ``unbias`` is 1/(1−β₁ᵗ), ``root`` is 1/√(1−β₂ᵗ)."""
    g = g + decay * w
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * (g * g)
    return w - step * (unbias * m / (root * sqrt(v) + eps)), m, v


def adamw(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    step: Scalar,
    unbias: Scalar,
    root: Scalar,
    decay: Scalar,
    beta1: Scalar,
    one_minus_beta1: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> tuple[Array, Array, Array]:
    """Adam with decoupled decay. (1 − step·decay as a factor would be rounded too coarsely.)"""
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * (g * g)
    return w - step * (unbias * m / (root * sqrt(v) + eps) + decay * w), m, v


def _none(t: int) -> tuple[float, ...]:
    return ()


def _made(
    settings: OptimizerSettings,
    function: Callable[..., tuple[Array, ...]],
    state: Mapping[str, float],
    constants: Mapping[str, float],
    *,
    scalars: tuple[str, ...] = (),
    values: Callable[[int], tuple[float, ...]] = _none,
) -> Optimizer:
    """Make an optimiser; the decay is a constant, or the last scalar if tensors differ in it."""
    decay, others = settings.weight_decay, PerTensor.of(settings.per_tensor)
    if not others.has("weight_decay"):
        rule = Rule(function, state, {"decay": decay, **constants}, scalars=scalars)
        return Optimizer(settings.optimizer, rule, values, lambda tensor: ())
    rule = Rule(function, state, constants, scalars=(*scalars, "decay"))
    return Optimizer(
        *(settings.optimizer, rule, values),
        lambda tensor: (others.value("weight_decay", tensor, decay),),
    )


def _sgd(settings: OptimizerSettings) -> Optimizer:
    if settings.weight_decay or PerTensor.of(settings.per_tensor).has("weight_decay"):
        return _made(settings, decayed_sgd, {}, {})
    return Optimizer("sgd", Rule(sgd), _none, lambda tensor: ())


def _momentum(settings: OptimizerSettings) -> Optimizer:
    return _made(settings, momentum, {"m": 0.0}, {"mu": settings.momentum})


def _nesterov(settings: OptimizerSettings) -> Optimizer:
    return _made(settings, nesterov, {"m": 0.0}, {"mu": settings.momentum})


def _adagrad(settings: OptimizerSettings) -> Optimizer:
    return _made(settings, adagrad, {"s": 0.0}, {"eps": settings.eps or 1e-10})


def _rmsprop(settings: OptimizerSettings) -> Optimizer:
    constants = {
        "rho": settings.alpha,
        "one_minus_rho": 1 - settings.alpha,
        "eps": settings.eps or 1e-8,
    }
    return _made(settings, rmsprop, {"v": 0.0}, constants)


def _of_moments(
    function: Callable[..., tuple[Array, ...]], settings: OptimizerSettings
) -> Optimizer:
    beta1, beta2 = settings.beta1, settings.beta2
    constants = {
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "eps": settings.eps or 1e-8,
    }

    def corrections(t: int) -> tuple[float, ...]:
        return 1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)

    state, names = {"m": 0.0, "v": 0.0}, ("unbias", "root")
    return _made(settings, function, state, constants, scalars=names, values=corrections)


OPTIMIZERS: Mapping[str, Callable[[OptimizerSettings], Optimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "adam": partial(_of_moments, adam),
    "adamw": partial(_of_moments, adamw),
}
"""The function that makes each optimiser from its settings, which `make` has checked."""

NORMALISING: frozenset[str] = frozenset(("rmsprop", "adam", "adamw"))
"""Those whose steps are about as long as the learning rate, whatever the gradient's scale."""

SECOND_MOMENTS: frozenset[str] = NORMALISING | {"adagrad"}
"""Those that divide by roots of mean squares."""

USED_BY = {
    "momentum": ("momentum", "nesterov"),
    "beta1": ("adam", "adamw"),
    "beta2": ("adam", "adamw"),
    "alpha": ("rmsprop",),
    "eps": ("adagrad", "rmsprop", "adam", "adamw"),
}
"""The optimisers that use a setting, by the setting's name."""

LARGE_RATE = 0.03
"""A learning rate above this is unlikely to be meant for one of `NORMALISING`."""
