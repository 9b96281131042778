"""One machine of a simulated network: its links, its delay, its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Literal, Protocol

from aiops.errors import UsageError
from aiops.sim.virtual.links import SimulatedLink

Way = Literal["up", "down"]
"""Up: from a host; down: to it."""


class HostEnd(Protocol):
    """An end of a connection, as its host needs it for faults."""

    def reset(self) -> None:
        """Break the connection; both of its ends are told."""


class HeldStream(Protocol):
    """A direction of a connection in which something is held back, as a host is silent."""

    def restore(self) -> None:
        """Deliver it, unless a host is silent."""


class Host:
    """One machine of the network.

    Parameters
    ----------
    name
        By which others connect to it.
    up, down
        The links that leave it and come to it, the nearest first. Hosts that share a link (the
        uplink of a rack) each have it in their ``up``.
    latency, jitter
        Seconds that the host adds to the time that bytes to or from it travel, and the most that
        it adds beyond that, drawn at random for every write.

    Attributes
    ----------
    delay
        Seconds that the host adds for a time, as a fault: to what is sent from then on.
    alive, silent
        Whether it runs, and whether nothing comes from it (`Network.kill` and `Network.silence`).
    silent_since
        The time since which it is silent.
    restored
        Set while it is not silent.
    ends
        The ends of its connections (the values are unused).
    held
        The streams, also of connections that it has closed, that wait until it is restored.
    triggers
        Places in what comes from it and goes to it at which something is to happen.

    Raises
    ------
    UsageError
        When a delay is negative or too long, or a link has no rate.
    """

    def __init__(
        self,
        name: str,
        up: tuple[SimulatedLink, ...] = (),
        down: tuple[SimulatedLink, ...] = (),
        latency: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        for what, seconds in (("latency", latency), ("jitter", jitter)):
            if not 0 <= seconds < 1e6:
                raise UsageError(f"a {what} of {seconds:g} s cannot be: give 0 or more seconds")
        for link in (*up, *down):
            if not link.rate > 0 or not link.burst >= 0:
                raise UsageError(
                    f"a link of {link.rate:g} bytes per second carries nothing: give it a rate"
                    " above 0, and a burst of 0 or more bytes"
                )
        self.name, self.up, self.down = name, up, down
        self.latency, self.jitter = latency, jitter
        self.delay = 0.0
        self.alive, self.silent = True, False
        self.silent_since = 0.0
        self.restored = asyncio.Event()
        self.restored.set()
        self.ends: dict[HostEnd, None] = {}
        self.held: dict[HeldStream, None] = {}
        self.triggers: list[ByteTrigger] = []

    def path(self, other: Host) -> tuple[SimulatedLink, ...]:
        """Return the links that limit what goes from here to another host."""
        if self is other:
            return ()
        return tuple([link for link in dict.fromkeys((*self.up, *other.down)) if link.rate != inf])


class ByteTrigger:
    """An action that is due between two bytes (`Network.after`).

    Attributes
    ----------
    way
        Of the bytes that are counted.
    left
        Bytes that arrive before the action.
    action
        Called once.
    """

    def __init__(self, way: Way, left: int, action: Callable[[], object]) -> None:
        self.way, self.left, self.action = way, left, action
