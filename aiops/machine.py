"""What an engine takes from the machine it runs on, handed in: memory, hands, and a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiops.kernels.sharing import Together, alone
from aiops.segments import Room

Measure: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same, and whose time is counted under a name."""


def unmeasured(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: nobody counts."""
    return function


@dataclass(frozen=True, slots=True)
class Machine:
    """By default memory of its own, one thread, and nobody who counts.

    Attributes
    ----------
    room
        Where versions of the parameters are made.
    together
        Who shares large work.
    measure
        Counts where time goes.
    """

    room: Room = field(default_factory=Room)
    together: Together = alone
    measure: Measure = unmeasured
