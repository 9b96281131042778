"""The machine as an engine uses it, passed in: memory, threads, a stopwatch, a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiops.kernels.device import Device
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.shared_memory import Memory

Measure: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Wraps a function so that its time is counted under a name: ``(name, function) → function``."""

Guard: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes a lock, or what stands for one where there is one thread."""


def unmeasured(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: no time is counted."""
    return function


@dataclass(frozen=True, slots=True)
class Resources:
    """The machine's resources; by default private memory, one thread, and no stopwatch.

    Attributes
    ----------
    memory
        Makes the arenas of versions, and receive buffers.
    parallel_map
        Shares large work among threads.
    measure
        Counts the time that functions take.
    device
        Holds the parameters and the optimiser's state, and runs updates; None: the host does.
    later
        True if kernels are compiled beside other work (`aiops.engine.events.Warm`) and NumPy runs
        in their place until then; False: a kernel's first call compiles it.
    guard
        Makes the locks of what several threads use.
    """

    memory: Memory = field(default_factory=Memory)
    parallel_map: ParallelMap = serial_map
    measure: Measure = unmeasured
    device: Device | None = None
    later: bool = False
    guard: Guard = nullcontext
