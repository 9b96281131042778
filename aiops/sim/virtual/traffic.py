"""What is on its way: who begins to cross lines, who ends when, and who shares with whom meanwhile.

A value of decisions alone: it is told the time, and says when it wants to be asked again.

>>> thin, thick = Line(10.0), Line(100.0)
>>> one, two = Flow((thin, thick)), Flow((thick,))
>>> traffic = Traffic()
>>> traffic.begin(one, 50, now=0.0), traffic.begin(two, 180, now=0.0)
(None, None)
>>> traffic.settle(0.0), one.speed, two.speed
(2.0, 10.0, 90.0)
>>> traffic.crossed(2.0) is two, traffic.settle(2.0)
(True, 5.0)
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from aiops.sim.virtual.pools import Group, Pool, fill
from aiops.sim.virtual.sharing import Flow, Line


class Traffic:
    """All the flows of a network.

    Flows begin (`begin`) and end (`leave`) at any time; how they share their lines is found when
    time is about to go on (`settle`), once for all that has happened at a moment.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[Line, ...], float], Group] = {}
        self._next: list[tuple[float, int, Flow | Group | Pool]] = []  # whose `when` it is, or was
        self._count = 0
        self._changed: dict[Flow, None] = {}  # whose lines are shared, or shared no more
        self._touched: dict[Group, None] = {}  # whose flows are others
        self._dirty: dict[Pool, None] = {}  # whose groups are others, or their flows

    def begin(self, flow: Flow, nbytes: float, now: float) -> None:
        """Have a flow of so many bytes begin."""
        self._count += 1
        flow.place, flow.left, flow.since, flow.rate, flow.when = self._count, nbytes, now, 0.0, inf
        alone, rate = True, inf
        for line in flow.path:
            flows = line.flows
            if flows:
                alone = False
                if len(flows) == 1:
                    self._changed.update(flows)
            elif line.rate < rate:
                rate = line.rate
            flows[flow] = None
        if alone:
            flow.rate = rate
            self._time(flow, now + nbytes / rate)
        else:
            self._changed[flow] = None

    def leave(self, flow: Flow, now: float) -> None:
        """Have a flow end, whether it has crossed or not."""
        if flow.group is not None:
            self._drop(flow, flow.group)
        self._changed.pop(flow, None)
        flow.when, flow.rate = inf, 0.0
        for line in flow.path:
            flows = line.flows
            del flows[flow]
            if not flows:
                line.idle(now)
            elif len(flows) == 1:
                self._changed.update(flows)

    def crossed(self, now: float) -> Flow | None:
        """Return a flow that has crossed by now, and has it end; None: nobody has."""
        ahead = self._next
        while ahead and ahead[0][0] <= now:
            when, _count, whose = ahead[0]
            if whose.when == when:
                flow = whose.take(now)
                if flow is not None:
                    self.leave(flow, now)
                    return flow
                whose.when = inf  # until it is settled
            heappop(ahead)
        return None

    def settle(self, now: float) -> float:
        """Share the lines anew whose users have changed; return when the next flow has crossed."""
        if self._changed:
            changed, self._changed = self._changed, {}
            for flow in changed:
                self._place(flow, now)
        if self._touched:
            self._tidy()
        while self._dirty:
            self._share(self._dirty.popitem()[0], now)
        if self._touched:
            for group in self._touched:
                if not group.rides:
                    self._time(group, group.ends(now))
            self._touched.clear()
        ahead = self._next
        while ahead and ahead[0][2].when != ahead[0][0]:
            heappop(ahead)
        return ahead[0][0] if ahead else inf

    # ------------------------------------------------------------ who shares with whom

    def _place(self, flow: Flow, now: float) -> None:
        """Put a flow in the group in which it belongs by now, or leave it alone."""
        cap, lines = inf, []
        for line in flow.path:
            if len(line.flows) > 1:
                lines.append(line)
            elif line.rate < cap:
                cap = line.rate
        left, old = flow.remaining(now), flow.group
        if not lines:
            if old is not None:
                self._drop(flow, old)
            if not flow.rate:
                flow.left, flow.since, flow.rate = left, now, cap
                self._time(flow, now + left / cap)
            return
        group = self._group(tuple(lines), cap)
        if group is not old:
            if old is not None:
                self._drop(flow, old)
            group.add(flow, left, now)
            self._touch(group)

    def _group(self, lines: tuple[Line, ...], cap: float) -> Group:
        found = self._groups.get((lines, cap))
        if found is None:
            pools = tuple([line.pool or _pool(line) for line in lines])
            self._count += 1
            found = self._groups[lines, cap] = Group(pools, cap, self._count)
            for pool in pools:
                pool.join(found)
        return found

    def _drop(self, flow: Flow, group: Group) -> None:
        rides = group.rides
        group.drop(flow)
        self._touch(group)
        if rides:
            group.pools[0].show(group)

    def _touch(self, group: Group) -> None:
        self._touched[group] = None
        for pool in group.pools:
            self._dirty[pool] = None

    def _tidy(self) -> None:
        """Forget the groups that are empty, and note who is now first in the others."""
        for group in list(self._touched):
            if not group.flows:
                group.when = inf
                del self._touched[group]
                del self._groups[tuple([pool.line for pool in group.pools]), group.cap]
                for pool in group.pools:
                    pool.part(group)
            elif group.rides:
                group.pools[0].show(group)

    # ------------------------------------------------------------ at what rates

    def _share(self, pool: Pool, now: float) -> None:
        """Find the level of a shared line, and of those that groups connect with it."""
        if not pool.through:
            self._level(pool, pool.level(0.0, 0), now)
            return
        pools, through = self._connected(pool)
        levels, rates = fill(pools, through)
        for one, level in zip(pools, levels, strict=True):
            self._level(one, level, now)
        for group, rate in rates.items():
            if rate != group.speed:
                group.pace(now, rate)
                self._touched[group] = None

    def _connected(self, pool: Pool) -> tuple[dict[Pool, None], dict[Group, None]]:
        """Return the shared lines that groups connect with one, and these groups."""
        pools, through, ahead = {pool: None}, dict[Group, None](), [pool]
        while ahead:
            for group in ahead.pop().through:
                if group not in through:
                    through[group] = None
                    for other in group.pools:
                        if other not in pools:
                            pools[other] = None
                            self._dirty.pop(other, None)
                            ahead.append(other)
        return pools, through

    def _level(self, pool: Pool, level: float, now: float) -> None:
        for group in pool.settle(now, level):
            self._touched[group] = None
        self._time(pool, pool.ends())

    def _time(self, whose: Flow | Group | Pool, when: float) -> None:
        """Note when the first of them has crossed."""
        if whose.when != when:
            whose.when = when
            if when < inf:
                self._count += 1
                heappush(self._next, (when, self._count, whose))


def _pool(line: Line) -> Pool:
    line.pool = Pool(line)
    return line.pool
