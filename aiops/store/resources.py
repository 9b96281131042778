"""What an engine takes from the machine it runs on, handed in: memory, hands, a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiops.kernels.device import Device
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.shared_memory import Memory

Measure: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same, and whose time is counted under a name."""


def unmeasured(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: nobody counts."""
    return function


@dataclass(frozen=True, slots=True)
class Resources:
    """By default memory of its own, one thread, and nobody who counts.

    Attributes
    ----------
    memory
        Where versions of the parameters are made.
    parallel_map
        Who shares large work.
    measure
        Counts where time goes.
    device
        Where parameters and the optimiser's state are kept and updates are done; None: here.
    later
        Whether kernels are made ready (`aiops.engine.events.Warm`) beside other work, so that NumPy
        does theirs until then, rather than by whoever calls one first.
    """

    memory: Memory = field(default_factory=Memory)
    parallel_map: ParallelMap = serial_map
    measure: Measure = unmeasured
    device: Device | None = None
    later: bool = False
