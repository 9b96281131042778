"""Lines, and the flows that cross them: what a flow is given is max-min fair.

A line carries so many bytes per second. The rates of flows are *max-min fair*: nobody can have more
without somebody who has no more than that having less (Bertsekas and Gallager, *Data Networks*,
1992, section 6.5.2). Where all flows cross one line that is the processor sharing of it.
`aiops.sim.virtual.pools` finds them, and `aiops.sim.virtual.traffic` who shares with whom.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiops.sim.virtual.pools import Group, Pool


class Line:
    """One way of a link.

    Parameters
    ----------
    rate
        Bytes per second; infinite: it is never what limits.
    burst
        Bytes that it may carry at once after a pause, as a token bucket lets through; it earns
        them at ``rate`` while nobody uses it.

    Attributes
    ----------
    flows
        Who uses it now, in the order in which they began (the values say nothing).
    carried
        Bytes so far.
    """

    __slots__ = ("_credit", "_idle", "burst", "carried", "flows", "pool", "rate")

    def __init__(self, rate: float = inf, burst: float = 0.0) -> None:
        self.rate, self.burst = rate, burst
        self.flows: dict[Flow, None] = {}
        self.pool: Pool | None = None  # once it has been shared
        self.carried = 0
        self._credit, self._idle = burst, 0.0

    def credit(self, now: float) -> float:
        """Return how many bytes may cross at once: none while somebody uses it."""
        if self.flows or not self.burst:
            return 0.0
        self._credit = min(self.burst, self._credit + (now - self._idle) * self.rate)
        self._idle = now
        return self._credit

    def spend(self, nbytes: float) -> None:
        """Use up some of that."""
        self._credit -= nbytes

    def idle(self, now: float) -> None:
        """Hear that nobody uses it from now on."""
        self._idle = now


class Flow:
    """Bytes that cross some lines together.

    Attributes
    ----------
    path
        The lines.
    place
        Its number among all that have begun: who began first goes first.
    group, mark
        With whom it shares lines, and the group's service at which it has crossed; None: with
        nobody.
    left, since, rate, when
        If it shares none: the bytes to cross that there were at a time, bytes per second (0: it has
        not been paced yet), and when it has crossed.
    """

    __slots__ = ("group", "left", "mark", "path", "place", "rate", "since", "when")

    def __init__(self, path: tuple[Line, ...]) -> None:
        self.path = path
        self.group: Group | None = None
        self.place, self.mark = 0, 0.0
        self.left = self.since = self.rate = 0.0
        self.when = inf

    def remaining(self, now: float) -> float:
        """Return the bytes that have yet to cross."""
        if self.group is not None:
            return max(self.mark - self.group.service(now), 0.0)
        return max(self.left - (now - self.since) * self.rate, 0.0)

    def take(self, now: float) -> Flow | None:
        """Return who has crossed: it alone."""
        return self

    @property
    def speed(self) -> float:
        """Bytes per second that it is given now."""
        return self.rate if self.group is None else self.group.speed
