"""A push as the filters see it, and how they keep what they know of each worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aiops.filters.arithmetic import Values
from aiops.model.layout import Array, Ints

WORKERS = 256
"""The workers that are compared: those that pushed last."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The numbers of one push, on which filters decide.

    Attributes
    ----------
    worker
        The row of its worker in the filters' arrays.
    tensors, norms
        The tensors that it covers, and then one more for its largest value; and the norm of each.
    gradient
        Its sampled values, 0 where it covers nothing.
    covered
        Which of them it covers; None: all.
    base
        The sampled parameters that it was computed on; None: they are not kept any more.
    current
        The sampled parameters before it is applied; None if no filter compares with them.
    """

    worker: int
    tensors: Ints
    norms: Values
    gradient: Values
    covered: npt.NDArray[np.bool_] | None
    base: Values | None
    current: Values | None


class Objection(NamedTuple):
    """A filter's reason to refuse a push.

    Attributes
    ----------
    why
        The sentence, but for its beginning: "its gradient ..."
    blamed
        Whether it counts in full against the worker, as an honest one is not refused so.
    """

    why: str
    blamed: bool = True


class Filter(Protocol):
    """One test of pushes. It is told of every push, whether or not it is used."""

    @property
    def row_bytes(self) -> int:
        """The bytes that are kept of a worker."""

    def judge(self, seen: Observation) -> Objection | None:
        """Note a push, and return the reason to refuse it, or None."""

    def settle(self, seen: Observation, used: bool) -> None:
        """Note whether a push was used, which all filters decide together."""

    def forget(self, worker: int) -> None:
        """Clear a row for another worker, and have it if it is new."""

    def expel(self, worker: int) -> None:
        """Note that a row's worker is quarantined: nothing of it will come any more."""

    def state(self) -> dict[str, Any]:
        """Return all that later decisions depend on, as plain values, for `restore`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""


class WorkerArrays:
    """Arrays with a row for each worker, which grow with the number of workers.

    Derive, and give each array's name, the shape of a row, and the value of an empty row.
    """

    def __init__(self, **arrays: tuple[tuple[int, ...], float]) -> None:
        self._empty = arrays
        for name, (shape, value) in arrays.items():
            setattr(self, name, np.full((0, *shape), value))

    @property
    def row_bytes(self) -> int:
        """The bytes that are kept of a worker."""
        return sum(8 * math.prod(shape) for shape, _value in self._empty.values())

    def settle(self, seen: Observation, used: bool) -> None:
        """Note whether a push was used; by default nothing depends on it."""

    def forget(self, worker: int) -> None:
        """Clear a row for another worker, and have it if it is new."""
        for name, (shape, value) in self._empty.items():
            array: Array = getattr(self, name)
            if worker >= len(array):
                rows = min(max(8, 2 * worker), WORKERS)
                grown = np.full((rows, *shape), value)
                grown[: len(array)] = array
                setattr(self, name, grown)
            else:
                array[worker] = value

    def expel(self, worker: int) -> None:
        """Note that a row's worker is quarantined; by default what is known of it stays."""

    def state(self) -> dict[str, Any]:
        """Return the arrays."""
        return {name: getattr(self, name).copy() for name in self._empty}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, (shape, _value) in self._empty.items():
            setattr(self, name, np.array(state[name], float).reshape(-1, *shape))
