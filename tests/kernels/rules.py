"""Rules for the tests, and how two backends' results are compared.

Two are those of algorithms, so that their kernels are compiled once for all tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiops.algorithms.fasgd import fasgd
from aiops.algorithms.optimizers import sgd
from aiops.kernels import FIRST, FOLD, Kernel, Rule, Spans
from aiops.kernels import vocabulary as words
from aiops.kernels.trimmed_mean import trimmed_mean
from aiops.kernels.vocabulary import Array, Scalar, abs, maximum, minimum, sign, sqrt, where


def every_word(
    w: Array, g: Array, m: Array, k: Array, step: Scalar, decay: Scalar
) -> tuple[Array, ...]:
    """Nothing to train with: each word and operator, literals, locals, a reassigned step."""
    half = 1 / 2
    step = step * half
    clipped = minimum(maximum(g, -1.5), 1.0 + half)
    calm = words.absolute(m) <= abs(clipped) * 3
    m = where(calm, decay * m + (1.0 - decay) * clipped, -m)
    k = where(m != 0, where(k > m, k - m, k / m), where(k >= 2.0, m, -0.0))
    k = where(g == w, k, where(w < g, minimum(k, w), maximum(w, k)))
    return w - step * sign(m) * sqrt(abs(k)) / 1e-3, m, k


def swap(w: Array, g: Array, a: Array, b: Array, step: Scalar) -> tuple[Array, ...]:
    """Hands arrays on as each other's new values."""
    return step * g, b, w


def literal(w: Array, g: Array, m: Array, step: Scalar, gamma: Scalar) -> tuple[Array, ...]:
    """A literal beside a constant, which NumPy works out in the compute dtype."""
    m = gamma * m + (1.0 - gamma) * g
    return w - 0.1 * step * m, m


def adaptive(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    step: Scalar,
    unbias: Scalar,
    root: Scalar,
    beta: Scalar,
    eps: Scalar,
) -> tuple[Array, ...]:
    """Bias corrections that the host works out."""
    m = beta * m + (1.0 - beta) * g
    v = beta * v + (1.0 - beta) * (g * g)
    return w - step * (m * unbias) / (sqrt(v) * root + eps), m, v


def compensated(
    w: Array, g: Array, sent: Array, step: Scalar, strength: Scalar
) -> tuple[Array, ...]:
    return (w - step * (g + strength * g * g * (w - sent)),)


def everything(
    w: Array,
    g: Array,
    old: Array,
    seen: Array,
    m: Array,
    k: Array,
    step: Scalar,
    last: Scalar,
    share: Scalar,
    decay: Scalar,
) -> tuple[Array, ...]:
    """Two reads and two scalars, one of each reassigned, and choices made by scalars."""
    ending = last > 0.5
    share = where(ending, share, -share) + where(share == last, 0.1, step)
    old = where(last <= share, w - old, old)
    step = step * maximum(share, 0.25) * abs(last) + sign(share) * 1e-3
    m = where(ending, decay * m + g, m)
    k = where(last < 0, share, where(ending, seen, 0.3 * k))
    return w - step * m + sqrt(abs(share)) * old, m, k


def passed_on(
    w: Array, g: Array, sent: Array, m: Array, step: Scalar, more: Scalar
) -> tuple[Array, ...]:
    """Hands a read and a scalar on as new values."""
    return sent, more


SGD = Rule(sgd)
FASGD = Rule(
    fasgd,
    {"n": 0.0, "b": 0.0, "v": 1.0},
    {"gamma": 0.95, "one_minus_gamma": 0.05, "beta": 0.9, "one_minus_beta": 0.1, "eps": 1e-4},
    statistic="v",
)
EVERY_WORD = Rule(every_word, {"m": 0.0, "k": 0.25}, {"decay": 0.7}, statistic="m")
SWAP = Rule(swap, {"a": 1.0, "b": 2.0})
LITERAL = Rule(literal, {"m": 0.0}, {"gamma": 0.9})
ADAPTIVE = Rule(
    adaptive, {"m": 0.0, "v": 0.0}, {"beta": 0.9, "eps": 1e-8}, scalars=("unbias", "root")
)
COMPENSATED = Rule(compensated, constants={"strength": 0.04}, reads=("sent",))
EVERYTHING = Rule(
    everything, {"m": 0.0, "k": 0.25}, {"decay": 0.7}, "k", ("last", "share"), ("old", "seen")
)
PASSED_ON = Rule(passed_on, {"m": 0.0}, scalars=("more",), reads=("sent",))

ALL = {
    "sgd": SGD,
    "fasgd": FASGD,
    "every_word": EVERY_WORD,
    "swap": SWAP,
    "literal": LITERAL,
    "adaptive": ADAPTIVE,
    "compensated": COMPENSATED,
    "everything": EVERYTHING,
    "passed_on": PASSED_ON,
    "fold": FOLD,
    "first": FIRST,
    "trimmed_mean": trimmed_mean(5, 1),
}


def stored(state: np.ndarray) -> np.ndarray:
    """What is stored of a state's new values: subnormal ones become zeros of their sign."""
    return np.where(np.abs(state) < np.finfo(state.dtype).tiny, np.copysign(0, state), state)


def bits(array: Array) -> bytes:
    """The bytes of an array in which every NaN has become the same NaN."""
    plain = array.copy()
    plain[np.isnan(plain)] = np.nan
    return plain.tobytes()


def spans_over(
    random: np.random.Generator, size: int, rule: Rule | None = None
) -> tuple[Spans, int]:
    """Some tensors with gaps between them, their gradients in another order; the grad's size.

    Each has as many scalars as ``rule``, on both sides of 0, 0.5 and each other.
    """
    cuts = np.sort(random.choice(size + 1, size=min(8, size + 1) // 2 * 2, replace=False))
    lo, hi = cuts[0::2], cuts[1::2]
    order = random.permutation(len(lo))
    src = np.empty_like(lo)
    at = 1
    for row in order:
        src[row] = at
        at += hi[row] - lo[row] + int(random.integers(0, 3))
    step = random.uniform(0.001, 2.0, len(lo))
    if rule is None:
        return Spans(lo, hi, src, step), at
    more = random.choice([-1.5, -0.0, 0.1, 0.5, 0.7, 1.0], (len(lo), len(rule.scalars)))
    return Spans(lo, hi, src, step, more), at


def outcome(
    rule: Rule,
    kernel: Kernel,
    spans: Spans,
    factor: float,
    arrays: Sequence[Array],
    *,
    in_place: bool,
) -> list[bytes]:
    """Run a kernel on copies of (base, grad, target, *state, *reads); return the bits it left."""
    copies = [array.copy() for array in arrays]
    base, grad, target, *others = copies
    state, reads = others[: len(rule.state)], others[len(rule.state) :]
    sums = kernel(spans, factor, base, grad, base if in_place else target, state, reads)
    return [bits(array) for array in copies] + [sums.tobytes()]
