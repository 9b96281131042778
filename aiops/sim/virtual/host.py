"""A machine of a simulated network, and what happens between two of its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from aiops.errors import UsageError

if TYPE_CHECKING:
    from aiops.sim.virtual.sharing import Line
    from aiops.sim.virtual.transport import MemoryTransport

Way = Literal["up", "down"]
"""Up: from a host; down: to it."""


class Host:
    """A machine of the network.

    Attributes
    ----------
    name
        What others call it.
    up, down
        The lines that leave it and come to it, the nearest first; several hosts may share one (the
        uplink of a rack), which must then be in each one's ``up``.
    latency, jitter
        Seconds: what it adds to the time that anything to or from it travels, and at most how much
        more that is, drawn at random for every write.
    alive, silent
        Whether it runs, and whether nothing comes from it: see `Network.kill` and `silence`.
    """

    def __init__(
        self,
        name: str,
        up: tuple[Line, ...] = (),
        down: tuple[Line, ...] = (),
        latency: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        for what, seconds in (("latency", latency), ("jitter", jitter)):
            if not 0 <= seconds < 1e6:
                raise UsageError(f"a {what} of {seconds:g} s cannot be: give 0 or more seconds")
        for line in (*up, *down):
            if not line.rate > 0 or not line.burst >= 0:
                raise UsageError(f"a line of {line.rate:g} bytes per second carries nothing")
        self.name, self.up, self.down = name, up, down
        self.latency, self.jitter = latency, jitter
        self.alive, self.silent = True, False
        self.heard = asyncio.Event()  # it is not silent
        self.heard.set()
        self.ends: dict[MemoryTransport, None] = {}  # of its connections
        self.marks: list[Mark] = []  # in what comes from it and goes to it


class Mark:
    """A place among the bytes that cross a network; see `Network.after`."""

    def __init__(self, way: Way, left: int, action: Callable[[], object]) -> None:
        self.way, self.left, self.action = way, left, action
