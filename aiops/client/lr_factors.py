"""Factors of learning rates: a worker's own schedule, which travels with its pushes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from aiops.errors import UsageError, nearest
from aiops.model.layout import Array, Layout
from aiops.wire.fields import MOST_FACTOR, Factors

LrFactors: TypeAlias = float | Mapping[str, float] | None
"""One for all tensors, or by tensor; a tensor that is left out has 1, and None is 1 for all."""


def checked(factors: LrFactors, layout: Layout) -> LrFactors:
    """Return the factors of a step, the caller's mapping copied; None if they are all 1.

    Raises
    ------
    UsageError
        When one is not from 0 to 100, or of a tensor that the model does not have.
    """
    if factors is None:
        return None
    if not isinstance(factors, Mapping):
        found = checked_factor(factors)
        return None if found == 1 else found
    known = {tensor.name for tensor in layout.tensors}
    each = {name: checked_factor(factor, f" of {name!r}") for name, factor in factors.items()}
    for name in each.keys() - known:
        raise UsageError(f"lr_factor: the model has no tensor {name!r}; {nearest(name, known)}")
    values = {*each.values(), *((1.0,) if len(each) < len(known) else ())}
    if len(values) > 1:
        return each
    return None if values <= {1.0} else values.pop()


def checked_factor(factor: float, of: str = "") -> float:
    """Return a factor, if it may be one; raise `UsageError` if not. ``of``: of which tensor."""
    try:
        found = float(factor)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found <= MOST_FACTOR:
        raise UsageError(f"lr_factor{of} must be from 0 to {MOST_FACTOR:g}, not {factor!r:.60}")
    return found


def in_order(factors: LrFactors, layout: Layout, names: Iterable[str]) -> Factors:
    """Return the factors of some tensors as they travel: none, one for all, or one for each."""
    if not isinstance(factors, Mapping):
        return () if factors is None else (factors,)
    wanted = set(names)
    found = [float(factors.get(t.name, 1.0)) for t in layout.tensors if t.name in wanted]
    return tuple(found[:1] if len(set(found)) == 1 else found)


def by_tensor(factors: LrFactors, layout: Layout) -> Array | None:
    """Return the factor of each tensor, float64[tensors]; None: they are all 1."""
    if factors is None:
        return None
    if not isinstance(factors, Mapping):
        return np.full(len(layout.tensors), factors)
    return np.array([factors.get(tensor.name, 1.0) for tensor in layout.tensors], np.float64)
