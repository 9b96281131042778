"""The task of a simulation in turns: a model and its data; and the examples of each mini-batch.

`aiops.lab.workloads.PerceptronTask` is one on real data.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aiops.client.params import Params
from aiops.errors import UsageError, nearest
from aiops.model.layout import Array, Ints

ORDERS = ("random", "sequential")

_AT_ONCE = 1024  # iterations whose examples are drawn at a time


class Task(Protocol):
    """A task that a simulation trains; called from several threads, each with its own ``out``."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        """Return fresh parameters."""

    @property
    def examples(self) -> int:
        """The number of examples to train on."""

    def gradient(self, params: Mapping[str, Array], rows: Ints, out: Params) -> None:
        """Write the gradient of a mini-batch of these examples, at these parameters.

        ``out``: where it goes, by name. Its elements are 0 before; what is not written stays so.
        """

    def validate(self, params: Mapping[str, Array]) -> tuple[float, float]:
        """Return the cost and the error (a share) on examples that are not trained on."""


_PARTS = ("initial", "examples", "gradient", "validate")


def check_task(task: object) -> None:
    """Refuse an object that is no `Task`, as far as that shows without calling its methods.

    Raises
    ------
    UsageError
        It names the task's class, and the part that it lacks.
    """
    if isinstance(task, type):
        raise UsageError(
            f"the task is the class {task.__name__}: give an object of it, such as"
            f" {task.__name__}()"
        )
    name = type(task).__name__
    for part in _PARTS:
        if not hasattr(task, part):
            raise UsageError(
                f"the task {name} has no {part!r}: a task has {', '.join(_PARTS)}"
                " (aiops.sim.turns.task.Task)"
            )
        if part != "examples" and not callable(getattr(task, part)):
            raise UsageError(f"the task {name} has {part!r}, and it must be a method")
    examples: Any = getattr(task, "examples")  # noqa: B009  (an object's of unknown class)
    if not isinstance(examples, Integral):
        raise UsageError(
            f"the task {name} has examples = {examples!r}, and it must be a whole number: those to"
            " train on"
        )


def initial_parameters(task: Task, seed: int) -> Mapping[str, Array]:
    """Return a task's fresh parameters.

    Raises
    ------
    UsageError
        When the task returns no mapping of names to arrays.
    """
    found: object = task.initial(seed)
    if isinstance(found, Mapping):
        return found
    raise UsageError(
        f"the task {type(task).__name__}: initial() returned {_kind(found)}, and it must return a"
        " dict of names and arrays, such as {'w': numpy.zeros(3, numpy.float32)}"
    )


def validated(task: Task, params: Mapping[str, Array]) -> tuple[float, float]:
    """Return a task's cost and error.

    Raises
    ------
    UsageError
        When the task does not return two numbers.
    """
    found: Any = task.validate(params)
    try:
        cost, error = found
        return float(cost), float(error)
    except (TypeError, ValueError):
        raise UsageError(
            f"the task {type(task).__name__}: validate() returned {_kind(found)}, and it must"
            " return two numbers, the cost and the error (a share)"
        ) from None


def _kind(found: object) -> str:
    """Return a value for an error: a number as it is, and of anything else its type."""
    if found is None or isinstance(found, Real):
        return repr(found)
    return f"a {type(found).__name__}"


def compute(task: Task, params: Mapping[str, Array], rows: Ints, out: Params) -> None:
    """Have a task compute a gradient, in memory that may hold another one.

    Raises
    ------
    UsageError
        When it returns something else than ``out``: that is not what it computed then.
    """
    out.arena.data.fill(0)
    given: object = task.gradient(params, rows, out)  # type: ignore[func-returns-value]
    if given is not None and given is not out:
        raise UsageError(
            f"{type(task).__name__}.gradient returned {type(given).__name__}, and what it returns"
            " is not used: write the gradient into `out`, as in out[name][...] = gradient"
        )


class Batches:
    """The examples of each iteration's mini-batch.

    Parameters
    ----------
    examples
        How many there are.
    batch_size
        Of a mini-batch.
    seed
        Of the run.
    order
        ``"random"``: drawn newly for each iteration. ``"sequential"``, as FRED does: mini-batch
        number (iteration mod n) of the n that the examples, as they lie, make.

    Raises
    ------
    UsageError
        When there are not as many examples, or there is no such order.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, order: str = "random") -> None:
        if not 1 <= batch_size <= examples:
            raise UsageError(
                f"mini-batches of {batch_size}: the data has {examples} examples to train on, so"
                f" give 1 to {examples}"
            )
        if order not in ORDERS:
            raise UsageError(f"no order of examples is called {order!r}; {nearest(order, ORDERS)}")
        self._examples, self._size, self._seed = examples, batch_size, seed
        self._random = order == "random"
        self._drawn: tuple[int, NDArray[Any]] = (-1, np.empty((0, 0), np.int64))

    def rows(self, iteration: int) -> Ints:
        """Return the examples of an iteration, int64[batch_size]."""
        if not self._random:
            first = iteration % (self._examples // self._size) * self._size
            return np.arange(first, first + self._size)
        block, row = divmod(iteration, _AT_ONCE)
        if self._drawn[0] != block:
            random = np.random.default_rng([self._seed, 2, block])
            drawn = random.integers(self._examples, size=(_AT_ONCE, self._size))
            self._drawn = block, drawn
        found: Ints = self._drawn[1][row]
        return found
