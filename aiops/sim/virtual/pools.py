"""How lines are shared, max-min fairly, at a cost that does not grow with the flows.

No flow is looked after alone. Those that cross the same shared lines, and whose other lines (nobody
else crosses those) allow the same *cap*, are a `Group`: they have one rate. What one of them has
been given since the group began is its *service*; a flow is over when that reaches the *mark* which
was set when it came, however often the rate changes meanwhile, as in fair queueing (Parekh and
Gallager, 1993, *virtual time*). So a heap of marks says who is next.

The groups that cross only one shared line are in its `Pool`, ordered by their caps: the first of
them have their caps, the others share what is left, each at the pool's *level*, and the heap of the
pool says which of those groups is next. A flow that begins or ends moves the level, and with it the
few groups between the old and the new one; the others hear nothing of it. Groups that cross several
shared lines connect pools; levels are then found by filling these lines together (`fill`).
`aiops.sim.virtual.traffic` puts flows in their groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from aiops.sim.virtual.sharing import Flow, Line

_CLOSE = 1e-12  # levels that differ by less, relatively, are the same


class Group:
    """Flows that have one rate: they cross the same shared lines, and have the same cap.

    Attributes
    ----------
    pools
        Of the shared lines. With one, the group is one of the pool's own.
    cap
        Bytes per second that each flow's other lines allow.
    flows
        How many there are.
    capped
        Whether the cap is what holds them back, as the pool sees it.
    rides
        Whether its service is the pool's, and an offset; else it has a rate of its own.
    when
        When the first of them has crossed, if it does not ride.
    shown
        The mark of the first, as the pool or ``when`` has it.
    """

    __slots__ = (
        *("_marks", "_offset", "_rate", "_served", "_since", "cap", "capped", "entry", "flows"),
        *("place", "pools", "rides", "shown", "when"),
    )

    def __init__(self, pools: tuple[Pool, ...], cap: float, place: int) -> None:
        self.pools, self.cap, self.place = pools, cap, place
        self.flows = self.entry = 0
        self.capped = self.rides = False
        self.when = self.shown = inf
        self._marks: list[tuple[float, int, Flow]] = []
        self._offset = self._rate = self._served = self._since = 0.0

    @property
    def speed(self) -> float:
        """Bytes per second of each of its flows."""
        return self.pools[0].rate if self.rides else self._rate

    def service(self, now: float) -> float:
        """Return the bytes that a flow which was there from the beginning has been given."""
        if self.rides:
            return self.pools[0].service(now) + self._offset
        return self._served + (now - self._since) * self._rate

    def add(self, flow: Flow, left: float, now: float) -> None:
        """Have a flow in it, of so many bytes that are left."""
        flow.group, flow.mark, flow.when, flow.rate = self, self.service(now) + left, inf, 0.0
        heappush(self._marks, (flow.mark, flow.place, flow))
        self._count(1)

    def drop(self, flow: Flow) -> None:
        """Have it no more."""
        flow.group = None
        self._count(-1)
        if not self.flows:
            self._marks.clear()

    def _count(self, more: int) -> None:
        self.flows += more
        if len(self.pools) == 1:
            pool = self.pools[0]
            if self.capped:
                pool.held += more * self.cap
            else:
                pool.riders += more

    def head(self) -> float:
        """Return the lowest mark."""
        marks = self._marks
        while marks:
            mark, place, flow = marks[0]
            if flow.group is self and flow.mark == mark and flow.place == place:
                return mark
            heappop(marks)  # it was dropped
        return inf

    def first(self) -> Flow:
        """Return the flow of the lowest mark."""
        return self._marks[0][2]

    def take(self, now: float) -> Flow | None:
        """Return a flow that has crossed, if there is one."""
        self._served, self._since = max(self.service(now), self.shown), now
        return self.first() if self.head() <= self._served else None

    def ride(self, now: float) -> None:
        """Be served as the pool is, from now on."""
        self._offset = self.service(now) - self.pools[0].service(now)
        self.rides, self.when, self.shown = True, inf, inf

    def pace(self, now: float, rate: float) -> None:
        """Have a rate of its own from now on."""
        self._served, self._since, self._rate = self.service(now), now, rate
        self.rides = False

    def ends(self, now: float) -> float:
        """Return when the first of its flows has crossed, at its own rate."""
        self.shown = self.head()
        return now + max(self.shown - self.service(now), 0.0) / self._rate

    def key(self) -> float:
        """Return the pool's service at which the first of its flows has crossed, if it rides."""
        return self.shown - self._offset


class Pool:
    """A shared line: the groups that cross no other, and those that do.

    Attributes
    ----------
    own, through
        The groups that cross only this shared line, by their caps; those that cross others too.
    riders, held
        How many flows of its own have no cap that holds them back; what those that have use of the
        line, in bytes per second.
    rate
        Its level: bytes per second of each rider.
    when
        When the first of the riders has crossed.
    """

    __slots__ = (
        *("_capped", "_entries", "_heap", "_moved", "_served", "_shown", "_since", "held", "line"),
        *("own", "rate", "riders", "through", "when"),
    )

    def __init__(self, line: Line) -> None:
        self.line = line
        self.own: list[tuple[float, int, Group]] = []
        self.through: dict[Group, None] = {}
        self.riders, self.held = 0, 0.0
        self.rate, self.when = 0.0, inf
        self._capped = 0  # so many of its own groups have their caps
        self._moved: list[Group] = []  # across the level
        self._heap: list[tuple[float, int, Group]] = []  # of the groups that ride
        self._entries = 0
        self._served = self._since = 0.0
        self._shown = inf  # the service that `when` means

    def join(self, group: Group) -> None:
        """Have another group."""
        if len(group.pools) > 1:
            self.through[group] = None
            return
        entry = (group.cap, group.place, group)
        if bisect_left(self.own, entry) < self._capped:
            group.capped = True
            self._capped += 1
        insort(self.own, entry)
        self._moved.append(group)

    def part(self, group: Group) -> None:
        """Have one no more whose flows are all gone."""
        if len(group.pools) > 1:
            del self.through[group]
            return
        index = bisect_left(self.own, (group.cap, group.place, group))
        del self.own[index]
        if index < self._capped:
            self._capped -= 1
        group.rides, group.entry = False, 0

    def service(self, now: float) -> float:
        """Return the bytes that somebody who rode from the beginning has been given."""
        return self._served + (now - self._since) * self.rate

    def level(self, load: float, users: int) -> float:
        """Find the level of its riders, if so many others have it too; infinite: there are none.

        ``load`` are bytes per second that others use of the line without asking.
        """
        own, free = self.own, self.line.rate - load
        users += self.riders
        while self._capped and own[self._capped - 1][0] * users > free - self.held:
            self._capped -= 1
            users += self._move(own[self._capped][2], False)
        if not self._capped:
            self.held = 0.0  # exactly
        while self._capped < len(own) and own[self._capped][0] * users <= free - self.held:
            users -= self._move(own[self._capped][2], True)
            self._capped += 1
        return (free - self.held) / users if users else inf

    def _move(self, group: Group, capped: bool) -> int:
        """Have a group be held back by its cap, or not; return of how many flows it is."""
        flows, sign = group.flows, 1 if capped else -1
        group.capped = capped
        self.held += sign * flows * group.cap
        self.riders -= sign * flows
        self._moved.append(group)
        return flows

    def settle(self, now: float, level: float) -> list[Group]:
        """Have a level from now on; return the groups that have ceased to ride."""
        self._served, self._since = self.service(now), now
        ceased = []
        for group in self._moved:
            if not group.flows:
                continue
            if not group.capped and not group.rides:
                group.ride(now)
                self.show(group)
            elif group.capped and (group.rides or group.speed != group.cap):
                group.pace(now, group.cap)
                ceased.append(group)
        self._moved.clear()
        if self.riders:
            self.rate = level
        else:
            self.rate = self._served = 0.0
            self._heap.clear()
        return ceased

    def show(self, group: Group) -> None:
        """Note which flow of a group that rides is its first."""
        head = group.head()
        if head != group.shown:
            group.shown = head
            self._entries += 1
            group.entry = self._entries
            if head < inf:
                heappush(self._heap, (group.key(), self._entries, group))

    def ends(self) -> float:
        """Return when the first of its riders has crossed, as it is since it was settled."""
        self._shown = self._first()
        if self._shown == inf:
            return inf
        left = self._shown - self._served
        return self._since + left / self.rate if left > 0 else self._since

    def _first(self) -> float:
        """Return the service at which the first of its riders has crossed."""
        heap = self._heap
        while heap:
            key, entry, group = heap[0]
            if group.rides and group.entry == entry:
                return key
            heappop(heap)
        return inf

    def take(self, now: float) -> Flow | None:
        """Return a rider that has crossed, if there is one."""
        served = self._served + (now - self._since) * self.rate
        self._served = served = served if served > self._shown else self._shown
        self._since = now
        return self._heap[0][2].first() if self._first() <= served else None


def fill(pools: Iterable[Pool], through: Iterable[Group]) -> tuple[list[float], dict[Group, float]]:
    """Find the levels of shared lines, and the rates of the groups that connect them.

    ``pools`` are all that one of the groups ``through`` crosses, and these are all that cross
    several shared lines of which one is there. All rates rise together, until a line is full or a
    cap is reached; who is held back by that has its rate, and the others go on.
    """
    load, users = dict.fromkeys(pools, 0.0), dict.fromkeys(pools, 0)
    order = sorted(through, key=lambda group: (group.cap, group.place), reverse=True)
    for group in order:
        for pool in group.pools:
            users[pool] += group.flows
    # A line's level never falls as others are served, so a stale entry is only too small.
    heap = [
        (pool.level(0.0, count), place, pool) for place, (pool, count) in enumerate(users.items())
    ]
    heapify(heap)
    rates: dict[Group, float] = {}
    while order:
        lowest = order[-1]
        if lowest in rates:
            order.pop()
            continue
        level, place, pool = heap[0]
        held = [lowest]
        if lowest.cap > level:
            if not users[pool]:
                heappop(heap)
                continue
            now = pool.level(load[pool], users[pool])
            if now > level * (1 + _CLOSE):
                heapreplace(heap, (now, place, pool))
                continue
            heappop(heap)
            held = [group for group in pool.through if group not in rates]
        for group in held:
            rates[group] = rate = min(group.cap, level)
            for crossed in group.pools:
                load[crossed] += rate * group.flows
                users[crossed] -= group.flows
    return [pool.level(load[pool], 0) for pool in load], rates
