"""The medium between hosts: links, delays and random pieces, as streams and transports use it."""

from __future__ import annotations

import random
from math import inf

from aiops.sim.virtual.fair_sharing import FlowScheduler
from aiops.sim.virtual.host import Host
from aiops.sim.virtual.links import SimulatedLink
from aiops.sim.virtual.loop import VirtualLoop


class Medium:
    """The state that all streams of a network share.

    Parameters
    ----------
    loop
        The event loop.
    seed
        Of jitter and pieces.
    pieces
        The most bytes that are delivered at once, a random number each time; None: all there are.

    Attributes
    ----------
    loop, pieces
        As given.
    messages
        Writes that have arrived.
    scheduler
        Decides at which rates bytes cross the links.
    random
        Draws jitter and pieces.
    """

    def __init__(self, loop: VirtualLoop, seed: int, pieces: int | None) -> None:
        self.loop, self.pieces = loop, pieces
        self.messages = 0
        self.scheduler = FlowScheduler()
        self.random = random.Random(seed)

    @staticmethod
    def path(source: Host, sink: Host) -> tuple[SimulatedLink, ...]:
        """Return the links that limit what goes from one host to another."""
        if source is sink:
            return ()
        links = dict.fromkeys((*source.up, *sink.down))
        return tuple([link for link in links if link.rate != inf])

    def piece(self, nbytes: int) -> int:
        """Return how many of ``nbytes`` bytes are delivered at once."""
        pieces = self.pieces
        return nbytes if pieces is None else min(nbytes, self.random.randint(1, pieces))
