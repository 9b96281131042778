"""Who gets how much of a line: max-min fairness, computed only when a flow begins or ends.

Flows cross lines; a line carries so many bytes per second. The rates are *max-min fair*: nobody can
have more without somebody who has no more than that having less (Bertsekas and Gallager, *Data
Networks*, 1992, section 6.5.2). Where all flows cross one line that is the processor sharing of it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Protocol

_CLOSE = 1e-12  # shares that differ by less, relatively, are the same


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

    __slots__ = ("_credit", "_idle", "burst", "carried", "flows", "rate")

    def __init__(self, rate: float = inf, burst: float = 0.0) -> None:
        self.rate, self.burst = rate, burst
        self.flows: dict[Flow, None] = {}
        self.carried = 0
        self._credit, self._idle = burst, 0.0

    def credit(self, now: float) -> float:
        """Return how many bytes may cross at once: none while somebody uses it."""
        if self.flows:
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


class Flow(Protocol):
    """What crosses lines."""

    path: tuple[Line, ...]


def share(flows: dict[Flow, None]) -> dict[Flow, float]:
    """Return the max-min fair rates of flows, in bytes per second.

    ``flows`` are all that cross any of the lines which one of them crosses.

    >>> class Crossing:
    ...     def __init__(self, *path):
    ...         self.path = path
    ...         for line in path:
    ...             line.flows[self] = None
    >>> thin, thick = Line(10.0), Line(100.0)
    >>> one, two = Crossing(thin, thick), Crossing(thick)
    >>> list(share({one: None, two: None}).values())
    [10.0, 90.0]
    """
    left: dict[Line, float] = {}
    users: dict[Line, int] = {}
    for flow in flows:
        for line in flow.path:
            left.setdefault(line, line.rate)
            users[line] = users.get(line, 0) + 1
    # A line's fair share never falls as others are served, so a stale entry is only too small.
    heap = [(rate / users[line], place, line) for place, (line, rate) in enumerate(left.items())]
    heapify(heap)
    rates: dict[Flow, float] = {}
    while heap and len(rates) < len(flows):
        fair, place, line = heap[0]
        if not users[line]:
            heappop(heap)
            continue
        now = left[line] / users[line]
        if now > fair * (1 + _CLOSE):
            heapreplace(heap, (now, place, line))
            continue
        heappop(heap)
        for flow in line.flows:
            if flow in rates:
                continue
            rates[flow] = fair
            for crossed in flow.path:
                left[crossed] -= fair
                users[crossed] -= 1
    return rates
