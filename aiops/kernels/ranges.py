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

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from aiops.kernels.rule import Rule
from aiops.kernels.rule_parser import parse
from aiops.kernels.rule_program import Expression, Literal, Name, Operation, Program

__all__ = ["Interval", "bounded_for"]

Interval: TypeAlias = tuple[float, float]
"""The least and the largest value."""

_WIDER = 2.0**-20
_ROUNDS = 16
"""The most times that the intervals are widened to those that they lead to."""
_ZERO: Interval = (0.0, 0.0)


class _Value(NamedTuple):
    """The interval ``a·x + c``; a truth value has any."""

    a: Interval
    c: Interval


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
    program, boxes = parse(rule), dict(arrays)
    constants = {name: (value, value) for name, value in rule.constants.items()}
    try:
        for _ in range(_ROUNDS):
            reads = dict.fromkeys(rule.reads, boxes["w"])
            given = {**numbers, **constants, **reads}
            found = {
                name: _after(arrays[name], _result(program, name, boxes, given, largest), updates)
                for name in boxes
            }
            if any(max(-low, high) > limits[name] for name, (low, high) in found.items()):
                return False
            if all(_hull(box, found[name]) == box for name, box in boxes.items()):
                return True
            boxes = {name: _hull(box, _doubled(found[name])) for name, box in boxes.items()}
    except (_Unbounded, OverflowError):
        pass
    return False


def _result(
    program: Program,
    array: str,
    boxes: Mapping[str, Interval],
    numbers: Mapping[str, Interval],
    largest: float,
) -> _Value:
    """Return the new value of an array, with that array as x."""
    values = {name: _Value(_ZERO, each) for name, each in (*numbers.items(), *boxes.items())}
    values[array] = _Value((1.0, 1.0), _ZERO)
    run = _Run(values, boxes[array], largest)
    for assignment in program.body:
        values[assignment.name] = run.value(assignment.value)
    place = 0 if array == "w" else 1 + program.states.index(array)
    return run.value(program.results[place])


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


class _Run:
    """The program run on intervals; ``x``: that of the array whose growth is bounded."""

    def __init__(self, values: Mapping[str, _Value], x: Interval, largest: float) -> None:
        self._values, self._x, self._largest = values, x, largest

    def value(self, expression: Expression) -> _Value:
        """Return the interval of an expression."""
        if isinstance(expression, Literal):
            return _Value(_ZERO, (expression.value, expression.value))
        if isinstance(expression, Name):
            return self._values[expression.name]
        found = self._operation(expression)
        if expression.word == "multiply" and self._not_negative(expression):
            low, high = self._range(found)
            found = _Value(_ZERO, (max(low, 0.0), high))
        low, high = self._range(found)
        if not max(-low, high) <= self._largest:
            raise _Unbounded
        return found

    def _not_negative(self, product: Operation) -> bool:
        """Return whether each factor of a product is there twice, or is not negative."""
        factors = _factors(product)
        odd = [each for each in factors if factors.count(each) % 2]
        if len(odd) == len(factors):
            return False
        return all(self._range(self.value(each))[0] >= 0 for each in odd)

    def _range(self, value: _Value) -> Interval:
        """Return the interval of a value, with that of x in it."""
        product = _times(value.a, self._x)
        return product[0] + value.c[0], product[1] + value.c[1]

    def _operation(self, expression: Operation) -> _Value:
        word, arguments = expression.word, [self.value(each) for each in expression.arguments]
        if expression.boolean:
            return _Value(_ZERO, (0.0, 1.0))
        one, other = arguments[0], arguments[-1]
        if word == "add":
            return _Value(_plus(one.a, other.a), _plus(one.c, other.c))
        if word == "subtract":
            other = _Value(_minus(other.a), _minus(other.c))
            return _Value(_plus(one.a, other.a), _plus(one.c, other.c))
        if word == "negative":
            return _Value(_minus(one.a), _minus(one.c))
        if word == "multiply":
            if one.a != _ZERO and other.a == _ZERO:
                one, other = other, one
            if one.a != _ZERO:
                one = _Value(_ZERO, self._range(one))
            return _Value(_wider(_times(one.c, other.a)), _wider(_times(one.c, other.c)))
        if word == "divide":
            inverse = _inverse(self._range(other))
            return _Value(_wider(_times(one.a, inverse)), _wider(_times(one.c, inverse)))
        if word == "where":
            return _Value(_hull(arguments[1].a, other.a), _hull(arguments[1].c, other.c))
        return _Value(_ZERO, _word(word, [self._range(each) for each in arguments]))


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


def _factors(expression: Expression) -> list[Expression]:
    if isinstance(expression, Operation) and expression.word == "multiply":
        return [each for argument in expression.arguments for each in _factors(argument)]
    return [expression]


def _plus(one: Interval, other: Interval) -> Interval:
    return _wider((one[0] + other[0], one[1] + other[1]))


def _minus(one: Interval) -> Interval:
    return -one[1], -one[0]


def _times(one: Interval, other: Interval) -> Interval:
    ends = [x * y for x in one for y in other]
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
