"""Represent a rule as a straight-line program over typed names.

A program is a list of assignments of expressions, independent of Python and of any backend, which a
dialect (:mod:`aiops.kernels.dialect`) writes as the body of a scalar loop.
:func:`aiops.kernels.rule_parser.parse` makes it from a rule's source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "ARITY",
    "COMPARISONS",
    "Assignment",
    "Expression",
    "Literal",
    "Name",
    "Operation",
    "Program",
]

ARITY = {"where": 3, "maximum": 2, "minimum": 2, "sqrt": 1, "absolute": 1, "sign": 1}
"""The number of arguments of each word of the vocabulary."""

COMPARISONS = frozenset({"less", "less_equal", "greater", "greater_equal", "equal", "not_equal"})
"""The operations whose result is a truth value."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A number in the source, or the value of an expression of numbers, in double precision.

    NumPy rounds it to the compute dtype where it is combined with an array, and so must a backend.
    """

    value: float


@dataclass(frozen=True, slots=True)
class Name:
    """The current value of a parameter or a local name; ``boolean`` if that is a comparison."""

    name: str
    boolean: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """A word of the vocabulary, or an operator by NumPy's name, and its arguments.

    The operators are add, subtract, multiply, divide, negative and those of ``COMPARISONS``.
    """

    word: str
    arguments: tuple[Expression, ...]

    @property
    def boolean(self) -> bool:
        """True if the result is a truth value."""
        return self.word in COMPARISONS


Expression: TypeAlias = Literal | Name | Operation


@dataclass(frozen=True, slots=True)
class Assignment:
    """``name = value``, which may give a parameter or a local name a new value."""

    name: str
    value: Name | Operation


@dataclass(frozen=True, slots=True)
class Program:
    """The computation of a rule for one element: the assignments in order, then the results.

    ``results`` are the new values of ``w`` and of each state, in order; ``text`` is the rule's
    own source, dedented.
    """

    name: str
    reads: tuple[str, ...]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    statistic: str | None
    body: tuple[Assignment, ...]
    results: tuple[Expression, ...]
    text: str

    @property
    def assigned(self) -> frozenset[str]:
        """The names that the body assigns to."""
        return frozenset(assignment.name for assignment in self.body)
