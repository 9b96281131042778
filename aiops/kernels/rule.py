"""Describe a rule: the mathematics of an update, written once as a function over arrays."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from aiops.errors import UsageError
from aiops.kernels.vocabulary import Array, Scalar

__all__ = ["FIRST", "FOLD", "Rule", "number_of"]


@dataclass(frozen=True)
class Rule:
    """An elementwise update, and what it needs besides parameters and gradient.

    Parameters
    ----------
    function
        ``function(w, g, *reads, *state, step, *scalars, *constants)`` takes the parameters, the
        gradient, an array per read and per state, the step (learning rate times modulation), and a
        number per scalar and per constant, in the order in which they are named, and returns the
        tuple ``(w, *state)`` of the new values, with a ``gauge`` one more. Arrays are blocks of one
        tensor in the compute dtype; ``step``, the scalars and the constants are scalars of that
        dtype. The body may use assignments to local names, ``+ - * /``, unary minus, comparisons,
        number literals (values of the compute dtype) and the words of
        :mod:`aiops.kernels.vocabulary`; :func:`aiops.kernels.build` refuses anything else.
    state
        Maps the name of each state array to its initial value.
    constants
        Maps the name of each constant to its value, in double precision. It is rounded once to the
        compute dtype, so pass ``one_minus_gamma`` instead of computing it in float32.
    statistic
        The state array whose sum is reported with every update, or None.
    gauge
        Whether the function returns one more value, after the state: nothing is stored of it but
        its sum, which is reported with every update. A rule has a statistic, or a gauge, or none.
    scalars
        Names of numbers that the host computes for each tensor at each update, like the step; a
        kernel gets them in ``Spans.scalars``.
    reads
        Names of arrays laid out like the parameters that are only read; a kernel gets them in its
        last argument.
    statistic_floor
        A lower bound of the statistic's mean.
    offset
        The state array by which the parameters, where gradients are computed, lie off the point
        where the model is evaluated best; None: they are that point.

    Raises
    ------
    UsageError
        When the function's parameters are not these, the state or the constants are no mapping, a
        number is not finite, the statistic or the
        offset is no state array, or it has both a statistic and a gauge.

    Examples
    --------
    >>> def momentum(w, g, m, step, decay):
    ...     m = decay * m + g
    ...     return w - step * m, m
    >>> Rule(momentum, state={"m": 0.0}, constants={"decay": 0.9}).name
    'momentum'

    Delay compensation (Zheng et al. 2017, eq 5) reads the parameters its gradient was computed at:

    >>> def compensated(w, g, sent, step, strength):
    ...     return (w - step * (g + strength * g * g * (w - sent)),)
    >>> Rule(compensated, constants={"strength": 0.04}, reads=("sent",)).parameters
    ('w', 'g', 'sent', 'step', 'strength')
    """

    function: Callable[..., tuple[Array, ...]]
    state: Mapping[str, float] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    statistic: str | None = None
    scalars: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    statistic_floor: float = 0.0
    gauge: bool = False
    offset: str | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        # Copies: the rule must not change when the caller changes the mappings.
        object.__setattr__(self, "state", _numbers(self.state))
        object.__setattr__(self, "constants", _numbers(self.constants))
        object.__setattr__(self, "scalars", tuple(self.scalars))
        object.__setattr__(self, "reads", tuple(self.reads))
        self._check_parameters()
        if self.statistic is not None and self.statistic not in self.state:
            raise UsageError(
                f"rule {self.name!r} reports the statistic {self.statistic!r}, which is not one "
                f"of its state arrays ({', '.join(self.state) or 'it has none'}); name one of "
                "them, or None",
                rule=self.name,
                statistic=self.statistic,
            )

        if self.offset is not None and self.offset not in self.state:
            raise UsageError(
                f"rule {self.name!r} has the offset {self.offset!r}, which is not one of its state"
                f" arrays ({', '.join(self.state) or 'it has none'}); name one of them, or None",
                rule=self.name,
                offset=self.offset,
            )
        if self.gauge and self.statistic is not None:
            raise UsageError(
                f"rule {self.name!r} has the statistic {self.statistic!r} and a gauge, and an"
                " update reports one sum: drop one of them",
                rule=self.name,
            )

    @property
    def summed(self) -> int | None:
        """The place in the function's result of what is summed, or None."""
        if self.gauge:
            return 1 + len(self.state)
        return None if self.statistic is None else 1 + list(self.state).index(self.statistic)

    @property
    def name(self) -> str:
        """The function's name, as it appears in errors and generated files."""
        return getattr(self.function, "__name__", repr(self.function))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameter names that the function must have, in order."""
        return ("w", "g", *self.reads, *self.state, "step", *self.scalars, *self.constants)

    @property
    def results(self) -> str:
        """The function's result as source text, for errors."""
        names = "w", *self.state, *(("gauge",) if self.gauge else ())
        return f"({', '.join(names)})" if len(names) > 1 else "(w,)"

    def _check_kinds(self) -> None:
        """Refuse names without values, and a text where there are several names."""
        for kind in ("state", "constants"):
            given = getattr(self, kind)
            if not isinstance(given, Mapping):
                raise UsageError(
                    f"rule {self.name!r} has {kind}={given!r}, which gives no values: map each name"
                    f" to its {'first ' if kind == 'state' else ''}value, as {kind}={{'m': 0.0}}"
                    " does",
                    rule=self.name,
                )
            for name, value in given.items():
                if number_of(value) is None:
                    raise UsageError(
                        f"rule {self.name!r} has {value!r} as the value of {name!r} in {kind}:"
                        " give a finite number",
                        rule=self.name,
                        value=value,
                    )
        for kind in ("scalars", "reads"):
            given = getattr(self, kind)
            if isinstance(given, str):
                raise UsageError(
                    f"rule {self.name!r} has {kind}={given!r}, a text: write a tuple of names,"
                    f" ({given!r},)",
                    rule=self.name,
                )

    def _check_parameters(self) -> None:
        wanted = self.parameters
        if len(set(wanted)) != len(wanted):
            twice = sorted({name for name in wanted if wanted.count(name) > 1})
            raise UsageError(
                f"rule {self.name!r} uses the name {twice[0]!r} twice; w, g, step, the "
                "reads, the state arrays, the scalars and the constants need different names",
                rule=self.name,
                names=wanted,
            )
        parameters = inspect.signature(self.function).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = tuple(parameter.name for parameter in parameters)
        if found != wanted or any(parameter.kind not in plain for parameter in parameters):
            shown = ", ".join(str(parameter) for parameter in parameters)
            raise UsageError(
                f"rule {self.name!r} is written as ({shown}), but with its reads, state, "
                f"scalars and constants its parameters must be ({', '.join(wanted)}); rename or "
                "reorder them",
                rule=self.name,
                found=found,
                wanted=wanted,
            )


def number_of(value: object) -> float | None:
    """Return a finite number that a user's code returned; None: it is none.

    >>> import numpy
    >>> number_of(2), number_of(numpy.array(0.5)), number_of("2"), number_of(10**400)
    (2.0, 0.5, None, None)
    """
    if getattr(value, "shape", None) == ():  # of an array: numpy.where returns such
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """Return a copy, with numbers in the place of arrays without dimensions."""
    return {
        name: value.item() if hasattr(value, "item") else value for name, value in given.items()
    }


def fold(w: Array, g: Array, step: Scalar) -> tuple[Array, ...]:
    return (w + step * g,)


def first(w: Array, g: Array, step: Scalar) -> tuple[Array, ...]:
    return (step * g,)


FOLD = Rule(fold)
"""Add a gradient to a running sum, ``sum + step * g``; the sum takes the place of parameters."""

FIRST = Rule(first)
"""Begin a running sum: ``step * g``; its previous content is not read."""
