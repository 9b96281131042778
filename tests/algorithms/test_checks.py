"""Parts of an algorithm that return what they must not are refused before a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.asgd import ASGD
from aiops.algorithms.checks import modulation_at
from aiops.errors import UsageError
from aiops.kernels.rule import Rule
from tests.rows import each_row


def nothing(tau: int) -> Any:
    """Return None, as a function without a return statement."""


WORKS_FOR_TWO = [1.0, 0.5]


@each_row(
    ("modulation", "words"),
    [
        (nothing, "mine: the modulation for a staleness of 0 is None; it must be a finite number"),
        (lambda tau: math.nan if tau > 1 else 1, "for a staleness of 2 is nan; it must be a fin"),
        (lambda tau: 1e400, "for a staleness of 0 is inf;"),
        (lambda tau: 10**400, "for a staleness of 0 is 1000.*; it must be a finite number"),
        (lambda tau: 1 - tau, "for a staleness of 2 is -1; it must be a finite number, 0 or more"),
        (lambda tau: [1.0], r"is \[1\.0\]; it must be"),
        (lambda tau: "1", "is '1'; it must be"),
        (lambda tau: 1 / tau, r"of 0 fails with ZeroDivisionError: .*test_checks\.py, line \d+\)"),
        (lambda tau: WORKS_FOR_TWO[tau], "of 2 fails with IndexError: list index out of range"),
        (lambda: 1.0, r"fails with TypeError: .*takes 0 positional arguments but 1 was given; it"),
        (lambda tau: 1.0 if tau < 999 else None, "for a staleness of 1000 is None"),
    ],
)
def test_a_modulation_that_is_no_number_is_refused(modulation: Any, words: str) -> None:
    class Mine(ASGD):
        name = "mine"

    Mine.modulation = staticmethod(modulation)  # type: ignore[method-assign,assignment]
    with pytest.raises(UsageError, match=words):
        Mine().check(workers=2)


@each_row("value", [0, 0.5, 3, True, np.float32(0.25), np.int64(2), 1e300])
def test_each_kind_of_number_is_one(value: Any) -> None:
    found = modulation_at("mine", lambda tau: value, 5)
    assert (found, type(found)) == (float(value), float)


@each_row("name", BUILT_IN)
def test_built_in_modulations_are_finite(name: str) -> None:
    algorithm = find(name)()
    for staleness in (*range(20), 10**6):
        assert modulation_at(name, algorithm.modulation, staleness) >= 0


@each_row(
    ("rule", "words"),
    [
        (lambda: None, "mine: rule() returned None, which is no Rule: end it with return Rule"),
        (lambda: math.sin, "mine: rule() returned <built-in function sin>, which is no Rule"),
        (lambda: Rule(power, steps=1), "rule() fails with TypeError: .*'steps'"),  # type: ignore
    ],
)
def test_a_rule_that_is_none_is_refused_before_a_run(rule: Any, words: str) -> None:
    class Mine(ASGD):
        name = "mine"

    Mine.rule = staticmethod(rule)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=words.replace("()", r"\(\)")):
        Mine().check(workers=2)


def power(w: Any, g: Any, step: Any) -> tuple[Any, ...]:
    return (w - step * g,)
