"""Parts of an algorithm that return what they must not are refused before a run."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.asgd import ASGD
from aiops.algorithms.base import Immediate, Policy
from aiops.algorithms.checks import failed_part, modulation_at
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


@each_row("value", [0, 0.5, 3, True, np.float32(0.25), np.int64(2), 1e300, np.array(0.5)])
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


@each_row(
    ("method", "made", "words"),
    [
        ("policy", lambda workers: None, "mine: policy() returned None, which is no Policy: end"),
        ("policy", lambda workers: 1 / 0, "policy() fails with ZeroDivisionError: .*; it must ret"),
        ("plan", lambda workers: ["direct"], "mine: plan() returned .*, which is no dict"),
        (
            "plan",
            lambda at: {}[at],
            "mine: plan() fails with KeyError: 2 .*; it must return a dict",
        ),
        ("plan", lambda workers: {"at": object()}, "which cannot be sent to workers (can not ser"),
        ("plan", lambda workers: {"at": 1 << 64}, "sent to workers (Integer value out of range)"),
    ],
)
def test_other_parts_that_are_none_are_refused_before_a_run(
    method: str, made: Any, words: str
) -> None:
    mine = type("Mine", (ASGD,), {"name": "mine", method: staticmethod(made)})
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        mine().check(workers=2)


@each_row(
    ("scalars", "words"),
    [
        (lambda *_: None, "scalars() for update 1 returned None; it must return 1 finite number"),
        (lambda *_: 0.5, "scalars() for update 1 returned 0.5; it must return 1 finite"),
        (lambda *_: (0.5, 0.5), "for update 1 returned (0.5, 0.5); it must return 1 finite"),
        (lambda update, *_: (1e308 * update,), "for update 2 returned (inf,); it must return 1"),
        (lambda update: (1.0,), "scalars() for update 1 fails with TypeError: .*; it must return"),
        (lambda update, *_: (1 / (10 - update),), "for update 10 fails with ZeroDivisionError"),
        (lambda *_: ("1",), "returned ('1',); it must return 1 finite numbers (pace)"),
    ],
)
def test_scalars_that_are_no_numbers_are_refused_before_a_run(scalars: Any, words: str) -> None:
    def rule(self: Any) -> Rule:
        return Rule(paced, scalars=("pace",))

    mine = type("Mine", (ASGD,), {"name": "mine", "rule": rule, "scalars": staticmethod(scalars)})
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        mine().check(workers=2)


def paced(w: Any, g: Any, step: Any, pace: Any) -> tuple[Any, ...]:
    return (w - step * pace * g,)


class Stumbling(Immediate):
    def may_go(self, worker: int, published: bool) -> bool:
        raise KeyError(worker)


@each_row(
    ("policy", "theirs"),
    [
        (Stumbling(), "asgd: may_go() fails with KeyError: 7 (.*test_checks.py, line .*; no upda"),
        (Policy(), None),
    ],
)
def test_a_failure_in_a_run_is_the_users_if_it_passed_their_code(
    policy: Policy, theirs: str | None
) -> None:
    with pytest.raises((KeyError, NotImplementedError)) as failure:
        policy.push(7, policy.may_go(7, True))
    found = failed_part(failure.value, ASGD(), policy)
    if theirs is None:
        assert found is None
    else:
        assert re.match(theirs.replace("(", r"\(").replace(")", r"\)"), str(found))
        assert found is not None
        assert found.__cause__ is failure.value
