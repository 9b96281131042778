"""Represent a rule as a straight-line program over typed names.

A program is a list of assignments of expressions, independent of Python and of any backend.
:func:`aiops.kernels.rule_parser.parse` makes it from a rule's source, and a :class:`Dialect` writes
it as the body of a scalar loop: Numba's (`aiops.kernels.numba_source`) or that of CUDA C++
(`aiops.kernels.cuda_source`). In generated text the rule's own names appear as they are; all others
begin with an underscore, which no name of a rule does. ``_n_`` is the array whose current element
is ``n``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "ARITY",
    "COMPARISONS",
    "OPERATORS",
    "Assignment",
    "Dialect",
    "Expression",
    "Literal",
    "Name",
    "Operation",
    "Program",
    "bare",
]

ARITY = {"where": 3, "maximum": 2, "minimum": 2, "sqrt": 1, "absolute": 1, "sign": 1}
"""The number of arguments of each word of the vocabulary."""

OPERATORS: Mapping[str, str] = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "equal": "==",
    "not_equal": "!=",
}
"""The operators of two arguments, by NumPy's names."""

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

    ``results`` are the new values of ``w`` and of each state, in order, and the gauge, if there is
    one; ``summed`` is the place among them of what is summed, or None; ``text`` is the rule's own
    source, dedented.
    """

    name: str
    reads: tuple[str, ...]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    summed: int | None
    body: tuple[Assignment, ...]
    results: tuple[Expression, ...]
    text: str

    @property
    def assigned(self) -> frozenset[str]:
        """The names that the body assigns to."""
        return frozenset(assignment.name for assignment in self.body)


class Dialect:
    """A target language; a derived class spells what languages write in different ways."""

    def literal(self, value: float) -> str:
        """Spell a number, rounded to the compute dtype."""
        raise NotImplementedError

    def name(self, name: str) -> str:
        """Spell a name of the rule."""
        raise NotImplementedError

    def call(self, word: str, arguments: Sequence[str]) -> str:
        """Spell a call of a word of the vocabulary; the result stands on its own anywhere."""
        raise NotImplementedError

    def assignment(self, name: str, value: str) -> str:
        """Spell the statement that gives a spelt ``name`` a value."""
        raise NotImplementedError

    def write(self, expression: Expression) -> str:
        """Spell an expression; an operator and its operands stand in parentheses."""
        if isinstance(expression, Literal):
            return self.literal(expression.value)
        if isinstance(expression, Name):
            return self.name(expression.name)
        word, arguments = expression.word, [self.write(each) for each in expression.arguments]
        if word == "negative":
            return f"(-{arguments[0]})"
        if word in OPERATORS:
            return f"({arguments[0]} {OPERATORS[word]} {arguments[1]})"
        return self.call(word, arguments)

    def statements(self, program: Program) -> list[str]:
        """Spell the program's assignments, in order."""
        return [
            self.assignment(self.name(each.name), self.write(each.value)) for each in program.body
        ]


def bare(value: str) -> str:
    """Remove the parentheses that :meth:`Dialect.write` put around a whole value."""
    return value[1:-1] if value.startswith("(") else value
