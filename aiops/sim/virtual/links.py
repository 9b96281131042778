"""Simulated links, the flows that cross them, and groups of flows that are given one rate."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf


class SimulatedLink:
    """One direction of a network link.

    Parameters
    ----------
    rate
        Bytes per second; infinite: the link is never a bottleneck.
    burst
        Bytes that cross at once after a pause, as a token bucket allows; an idle link earns them
        at ``rate``.

    Attributes
    ----------
    flows, groups
        Flows that cross it now, in the order in which they began, and the groups of those flows
        that share it (the values of both are unused).
    carried
        Bytes so far.
    """

    __slots__ = ("_credit", "_idle", "burst", "carried", "flows", "groups", "rate")

    def __init__(self, rate: float = inf, burst: float = 0.0) -> None:
        self.rate, self.burst = rate, burst
        self.flows: dict[LinkFlow, None] = {}
        self.groups: dict[FlowGroup, None] = {}
        self.carried = 0
        self._credit, self._idle = burst, 0.0

    def credit(self, now: float) -> float:
        """Return the bytes of its burst that may cross at once: none while a flow crosses it."""
        if self.flows or not self.burst:
            return 0.0
        self._credit = min(self.burst, self._credit + (now - self._idle) * self.rate)
        self._idle = now
        return self._credit

    def spend(self, nbytes: float) -> None:
        """Take bytes off its credit."""
        self._credit -= nbytes

    def idle(self, now: float) -> None:
        """Earn credit from now on."""
        self._idle = now


class LinkFlow:
    """Bytes that cross some links together, as one unit.

    Attributes
    ----------
    path
        The links.
    place
        The flow's number in the order in which flows began; of equals the first to begin ends
        first.
    group, mark
        Its group while it shares a link, and the group's service, in bytes, at which it has
        crossed; None: it shares no link.
    left, since, rate, when
        While it shares no link: the bytes that were left at a time in seconds, bytes per second
        (0: none has been assigned yet), and the time at which it has crossed.
    """

    __slots__ = ("group", "left", "mark", "path", "place", "rate", "since", "when")

    def __init__(self, path: tuple[SimulatedLink, ...]) -> None:
        self.path = path
        self.group: FlowGroup | None = None
        self.place, self.mark = 0, 0.0
        self.left = self.since = self.rate = 0.0
        self.when = inf

    def ready(self) -> None:
        """Begin on the links, if there is something to send."""

    def crossed(self) -> None:
        """Note that it has crossed the links."""

    def remaining(self, now: float) -> float:
        """Return the bytes that have yet to cross."""
        if self.group is not None:
            return max(self.mark - self.group.service(now), 0.0)
        return max(self.left - (now - self.since) * self.rate, 0.0)

    @property
    def speed(self) -> float:
        """Bytes per second that it is given now."""
        return self.rate if self.group is None else self.group.rate


class FlowGroup:
    """Flows that cross the same shared links and have the same cap, so that they have one rate.

    The bytes that each of them has been given since the group began are the group's *service*. A
    flow is over when the service reaches the *mark* that was set when the flow joined, however
    often the rate changes meanwhile (virtual time; Parekh and Gallager, 1993). So a change of the
    rate touches the group, and none of its flows.

    Attributes
    ----------
    links
        The shared ones.
    cap
        Bytes per second that the flows' other links allow, which no other flow crosses.
    size
        The number of flows.
    rate
        Bytes per second of each flow.
    when
        The time in seconds at which the first of the flows has crossed.
    """

    __slots__ = (
        "_marks",
        "_next_mark",
        "_served",
        "_since",
        "cap",
        "links",
        "rate",
        "size",
        "when",
    )

    def __init__(self, links: tuple[SimulatedLink, ...], cap: float) -> None:
        self.links, self.cap = links, cap
        self.size, self.rate, self.when = 0, 0.0, inf
        self._marks: list[tuple[float, int, LinkFlow]] = []  # a heap
        self._next_mark = inf  # the mark that `when` stands for
        self._served = self._since = 0.0

    def service(self, now: float) -> float:
        """Return the bytes that a flow has been given that was in the group from its beginning."""
        return self._served + (now - self._since) * self.rate

    def add(self, flow: LinkFlow, left: float, now: float) -> None:
        """Add a flow that has ``left`` bytes to go."""
        flow.group, flow.mark, flow.when, flow.rate = self, self.service(now) + left, inf, 0.0
        heappush(self._marks, (flow.mark, flow.place, flow))
        self.size += 1

    def drop(self, flow: LinkFlow) -> None:
        """Remove a flow."""
        flow.group = None
        self.size -= 1

    def pace(self, now: float, rate: float) -> float:
        """Set the rate; return the time at which the first of the flows has crossed at it."""
        served = self._served + (now - self._since) * self.rate
        if rate != self.rate:
            self._served, self._since, self.rate = served, now, rate
        mark = self._next_mark = self._first_mark()
        return now + (mark - served) / rate if mark > served else now

    def take(self, now: float) -> LinkFlow | None:
        """Return a flow that has crossed by now; None: there is none.

        At `when` the service is the first mark, whatever rounding makes of it, so that flows with
        equal marks end at the same moment.
        """
        self._served, self._since = max(self.service(now), self._next_mark), now
        return self._marks[0][2] if self._first_mark() <= self._served else None

    def _first_mark(self) -> float:
        marks = self._marks
        while marks:
            mark, place, flow = marks[0]
            if flow.group is self and flow.mark == mark and flow.place == place:
                return mark
            heappop(marks)  # it was dropped
        return inf
