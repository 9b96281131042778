"""Norms of the parameters by tensor, computed beside training for those who watch it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from aiops.engine.engine import Engine
from aiops.model.layout import Array
from aiops.net.yielding import yielding
from aiops.serving.repeated_error import RepeatedError
from aiops.store.snapshots import Lease

_CHUNK = 1 << 16  # values that are made float64 at a time

_EVERY = 5.0
"""Seconds between the ends of computations and the next ones, at least."""

_SHARE = 0.01
"""The most of a processor's time that they take."""


class Normed(Protocol):
    """A server whose parameters' norms are asked for."""

    def norms(self) -> Callable[[], list[float]] | None:
        """Return what computes the parameters' norms by tensor; None: they cannot be had now."""


class ParameterNorms:
    """The norms of a server's parameters, as they were the last time they could be had.

    They are computed on another thread, and only after a reader has asked for them: so the first
    who asks finds none. It is used on the event loop.

    Parameters
    ----------
    running
        Returns the server that runs now, or None while there is none.
    """

    def __init__(self, running: Callable[[], Normed | None]) -> None:
        self._running = running
        self._norms: list[float] = []
        self._next = 0.0  # the time from which on they may be computed again
        self._computing: asyncio.Task[None] | None = None
        self._error = RepeatedError()

    def add_to(self, report: dict[str, Any]) -> None:
        """Add them to the statistics of the server's tensors, as ``params``."""
        found = report.get("by_tensor")
        if found and len(found["names"]) == len(self._norms):
            report["by_tensor"] = {**found, "params": self._norms}

    def ask(self) -> None:
        """Have them computed, if it is time."""
        running = self._running()
        if self._computing is not None or running is None or time.monotonic() < self._next:
            return
        compute = running.norms()
        if compute is not None:
            self._computing = asyncio.get_running_loop().create_task(self._compute(compute))

    def close(self) -> None:
        """Begin no more."""
        if self._computing is not None:
            self._computing.cancel()

    async def _compute(self, compute: Callable[[], list[float]]) -> None:
        took = 0.0
        try:
            self._norms, took = await asyncio.to_thread(_timed, compute)
            self._error.over()
        except Exception as error:  # it is no reason for a server to end
            why = f"there are no norms of the parameters: {error!r}"
            self._error.log(time.monotonic(), repr(error), why)
        finally:
            self._computing = None
            self._next = time.monotonic() + max(_EVERY, took / _SHARE)


def _timed(compute: Callable[[], list[float]]) -> tuple[list[float], float]:
    """Return a result, and the seconds of a processor that it took."""
    begun = time.thread_time()
    with yielding():  # the event loop has the interpreter when it wants it
        found = compute()
    return found, time.thread_time() - begun


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
