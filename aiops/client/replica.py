"""A worker's own model, as averaging sees it: copied out, and changed by a difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds

from aiops.averaging.ring_allreduce import Flat
from aiops.errors import UsageError
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout

_BLOCK = 32 * 1024  # elements worked on at a time: all of it stays in the cache


class Replica(Protocol):
    """A model in training. `copy_out` and `add` are called under the lock."""

    def arrays(self) -> dict[str, Array]:
        """Return the tensors as arrays by name (perhaps copies)."""

    def copy_out(self, arena: Arena) -> None:
        """Copy the values into an arena."""

    def prepare(self, mean: Flat, base: Arena) -> Any:
        """Return what `add` needs; done before the lock is taken."""

    def add(self, prepared: Any) -> None:
        """Add mean − base. An element that is still as in ``base`` becomes the mean to the bit."""


class Arrays:
    """A mapping of NumPy arrays, which are changed in place.

    The arrays are looked up each time, so that ``params[name] = ...`` is seen too.

    Raises
    ------
    UsageError
        When one of them cannot be trained or written to, or two share memory (tied weights), which
        would be changed twice; the text names them.
    """

    def __init__(self, params: Mapping[str, Array]) -> None:
        self._params = params
        for name, array in params.items():
            if not isinstance(array, np.ndarray):
                raise UsageError(
                    f"{name!r} is a {type(array).__name__}, which cannot be changed in place: give"
                    " NumPy arrays, or a torch.nn.Module"
                )
            if not array.flags.writeable:
                raise UsageError(f"{name!r} is read-only; averages are written into it")
        self._layout = Layout.of(params)
        _check_apart(params)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays themselves."""
        return dict(self._params)

    def copy_out(self, arena: Arena) -> None:
        """Copy the values into an arena."""
        for name, view in arena.views.items():
            np.copyto(view, self._now(name))

    def prepare(self, mean: Flat, base: Arena) -> list[tuple[str, Array, Array]]:
        """Return each tensor's name, mean and base."""
        return [(name, values, base.views[name].reshape(-1)) for name, values in mean.views]

    def add(self, prepared: list[tuple[str, Array, Array]]) -> None:
        """Add mean − base."""
        for name, mean, base in prepared:
            live = self._now(name)
            flat = live.reshape(-1)
            _add(flat, mean, base)
            if not np.may_share_memory(flat, live):  # a copy: the array is no single run
                live[...] = flat.reshape(live.shape)

    def _now(self, name: str) -> Array:
        array, tensor = self._params[name], self._layout.tensors[self._layout.index[name]]
        if array.shape != tensor.shape or array.dtype.name != tensor.dtype.name:
            raise UsageError(
                f"{name!r} was {tensor.dtype.name} of shape {tensor.shape} and is now"
                f" {array.dtype.name} of shape {array.shape}: the model may not change its form"
            )
        return array


def _check_apart(params: Mapping[str, Array]) -> None:
    """Refuse arrays that share memory: a sweep over their byte ranges finds the candidates."""
    ranges = sorted((*byte_bounds(array), name) for name, array in params.items() if array.size)
    open_: list[tuple[int, str]] = []  # those that reach to where the sweep is: end and name
    for low, high, name in ranges:
        open_ = [other for other in open_ if other[0] > low]
        for _end, other in open_:
            if np.shares_memory(params[other], params[name]):
                raise UsageError(
                    f"{other!r} and {name!r} share memory, and an average would be added to it"
                    " twice: give a tied array under one name only"
                )
        open_.append((high, name))


def _add(live: Array, mean: Array, base: Array) -> None:
    """Add mean − base to flat values, in the dtype of the mean."""
    narrow = live.dtype != mean.dtype
    for low in range(0, live.size, _BLOCK):
        own, target, before = (a[low : low + _BLOCK] for a in (live, mean, base))
        untouched = own == before
        if narrow:
            wide = own.astype(target.dtype)
            wide += target - before.astype(target.dtype)
            np.copyto(wide, target, where=untouched)
            np.copyto(own, wide, casting="unsafe")
        else:
            own += target - before
            np.copyto(own, target, where=untouched)
