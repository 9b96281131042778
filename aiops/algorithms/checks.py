"""Call the parts of an algorithm that users write, and refuse what they must not return."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from typing import TypeVar

import msgpack

from aiops.common.load import described, own_modules
from aiops.errors import AiopsError, UsageError
from aiops.kernels.rule import number_of

T = TypeVar("T")

TRIED_UPDATES = (1, 2, 3, 10, 100, 1000, 1_000_000)
"""The updates for which scalars are tried before a run."""

TRIED = (0, 1, 2, 3, 4, 8, 16, 64, 1000)
"""The staleness of the gradients for which a modulation is tried before a run."""

_WANTED = "it must be a finite number, 0 or more, for every staleness from 0"


def made_part(name: str, method: str, make: Callable[[], object], kind: type[T]) -> T:
    """Return what a method of an algorithm makes.

    Parameters
    ----------
    name
        The algorithm's.
    method
        The method's, for the error: ``rule``.
    make
        The method.
    kind
        The class that it must be of.

    Raises
    ------
    UsageError
        When the method fails, or returns something else.
    """
    try:
        found = make()
    except AiopsError:
        raise
    except Exception as error:
        raise _fails(name, f"{method}()", error, f"it must return a {kind.__name__}") from error
    if isinstance(found, kind):
        return found
    raise UsageError(
        f"{name}: {method}() returned {found!r}, which is no {kind.__name__}: end it with return"
        f" {kind.__name__}(...)"
    )


def try_plan(name: str, make: Callable[[], object]) -> None:
    """Refuse a plan that is no dict, or that a message cannot carry.

    ``name``: the algorithm's. ``make``: its `plan`. It raises `UsageError`.
    """
    plan = made_part(name, "plan", make, dict)
    try:
        msgpack.packb(plan)
    except (TypeError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())
        text = f"{name}: plan() returned {plan!r}, which cannot be sent to workers"
        raise UsageError(f"{text} ({why}): numbers, text, lists and dicts of these can") from error


def try_scalars(
    name: str, scalars: Callable[[int, float, float], object], wanted: Collection[str]
) -> None:
    """Refuse scalars of a rule that are no numbers, or too few or many, for some of the updates.

    Parameters
    ----------
    name
        The algorithm's.
    scalars
        Its method of that name.
    wanted
        The names that its rule has for them.

    Raises
    ------
    UsageError
        When the method fails, or returns anything but as many finite numbers.
    """
    for update in TRIED_UPDATES:
        what = f"scalars() for update {update:,}"
        must = f"it must return {len(wanted)} finite numbers ({', '.join(wanted)})"
        try:
            found = scalars(update, 0.0, 1.0)
        except AiopsError:
            raise
        except Exception as error:
            raise _fails(name, what, error, must) from error
        numbers = found if isinstance(found, tuple | list) else ()
        if len(numbers) != len(wanted) or None in map(number_of, numbers):
            raise UsageError(f"{name}: {what} returned {found!r}; {must}")


def failed_part(error: BaseException, *parts: object) -> UsageError | None:
    """Return the error of a run that a part of an algorithm has failed in; None: it was another.

    Parameters
    ----------
    error
        As it was raised.
    parts
        The run's algorithm, and its policy: instances of classes that users may have written.
    """
    theirs = own_modules(parts)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    passed = [each for each in frames if each.f_globals.get("__name__") in theirs]
    if not passed:
        return None
    name = next((each.name for each in parts if hasattr(each, "name")), "the algorithm")
    found = _fails(
        name, f"{passed[-1].f_code.co_name}()", error, "no update can be made without it"
    )
    found.__cause__ = error
    return found


def no_decision(name: str, found: object) -> UsageError:
    """Return the error of a run whose policy returns something else than a decision."""
    return UsageError(
        f"{name}: its policy's push() returned {found!r}; it must return a Decision, such as"
        " APPLY, COLLECT or IGNORE of aiops.algorithms.base"
    )


def _fails(name: str, what: str, error: BaseException, must: str) -> UsageError:
    return UsageError(f"{name}: {what} fails with {described(error, skipped=1)}; {must}")


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
    number = number_of(found)
    if number is not None and number >= 0:
        return number
    raise UsageError(f"{what} is {found!r}; {_WANTED}", staleness=staleness)


def try_modulation(name: str, modulation: Callable[[int], object]) -> None:
    """Refuse a modulation that has no number for one of a few values of staleness.

    Parameters and errors are those of `modulation_at`.
    """
    for staleness in TRIED:
        modulation_at(name, modulation, staleness)
