"""Norms of the parameters by tensor, computed beside training for those who watch it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from aiops.engine.engine import Engine
from aiops.model.layout import Array
from aiops.store.snapshots import Lease

_CHUNK = 1 << 16  # values that are made float64 at a time


def parameter_norms(engine: Engine) -> Callable[[], list[float]] | None:
    """Return the computation of each tensor's norm, in the model's order, on any thread.

    It has to be called: until it has ended, it has a lease on the current version. None: there is
    no model, its values may not be read now, or they are on a GPU.
    """
    store = engine.store
    if store is None or store.relaxed or not store.readable or engine.machine.device is not None:
        return None
    return partial(_norms, store.lease())


def _norms(lease: Lease) -> list[float]:
    try:
        return [_norm(view.reshape(-1)) for view in lease.version.arena.views.values()]
    finally:
        lease.release()


def _norm(values: Array) -> float:
    """Return a norm without a copy of all values, whatever their type."""
    total = 0.0
    for first in range(0, len(values), _CHUNK):
        chunk = values[first : first + _CHUNK].astype(np.float64)
        total += float(np.add.reduce(np.square(chunk, out=chunk)))  # on no thread of BLAS
    return math.sqrt(total)
