"""What an algorithm is: a value of three parts.

* A **policy** decides, on integers alone (workers, versions, staleness): use this gradient now,
  collect it, hold the answer, refuse it. It returns a `Verdict` and touches nothing.
* A **rule** is the mathematics of one update (`aiops.kernels.rule.Rule`).
* A **client plan** is what the server tells the workers to do; a plain map.

An algorithm is a frozen dataclass derived from `Algorithm`: its fields are its settings, its
docstring is its page. To add one, write one file; name it as ``--policy package.module:Class``, or
add it to `aiops.algorithms.BUILT_IN` or to the entry-point group ``aiops.algorithms``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from aiops.errors import ConflictError, UsageError, nearest
from aiops.kernels.rule import Rule
from aiops.layout import Array


class Verdict(NamedTuple):
    """What is to become of a gradient.

    ``use``
        Whether it takes part at all.
    ``divide``
        Take a step now, with the sum of what was collected divided by this; None: not yet.
    ``hold``
        Answer its worker only when the next version is published.
    ``why``
        For a gradient that is not used: the sentence its worker gets.
    """

    use: bool
    divide: int | None = None
    hold: bool = False
    why: str = ""


APPLY = Verdict(True, divide=1)
"""Take a step with this gradient alone, at once."""
COLLECT = Verdict(True)
"""Add it to the sum, and answer at once."""


class Policy:
    """The decisions of one run; made anew for each server. Derive and override."""

    def push(self, worker: int, staleness: int) -> Verdict:
        """Decide on a gradient of a worker (``staleness`` ≥ 0: the largest over its tensors)."""
        raise NotImplementedError

    def crew(self, waited_for: frozenset[int]) -> Verdict | None:
        """Hear which workers are waited for now; return a verdict if that completes a sum.

        Called when a worker joins, leaves, falls silent past its deadline, or speaks again.
        """
        return None


class Immediate(Policy):
    """Every gradient is applied at once: no worker ever waits for another."""

    def push(self, worker: int, staleness: int) -> Verdict:
        """Apply it."""
        return APPLY


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The base of all algorithms. Fields are settings; every one needs a default."""

    name: ClassVar[str]
    needs_workers: ClassVar[bool] = False
    """Whether ``--workers N`` must say how many take part (a barrier needs to know)."""

    lr: float = 0.01

    def __post_init__(self) -> None:
        """Check the settings; derived classes add their own checks with `require`."""
        self.require("lr", self.lr > 0, "a positive learning rate")

    def require(self, setting: str, holds: bool, what: str) -> None:
        """Refuse a setting that is not ``what`` it must be.

        Raises
        ------
        UsageError
            Naming the algorithm, the setting and its value.
        """
        value = getattr(self, setting)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"{self.name}: {setting} must be {what}, not {value!r}")

    def check(self, workers: int | None) -> None:
        """Refuse settings that cannot work with this number of workers (None: any number)."""
        if self.needs_workers and workers is None:
            raise ConflictError(
                f"{self.name} waits for a known number of workers: say how many with --workers N"
            )

    def rule(self) -> Rule:
        """Return the mathematics of an update; plain SGD unless overridden."""
        return Rule(sgd)

    def modulation(self, staleness: int) -> float:
        """Return what the learning rate is multiplied by for a gradient this stale (≥ 0)."""
        return 1.0

    def policy(self, workers: int | None) -> Policy:
        """Return a fresh policy; `Immediate` unless overridden."""
        return Immediate()

    def tables(self) -> str | None:
        """Return why the model may have no sparse tables, or None: it may.

        A table's rows are updated one push at a time, and a row that a push does not name keeps its
        parameters and its state. A rule for which that is wrong (whose state must move with every
        update of the model) says so here; one for which it is right, returns None.
        """
        if not isinstance(self.policy(1), Immediate):
            return (
                f"{self.name} collects gradients or holds answers before a step, and the rows of a"
                " table are updated push by push: choose a policy that applies every gradient at"
                " once, such as asgd, sasgd or fasgd"
            )
        if self.rule().function is not sgd:
            return (
                f"the rule of {self.name} has state that would stand still in the rows that a push"
                " does not name, and it does not say that this is right: choose asgd, sasgd or"
                " fasgd"
            )
        return None

    def plan(self) -> dict[str, Any]:
        """Return the workers' part, announced in the handshake.

        ``recompute``: a refused gradient is to be computed again on newer parameters.
        ``linear``: a step is proportional to its gradient, so a worker may scale its learning
        rate by scaling its gradient.
        """
        return {"recompute": False, "linear": self.rule().function is sgd}

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> Self:
        """Make the algorithm from settings, given as values or as text (``--set key=value``).

        Raises
        ------
        UsageError
            When a setting is unknown (with the nearest that is known) or has no such value.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values = {}
        for key, value in settings.items():
            if key not in known:
                raise UsageError(f"{cls.name} has no setting {key!r}; {nearest(key, known)}")
            values[key] = _convert(cls.name, key, value, known[key].default)
        return cls(**values)

    @classmethod
    def summary(cls) -> str:
        """Return the first line of its docstring."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


def sgd(w: Array, g: Array, step: np.floating[Any]) -> tuple[Array]:
    """Plain stochastic gradient descent: θ ← θ − step · g."""
    return (w - step * g,)


def _convert(algorithm: str, key: str, value: Any, default: Any) -> Any:
    """Read a setting as the type of its default."""
    try:
        if isinstance(default, bool):
            words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
            return words[str(value).lower()]
        if isinstance(default, int):
            if isinstance(value, float) and not value.is_integer():
                raise ValueError
            return int(value)
        return type(default)(value)
    except (ValueError, TypeError, KeyError):
        kind = type(default).__name__
        raise UsageError(f"{algorithm}: {key} must be a {kind}, not {value!r}") from None
