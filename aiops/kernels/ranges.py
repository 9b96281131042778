"""Bound the results of a rule: run its program on intervals instead of arrays.

An update must not make a parameter, or the optimiser's state, infinite. To look at every result
costs a pass over the memory. Instead `bounded_for` proves, from the largest magnitudes now, that no
result of a number of next updates can be too large, whatever their gradients are (below a limit).

Each value of the program is an interval ``a·x + c``: x is the array whose growth is bounded, and a
and c are intervals (Moore 1966, with one symbol of affine arithmetic). So ``w − step·m`` is known
to grow by at most ``step·m`` with every update, and ``0.9·m + g`` to stay below ``10·g``. Intervals
are widened by 2⁻²⁰ in every operation, which is more than float32 rounds.

>>> from aiops.algorithms.optimizers import sgd
>>> from aiops.kernels.rule import Rule
>>> boxes = {"w": (-1.0, 1.0)}
>>> limits = {"w": 1e38}
>>> numbers = {"g": (-1e18, 1e18), "step": (0.0, 0.1)}
>>> bounded_for(Rule(sgd), boxes, numbers, limits, 1e38, updates=65536)
True
>>> numbers["step"] = (0.0, 1e20)
>>> bounded_for(Rule(sgd), boxes, numbers, limits, 1e38, updates=65536)
False
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from aiops.kernels.rule import Rule
from aiops.kernels.rule_parser import parse
from aiops.kernels.rule_program import COMPARISONS, Expression, Literal, Name, Program

__all__ = ["Interval", "bounded_for"]

Interval: TypeAlias = tuple[float, float]
"""The least and the largest value."""

_WIDER = 2.0**-20
_ROUNDS = 16
"""The most times that the intervals are widened to those that they lead to."""
_ZERO: Interval = (0.0, 0.0)


_Value: TypeAlias = tuple[Interval, Interval]
"""``a`` and ``c`` of the interval ``a·x + c``; a truth value has any."""


class _Step(NamedTuple):
    """An operation on values that came before it.

    ``place``: that of its value; ``arguments``: theirs. ``odd``: of a product of which some factors
    are squared, the places of the others; if these are not negative, neither is the product.
    """

    place: int
    word: str
    arguments: tuple[int, ...]
    odd: tuple[int, ...] | None


class _Steps(NamedTuple):
    """A program as a list of values: the given ones, by name or as a literal, then the steps'.

    ``results``: the places of the new ``w`` and of each new state.
    """

    given: tuple[str | float, ...]
    steps: tuple[_Step, ...]
    results: tuple[int, ...]


class _Unbounded(Exception):
    """A value may be too large, or not a number."""


def bounded_for(
    rule: Rule,
    arrays: Mapping[str, Interval],
    numbers: Mapping[str, Interval],
    limits: Mapping[str, float],
    largest: float,
    *,
    updates: int,
) -> bool:
    """Return whether no update of the next ``updates`` can have a value that is too large.

    False means that it is not proven, and not that it happens.

    Parameters
    ----------
    rule
        The update.
    arrays
        The intervals of ``w`` and each state now.
    numbers
        The intervals of all other parameters of the rule during these updates, but constants:
        ``g`` times the factor, ``step``, and scalars. Its reads are bounded as ``w`` is: they are
        versions within its interval.
    limits
        The largest magnitude of ``w`` and each state.
    largest
        The largest magnitude of any other value.
    updates
        The number of updates.
    """
    steps, boxes = _steps(parse(rule)), dict(arrays)
    places = dict(zip(("w", *rule.state), steps.results, strict=True))
    constants = {name: (value, value) for name, value in rule.constants.items()}
    try:
        for _ in range(_ROUNDS):
            reads = dict.fromkeys(rule.reads, boxes["w"])
            given = {**numbers, **constants, **reads}
            found = dict[str, Interval]()
            for name in boxes:
                values = _run(steps, {**given, **boxes}, name, largest)
                low, high = found[name] = _after(arrays[name], values[places[name]], updates)
                if max(-low, high) > limits[name]:
                    return False
            if all(_hull(box, found[name]) == box for name, box in boxes.items()):
                return True
            boxes = {name: _hull(box, _doubled(found[name])) for name, box in boxes.items()}
    except (_Unbounded, OverflowError):
        pass
    return False


@lru_cache(maxsize=256)
def _steps(program: Program) -> _Steps:
    """Return a program's operations in order, each of which is there once."""
    kept = program.results[: 1 + len(program.states)]  # a gauge may have any value
    expressions = [*(each.value for each in program.body), *kept]
    literals = dict.fromkeys(value for each in expressions for value in _literals(each))
    names = ("w", "g", *program.reads, *program.states, "step", *program.scalars)
    given: tuple[str | float, ...] = (*names, *program.constants, *literals)
    known = {each: place for place, each in enumerate(given)}
    steps: dict[tuple[str, tuple[int, ...]], _Step] = {}
    factors: dict[int, Counter[int]] = {}  # of each product

    def place_of(expression: Expression) -> int:
        if isinstance(expression, Literal):
            return known[expression.value]
        if isinstance(expression, Name):
            return known[expression.name]
        word, places = key = expression.word, tuple(map(place_of, expression.arguments))
        if key not in steps:
            odd = None
            if word == "multiply":
                one, other = (factors.get(each, Counter([each])) for each in places)
                counts = factors[len(given) + len(steps)] = one + other
                odd = tuple(each for each, count in counts.items() if count % 2)
                odd = odd if len(odd) < len(counts) else None
            steps[key] = _Step(len(given) + len(steps), word, places, odd)
        return steps[key].place

    for assignment in program.body:
        known[assignment.name] = place_of(assignment.value)
    results = tuple(map(place_of, kept))
    return _Steps(given, tuple(steps.values()), results)


def _literals(expression: Expression) -> list[float]:
    if isinstance(expression, Literal):
        return [expression.value]
    if isinstance(expression, Name):
        return []
    return [value for each in expression.arguments for value in _literals(each)]


def _run(
    steps: _Steps, intervals: Mapping[str, Interval], array: str, largest: float
) -> list[_Value]:
    """Return the values of a program's steps, with an array as x."""
    x = intervals[array]
    values: list[_Value] = [
        (_ZERO, intervals[each] if isinstance(each, str) else (each, each)) for each in steps.given
    ]
    values[steps.given.index(array)] = (1.0, 1.0), _ZERO
    for _place, word, arguments, odd in steps.steps:
        found = _operation(word, [values[place] for place in arguments], x)
        low, high = _range(found, x)
        if odd is not None and low < 0 and all(_range(values[each], x)[0] >= 0 for each in odd):
            found, low = (_ZERO, (0.0, high)), 0.0
        if not -largest <= low <= high <= largest:
            raise _Unbounded
        values.append(found)
    return values


def _after(first: Interval, value: _Value, updates: int) -> Interval:
    """Return the interval of x during updates ``x ← a·x + c``, which begin at ``first``."""
    (a_low, a_high), (low, high) = value
    most, step = max(-a_low, a_high), max(-low, high)
    begun = max(-first[0], first[1])
    bound = most**updates * (begun + updates * step) if most > 1 else begun + updates * step
    if most < 1:
        bound = min(bound, max(begun, step / (1 - most)))
    if a_low >= 0 and low >= 0 and first[0] >= 0:  # it stays above a level, as a mean of squares
        level = low / (1 - a_low) if a_low < 1 else first[0]
        return min(first[0], level), bound
    return -bound, bound


def _range(value: _Value, x: Interval) -> Interval:
    """Return the interval of a value, with that of x in it."""
    a, c = value
    if a == _ZERO:
        return c
    low, high = _times(a, x)
    return low + c[0], high + c[1]


def _operation(word: str, arguments: list[_Value], x: Interval) -> _Value:
    (a, c), (other_a, other_c) = arguments[0], arguments[-1]
    if word in COMPARISONS:
        return _ZERO, (0.0, 1.0)
    if word == "add":
        return _plus(a, other_a), _plus(c, other_c)
    if word == "subtract":
        return _plus(a, _minus(other_a)), _plus(c, _minus(other_c))
    if word == "negative":
        return _minus(a), _minus(c)
    if word == "multiply":
        # One of them becomes a number: that without x, if there is one.
        if other_a == _ZERO:
            number = other_c
        else:
            number, a, c = _range((a, c), x), other_a, other_c
        return _wider(_times(number, a)), _wider(_times(number, c))
    if word == "divide":
        inverse = _inverse(_range((other_a, other_c), x))
        return _wider(_times(a, inverse)), _wider(_times(c, inverse))
    if word == "where":
        one_a, one_c = arguments[1]
        return _hull(one_a, other_a), _hull(one_c, other_c)
    return _ZERO, _word(word, [_range(each, x) for each in arguments])


def _word(word: str, ranges: list[Interval]) -> Interval:
    """Return the interval of a word of the vocabulary (`aiops.kernels.vocabulary`)."""
    (low, high), (low_too, high_too) = ranges[0], ranges[-1]
    if word == "sqrt":
        if low < 0:
            raise _Unbounded
        return _wider((low**0.5, high**0.5))
    if word == "maximum":
        return max(low, low_too), max(high, high_too)
    if word == "minimum":
        return min(low, low_too), min(high, high_too)
    if word == "absolute":
        return max(low, -high, 0.0), max(-low, high)
    assert word == "sign", f"no interval is known for {word}"
    return -1.0, 1.0


def _plus(one: Interval, other: Interval) -> Interval:
    if other == _ZERO:
        return one
    return _wider((one[0] + other[0], one[1] + other[1]))


def _minus(one: Interval) -> Interval:
    return -one[1], -one[0]


def _times(one: Interval, other: Interval) -> Interval:
    if one == _ZERO or other == _ZERO:
        return _ZERO
    (low, high), (other_low, other_high) = one, other
    if low >= 0 and other_low >= 0:
        return low * other_low, high * other_high
    ends = low * other_low, low * other_high, high * other_low, high * other_high
    return min(ends), max(ends)


def _inverse(one: Interval) -> Interval:
    low, high = one
    if low > 1e-36 or high < -1e-36:
        return 1 / high, 1 / low
    raise _Unbounded


def _wider(one: Interval) -> Interval:
    low, high = one
    return low - abs(low) * _WIDER, high + abs(high) * _WIDER


def _doubled(one: Interval) -> Interval:
    """Return a larger interval, so that the next round finds one that is within it."""
    low, high = one
    return (low * 2 if low < 0 else low / 2), (high * 2 if high > 0 else high / 2)


def _hull(one: Interval, other: Interval) -> Interval:
    return min(one[0], other[0]), max(one[1], other[1])
