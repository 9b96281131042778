"""Parse the source of a rule into a program, or refuse it.

A rule that NumPy could execute but a fused loop could not reproduce bit for bit (for example one
that widens float32) is refused here, for every backend.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from aiops.errors import UsageError
from aiops.kernels import vocabulary
from aiops.kernels.rule import Rule
from aiops.kernels.rule_program import (
    ARITY,
    Assignment,
    Expression,
    Literal,
    Name,
    Operation,
    Program,
)
from aiops.kernels.vocabulary import Array

__all__ = ["parse"]

ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
}
COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
FOLDED: dict[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
}
LARGEST = 3.4e38
ALLOWED = (
    "a rule may use assignments, + - * /, comparisons, number literals and the words "
    "where, sqrt, maximum, minimum, absolute (or abs) and sign of aiops.kernels.vocabulary"
)


def parse(rule: Rule) -> Program:
    """Return the program of a rule.

    Raises
    ------
    UsageError
        When the source cannot be read, or uses anything outside the vocabulary. It names the rule,
        the line and the construct.
    """
    return _parse(
        rule.function,
        tuple(rule.state),
        tuple(rule.constants),
        rule.statistic,
        rule.gauge,
        rule.scalars,
        rule.reads,
    )


@functools.lru_cache(maxsize=256)
def _parse(
    function: Callable[..., tuple[Array, ...]],
    states: tuple[str, ...],
    constants: tuple[str, ...],
    statistic: str | None,
    gauge: bool,
    scalars: tuple[str, ...],
    reads: tuple[str, ...],
) -> Program:
    # The program does not depend on the values of constants, so rules that differ in them share it.
    state, values = dict.fromkeys(states, 0.0), dict.fromkeys(constants, 0.0)
    rule = Rule(function, state, values, statistic, scalars, reads, gauge=gauge)
    text, tree, first_line = _source(rule)
    reader = _RuleParser(rule, first_line)
    body = list(tree.body)
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    if not body or not isinstance(body[-1], ast.Return):
        reader.refuse(tree, "does not end with a return", f"end it with return {rule.results}")
    for statement in body[:-1]:
        reader.statement(statement)
    return Program(
        name=rule.name,
        reads=reads,
        states=states,
        scalars=scalars,
        constants=constants,
        summed=rule.summed,
        body=tuple(reader.body),
        results=reader.results(body[-1]),
        text=text,
    )


def _source(rule: Rule) -> tuple[str, ast.FunctionDef, int]:
    """Return the rule's dedented source, its syntax tree, and the line before its first."""
    function = rule.function
    if not inspect.isfunction(function):
        raise UsageError(
            f"rule {rule.name!r} is a {type(function).__name__}; write it as a plain function",
            rule=rule.name,
        )
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise UsageError(
            f"rule {rule.name!r} is a closure over {names}; pass such values as constants of the "
            "Rule instead",
            rule=rule.name,
        )
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise UsageError(
            f"the source of rule {rule.name!r} cannot be read ({error}); define it in a file",
            rule=rule.name,
        ) from error
    text = textwrap.dedent("".join(lines))
    try:
        tree = ast.parse(text).body[0]
    except SyntaxError:  # a lambda in the middle of an expression
        tree = None
    # A wrapper's source would be that of the function it wraps.
    wrapped = hasattr(function, "__wrapped__")
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or wrapped:
        raise UsageError(
            f"rule {rule.name!r} is a lambda or decorated; write it as a plain def",
            rule=rule.name,
            line=start,
        )
    return text, tree, start - 1


@dataclass
class _RuleParser:
    """Walks the statements of one rule; ``values`` maps each name to its value at this point."""

    rule: Rule
    lines_before: int
    body: list[Assignment] = field(default_factory=list)
    values: dict[str, Name | Literal] = field(init=False)

    def __post_init__(self) -> None:
        self.values = {}
        for name in self.rule.parameters:
            self._check_name(name, None)
            self.values[name] = Name(name)

    def refuse(self, node: ast.AST | None, what: str, remedy: str = ALLOWED) -> NoReturn:
        """Raise the error that names the rule, the line and the construct."""
        code = self.rule.function.__code__
        line = self.lines_before + getattr(node, "lineno", 1)
        raise UsageError(
            f"rule {self.rule.name!r} ({code.co_filename}:{line}) {what}; {remedy}",
            rule=self.rule.name,
            line=line,
        )

    def statement(self, node: ast.stmt) -> None:
        """Parse one assignment."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case ast.AugAssign():
                self.refuse(
                    node,
                    "assigns in place, which would overwrite the caller's arrays",
                    "write x = x + y in full",
                )
            case ast.Return():
                self.refuse(node, "returns before its last line", "use where(condition, x, y)")
            case _:
                self.refuse(node, f"uses {_construct(node)}")
        self._check_name(name, node)
        expression = self.expression(value)
        if isinstance(expression, Literal):
            self.values[name] = expression
            return
        self.body.append(Assignment(name, expression))
        self.values[name] = Name(name, expression.boolean)

    def results(self, node: ast.stmt) -> tuple[Expression, ...]:
        """Parse the return statement: one number per array, in order, and the gauge."""
        assert isinstance(node, ast.Return)
        wanted = 1 + len(self.rule.state) + self.rule.gauge
        if not isinstance(node.value, ast.Tuple) or len(node.value.elts) != wanted:
            self.refuse(
                node,
                f"does not return a tuple of {wanted}",
                f"return {self.rule.results}",
            )
        return tuple(self._number(value) for value in node.value.elts)

    def expression(self, node: ast.expr) -> Expression:
        """Parse one expression; one of literals alone is evaluated."""
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return self._literal(node, number)
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Name(id=name):
                self.refuse(
                    node,
                    f"uses the unknown name {name!r}",
                    "make it a constant or a scalar of the Rule, or a literal",
                )
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._number(operand)
                if isinstance(value, Literal):
                    return Literal(-value.value)
                return Operation("negative", (value,))
            case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
                return self._arithmetic(node)
            case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in COMPARED:
                arguments = self._number(node.left), self._number(right)
                self._check_widening(node, "a comparison", arguments)
                return Operation(COMPARED[type(operator)], arguments)
            case ast.Call():
                return self._call(node)
            case _:
                self.refuse(node, f"uses {_construct(node)}")

    def _literal(self, node: ast.expr, number: float) -> Literal:
        if abs(number) > LARGEST:
            self.refuse(
                node,
                f"uses the number `{ast.unparse(node)}`, which float32 cannot hold",
                f"stay below {LARGEST}",
            )
        return Literal(number)

    def _arithmetic(self, node: ast.BinOp) -> Expression:
        word = ARITHMETIC[type(node.op)]
        left, right = self._number(node.left), self._number(node.right)
        if not (isinstance(left, Literal) and isinstance(right, Literal)):
            return Operation(word, (left, right))
        try:
            return self._literal(node, FOLDED[word](left.value, right.value))
        except ZeroDivisionError:
            self.refuse(node, "divides a literal by zero", "correct the expression")

    def _call(self, node: ast.Call) -> Operation:
        shown = ast.unparse(node.func)
        word = self._word(node.func)
        if word is None:
            self.refuse(node, f"calls {shown}")
        if node.keywords or len(node.args) != ARITY[word]:
            self.refuse(
                node,
                f"does not give {shown} {ARITY[word]} positional arguments",
                "correct the call",
            )
        if word != "where":
            numbers = tuple(self._number(argument) for argument in node.args)
            self._check_widening(node, shown, numbers)
            return Operation(word, numbers)
        condition = self.expression(node.args[0])
        if isinstance(condition, Literal) or not condition.boolean:
            self.refuse(
                node,
                f"gives {shown} a condition that is not a comparison",
                "write one, such as x != 0",
            )
        then, otherwise = self._number(node.args[1]), self._number(node.args[2])
        self._check_widening(node, shown, (then, otherwise))
        return Operation(word, (condition, then, otherwise))

    def _word(self, node: ast.expr) -> str | None:
        """Return the word of the vocabulary that is called, looked up as Python would, or None."""
        match node:
            case ast.Name(id=name) if name not in self.values:
                known = self.rule.function.__globals__
                return vocabulary.word(known.get(name, getattr(builtins, name, None)))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                module: Any = self.rule.function.__globals__.get(name)
                return vocabulary.word(getattr(module, attribute, None))
        return None

    def _number(self, node: ast.expr) -> Expression:
        expression = self.expression(node)
        if not isinstance(expression, Literal) and expression.boolean:
            self.refuse(
                node,
                "uses a comparison as a number",
                "turn it into one with where(condition, x, y)",
            )
        return expression

    def _check_widening(
        self, node: ast.expr, shown: str, arguments: tuple[Expression, ...]
    ) -> None:
        # NumPy would return a float64 (or a plain bool), and float64 widens the rest.
        if all(isinstance(argument, Literal) for argument in arguments):
            self.refuse(
                node,
                f"gives {shown} nothing but literals, which NumPy works out in float64",
                "make one of them a constant of the Rule",
            )

    def _check_name(self, name: str, node: ast.AST | None) -> None:
        if name.startswith("_") or hasattr(builtins, name):
            self.refuse(
                node,
                f"gives a value to the name {name!r}",
                "choose one that neither begins with an underscore nor is a Python builtin",
            )


def _construct(node: ast.AST) -> str:
    """Return a description of a construct for an error: its kind and its first line."""
    shown = ast.unparse(node).splitlines()[0]
    kind = {
        "For": "a loop",
        "While": "a loop",
        "If": "an if",
        "IfExp": "an if",
        "BoolOp": "and / or",
        "Compare": "a chained or unknown comparison",
        "Pow": "a power",
    }.get(type(node).__name__)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        kind = "a power"
    return f"{kind}, `{shown}`" if kind else f"`{shown}`"
