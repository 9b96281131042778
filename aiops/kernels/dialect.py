"""Spell the expressions of a program in a target language.

In generated text the rule's own names appear as they are; all others begin with an underscore,
which no name of a rule does. ``_n_`` is the array whose current element is ``n``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiops.kernels.rule_program import Expression, Literal, Name, Program

__all__ = ["Dialect", "bare"]

_OPERATORS: Mapping[str, str] = {
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
        if word in _OPERATORS:
            return f"({arguments[0]} {_OPERATORS[word]} {arguments[1]})"
        return self.call(word, arguments)

    def statements(self, program: Program) -> list[str]:
        """Spell the program's assignments, in order."""
        return [
            self.assignment(self.name(each.name), self.write(each.value)) for each in program.body
        ]


def bare(value: str) -> str:
    """Remove the parentheses that :meth:`Dialect.write` put around a whole value."""
    return value[1:-1] if value.startswith("(") else value
