"""Call the parts of an algorithm that users write, and refuse what they must not return."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from aiops.common.load import described
from aiops.errors import AiopsError, UsageError
from aiops.kernels.rule import Rule

TRIED = (0, 1, 2, 3, 4, 8, 16, 64, 1000)
"""The staleness of the gradients for which a modulation is tried before a run."""

_WANTED = "it must be a finite number, 0 or more, for every staleness from 0"


def made_rule(name: str, rule: Callable[[], object]) -> Rule:
    """Return an algorithm's rule.

    Parameters
    ----------
    name
        The algorithm's.
    rule
        Its method of that name.

    Raises
    ------
    UsageError
        When the method fails, or returns something else.
    """
    try:
        found = rule()
    except AiopsError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name}: rule() fails with {described(error, skipped=1)}; it must return a Rule"
        ) from error
    if not isinstance(found, Rule):
        raise UsageError(
            f"{name}: rule() returned {found!r}, which is no Rule: end it with return Rule(...)"
        )
    return found


def modulation_at(name: str, modulation: Callable[[int], object], staleness: int) -> float:
    """Return s(τ).

    Parameters
    ----------
    name
        The algorithm's.
    modulation
        Its method of that name.
    staleness
        τ.

    Raises
    ------
    UsageError
        When the method fails, or returns anything but a finite number ≥ 0.
    """
    what = f"{name}: the modulation for a staleness of {staleness}"
    try:
        found = modulation(staleness)
    except Exception as error:
        why = described(error, skipped=1)
        raise UsageError(f"{what} fails with {why}; {_WANTED}", staleness=staleness) from error
    if isinstance(found, Real):
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        if 0 <= number < math.inf:
            return number
    raise UsageError(f"{what} is {found!r}; {_WANTED}", staleness=staleness)


def try_modulation(name: str, modulation: Callable[[int], object]) -> None:
    """Refuse a modulation that has no number for one of a few values of staleness.

    Parameters and errors are those of `modulation_at`.
    """
    for staleness in TRIED:
        modulation_at(name, modulation, staleness)
