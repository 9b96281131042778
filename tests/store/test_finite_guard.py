"""The search for a proof: the strongest that holds, and few attempts where none does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.kernels.rule import Rule
from aiops.store import finite_guard
from aiops.store.finite_guard import LIMIT, FiniteGuard
from tests.rows import each_row

STEPS = np.full(2, 0.1)


def sgd(w, g, step):  # type: ignore[no-untyped-def]
    return (w - step * g,)


class Proofs:
    """What stands for `bounded_for`: it holds for so many updates, learning rate and gradients."""

    def __init__(self, updates: int, step: float, gradient: float) -> None:
        self.updates, self.step, self.gradient = updates, step, gradient
        self.asked = 0

    def __call__(self, *arguments: Any, updates: int) -> bool:
        self.asked += 1
        numbers = arguments[2]
        step, gradient = numbers["step"][1], numbers["g"][1]
        return updates <= self.updates and step <= self.step and gradient <= self.gradient


def renewed(monkeypatch: pytest.MonkeyPatch, proofs: Proofs) -> FiniteGuard:
    monkeypatch.setattr(finite_guard, "bounded_for", proofs)
    guard = FiniteGuard(Rule(sgd), [(1e38, 1e38)])
    guard.renew(lambda: [{"w": (-1.0, 1.0)}], STEPS, None, lambda: 2.0)
    return guard


@each_row(
    ("updates", "step", "gradient", "found", "rate", "narrow", "asked"),
    [
        (65_536, 1e9, LIMIT, 65_536, 1024.0, False, 1),
        (300, 1e9, LIMIT, 256, 1024.0, False, 8),
        (65_536, 0.5, LIMIT, 65_536, 4.0, False, 3),
        (16, 0.1, LIMIT, 16, 1.0, False, 13),
        (65_536, 1e9, 9.0, 65_536, 1024.0, True, 3),
    ],
)
def test_the_strongest_proof_that_holds_is_used(
    updates: int,
    step: float,
    gradient: float,
    found: int,
    rate: float,
    narrow: bool,
    asked: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proofs = Proofs(updates, step, gradient)
    guard = renewed(monkeypatch, proofs)
    assert guard.narrow is narrow
    assert proofs.asked == asked
    largest = 8.0 if narrow else LIMIT
    assert guard.covers(rate * STEPS, None, largest)
    assert not guard.covers(1.01 * rate * STEPS, None, largest)
    assert not guard.covers(STEPS, None, 1.01 * largest)
    for _ in range(found - 1):
        assert guard.covers(STEPS, None, largest)
    assert not guard.covers(STEPS, None, largest)


def test_where_there_is_none_four_are_tried_and_then_none_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proofs = Proofs(0, 1.0, LIMIT)
    guard = renewed(monkeypatch, proofs)
    assert proofs.asked == 4
    assert not guard.covers(STEPS, None, 0.0)
    for _ in range(256):
        guard.renew(lambda: [{"w": (-1.0, 1.0)}], STEPS, None, lambda: 2.0)
    assert proofs.asked == 4
    guard.renew(lambda: [{"w": (-1.0, 1.0)}], STEPS, None, lambda: 2.0)
    assert proofs.asked == 8


def test_rates_that_take_turns_are_looked_at_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = renewed(monkeypatch, Proofs(65_536, 0.2, LIMIT))
    looked: list[float] = []
    has_rates = FiniteGuard._has_rates

    def look(self: FiniteGuard, steps: Any) -> bool:
        looked.append(float(steps[0]))
        return has_rates(self, steps)

    monkeypatch.setattr(FiniteGuard, "_has_rates", look)
    slow, large = 0.5 * STEPS, 3.0 * STEPS
    for _ in range(5):
        assert guard.covers(STEPS, None, LIMIT)
        assert guard.covers(slow, None, LIMIT)
    assert looked == [0.1, 0.05]
    assert not guard.covers(large, None, LIMIT)
    guard.renew(lambda: [{"w": (-1.0, 1.0)}], 2.0 * slow, None, lambda: 2.0)
    assert guard.covers(slow, None, LIMIT)
    assert looked[-1] == 0.05  # it was within the last proof, and may not be within this one
