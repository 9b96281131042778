"""Bounds of rules: what they say cannot happen does not, and they say enough."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.algorithms import find
from aiops.algorithms.optimizers import OPTIMIZERS
from aiops.kernels import Spans, build
from aiops.kernels.ranges import bounded_for
from aiops.kernels.rule import Rule
from tests.rows import each_row

BIG = {"w": 1e38}


def boxes(rule: Rule) -> dict[str, tuple[float, float]]:
    return {"w": (-1.0, 1.0)} | {name: (value, value) for name, value in rule.state.items()}


def numbers(rule: Rule, gradient: float, step: float) -> dict[str, tuple[float, float]]:
    found = {"g": (-gradient, gradient), "step": (0.0, step)}
    return found | dict.fromkeys(rule.scalars, (0.001, 1000.0))


@each_row(
    ("name", "settings"),
    [
        *((name, {}) for name in ("asgd", "sasgd", "fasgd", "exponential", "easgd", "diloco")),
        ("fasgd", {"relative": 0.01}),
    ],
)
def test_updates_of_any_gradients_are_proven(name: str, settings: dict[str, Any]) -> None:
    algorithm = find(name).make(settings)
    rule = algorithm.rule()
    limits = dict.fromkeys(boxes(rule), 1e38)
    given = numbers(rule, 1e18, algorithm.lr)
    assert bounded_for(rule, boxes(rule), given, limits, 1e38, updates=65_536)


@each_row("optimizer", sorted(OPTIMIZERS))
def test_optimisers_are_proven(optimizer: str) -> None:
    rule = find("asgd").make({"optimizer": optimizer}).rule()
    limits = dict.fromkeys(boxes(rule), 1e38)
    updates = 16 if optimizer == "adagrad" else 256  # whose sum of squares is without end
    given = numbers(rule, 1e18, 0.01)
    assert bounded_for(rule, boxes(rule), given, limits, 1e38, updates=updates)


@each_row("name", ["fasgd", "dcasgd", "gap-aware", "easgd", "diloco", *OPTIMIZERS])
def test_what_is_proven_holds(name: str) -> None:
    """Updates at the edge of what is proven stay within it, and a small limit is not proven."""
    algorithm = find("asgd").make({"optimizer": name}) if name in OPTIMIZERS else None
    rule = (algorithm or find(name).make({})).rule()
    draw, updates, proven = np.random.default_rng(1), 24, 0
    largest, rate = (0.1, 0.0001) if rule.reads else (10.0, 0.1)
    for limit in 10.0 ** np.arange(-1, 30):
        given = numbers(rule, largest, rate)
        limits = dict.fromkeys(boxes(rule), float(limit))
        if not bounded_for(rule, boxes(rule), given, limits, 1e38, updates=updates):
            continue
        proven += 1
        kernel = build(rule, np.float32, "numpy")
        w = draw.uniform(-1, 1, 500).astype(np.float32)
        state = [np.full(500, value, np.float32) for value in rule.state.values()]
        sent = draw.uniform(-1, 1, 500).astype(np.float32)
        sign = draw.choice([-1, 1], 500)
        for _ in range(updates):
            g = (sign * draw.uniform(0.9, 1, 500) * largest).astype(np.float32)
            spans = Spans.whole(500, rate, [float(draw.uniform(0.001, 10)) for _ in rule.scalars])
            kernel(spans, 1.0, w, g, w, state, [sent for _ in rule.reads])
            for array in (w, *state):
                assert np.abs(array).max() <= limit
        break
    assert proven, "no limit at all was proven"


def test_a_value_on_the_way_may_be_too_large_and_a_root_or_divisor_unknown() -> None:
    def square(w, g, step):  # type: ignore[no-untyped-def]
        return (w - step * (g * g) / 1e30,)

    def divided(w, g, step):  # type: ignore[no-untyped-def]
        return (w - step / g,)

    given = {"g": (-1e18, 1e18), "step": (0.0, 1.0)}
    for function in (square, divided):
        rule = Rule(function)
        given["g"] = (-1e25, 1e25)
        assert not bounded_for(rule, {"w": (0.0, 1.0)}, given, BIG, 1e38, updates=1)
