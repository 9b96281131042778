"""Max-min fair sharing of links: at which rate each flow crosses, and when it has crossed.

Rates are *max-min fair*: a flow can only have more if another one, which has no more than it, has
less (Bertsekas and Gallager, *Data Networks*, 1992, section 6.5.2). On a single link that is
processor sharing. `FlowScheduler` decides and never waits: it is told the time, and returns when it
is to be called again.

>>> thin, thick = SimulatedLink(10.0), SimulatedLink(100.0)
>>> one, two = LinkFlow((thin, thick)), LinkFlow((thick,))
>>> scheduler = FlowScheduler()
>>> scheduler.begin(one, 50, now=0.0), scheduler.begin(two, 180, now=0.0)
(None, None)
>>> scheduler.settle(0.0), one.speed, two.speed
(2.0, 10.0, 90.0)
>>> scheduler.advance(2.0), scheduler.settle(2.0), one.speed, two.speed
(None, 5.0, 10.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from aiops.sim.virtual.links import FlowGroup, LinkFlow, SimulatedLink


class FlowScheduler:
    """All the flows of a network.

    Flows begin (`begin`) and end (`leave`) at any time. Rates are found when time is about to go on
    (`settle`), once for all changes of a moment. The cost of a change grows with the groups that
    shared links connect, and not with the flows in them: workers with equal links are one group.

    Attributes
    ----------
    waiting
        Flows that are told to begin when time is about to go on (`LinkFlow.ready`).
    unsettled
        Whether flows have begun or ended since `settle`, or wait.
    next_due
        The time that `settle` returned last.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[SimulatedLink, ...], float], FlowGroup] = {}
        # Times at which flows or groups are due; an entry is stale if their `when` is another.
        self._due: list[tuple[float, int, LinkFlow | FlowGroup]] = []
        self.waiting: list[LinkFlow] = []
        self.unsettled, self.next_due = False, inf
        self._count = 0
        self._moved: dict[LinkFlow, None] = {}  # flows that may belong to another group now
        self._resized: dict[FlowGroup, None] = {}  # groups that flows have joined or left

    def begin(self, flow: LinkFlow, nbytes: float, now: float) -> None:
        """Begin a flow of ``nbytes`` bytes."""
        self.unsettled = True
        self._count += 1
        flow.place, flow.left, flow.since, flow.rate, flow.when = self._count, nbytes, now, 0.0, inf
        alone, rate = True, inf
        for link in flow.path:
            flows = link.flows
            if flows:
                alone = False
                if len(flows) == 1:
                    self._moved.update(flows)
            elif link.rate < rate:
                rate = link.rate
            flows[flow] = None
        if alone:
            flow.rate, flow.when = rate, now + nbytes / rate
            self._count += 1
            heappush(self._due, (flow.when, self._count, flow))
        else:
            self._moved[flow] = None

    def leave(self, flow: LinkFlow, now: float) -> None:
        """End a flow, whether it has crossed or not."""
        self.unsettled = True
        if flow.group is not None:
            self._drop(flow, flow.group)
        self._moved.pop(flow, None)
        flow.when, flow.rate = inf, 0.0
        for link in flow.path:
            flows = link.flows
            del flows[flow]
            if not flows:
                if link.burst:
                    link.idle(now)
            elif len(flows) == 1:
                self._moved.update(flows)

    def advance(self, now: float) -> None:
        """End the flows that have crossed by now, and tell each (`LinkFlow.crossed`)."""
        due = self._due
        while due and due[0][0] <= now:
            when, _count, one = due[0]
            if one.when == when:
                flow = one if isinstance(one, LinkFlow) else one.take(now)
                if flow is not None:
                    self.leave(flow, now)
                    flow.crossed()
                    continue
                one.when, self.unsettled = inf, True
            heappop(due)

    def settle(self, now: float) -> float:
        """Begin the flows that wait, and find the rates again where flows have begun or ended.

        Returns
        -------
        float
            The time, in seconds, at which the next flow has crossed; infinite: there is none.
        """
        while self.waiting:  # a flow that begins may have others wait
            waiting, self.waiting = self.waiting, []
            for flow in waiting:
                flow.ready()
        if self._moved:
            moved, self._moved = self._moved, {}
            for flow in moved:
                self._assign(flow, now)
        if self._resized:
            self._share(now)
        due = self._due
        while due and due[0][2].when != due[0][0]:
            heappop(due)
        self.unsettled, self.next_due = False, due[0][0] if due else inf
        return self.next_due

    # ------------------------------------------------------------ groups

    def _assign(self, flow: LinkFlow, now: float) -> None:
        """Put a flow into the group of those with the same shared links and cap, or into none."""
        cap, shared = inf, []
        for link in flow.path:
            if len(link.flows) > 1:
                shared.append(link)
            elif link.rate < cap:
                cap = link.rate
        left, old = flow.remaining(now), flow.group
        if not shared:
            if old is not None:
                self._drop(flow, old)
            if not flow.rate:
                flow.left, flow.since, flow.rate = left, now, cap
                self._set_due(flow, now + left / cap)
            return
        key = tuple(shared), cap
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = FlowGroup(*key)
            for link in shared:
                link.groups[group] = None
        if group is not old:
            if old is not None:
                self._drop(flow, old)
            group.add(flow, left, now)
            self._resized[group] = None

    def _drop(self, flow: LinkFlow, group: FlowGroup) -> None:
        group.drop(flow)
        self._resized[group] = None

    # ------------------------------------------------------------ rates

    def _share(self, now: float) -> None:
        """Find the rates of all groups that links connect with those that have changed."""
        resized, self._resized = self._resized, {}
        links: dict[SimulatedLink, None] = {}
        for group in resized:
            links.update(dict.fromkeys(group.links))
            if not group.size:
                group.when = inf
                del self._groups[group.links, group.cap]
                for link in group.links:
                    del link.groups[group]
        connected = _connected(links)
        for group, rate in max_min_rates(connected).items():
            if rate != group.rate or group in resized:
                self._set_due(group, group.pace(now, rate))

    def _set_due(self, one: LinkFlow | FlowGroup, when: float) -> None:
        if one.when != when:
            one.when = when
            self._count += 1
            heappush(self._due, (when, self._count, one))


def _connected(links: Iterable[SimulatedLink]) -> dict[FlowGroup, None]:
    """Return the groups that cross these links, or any link that such a group crosses."""
    seen, ahead = dict.fromkeys(links), list(links)
    groups: dict[FlowGroup, None] = {}
    while ahead:
        for group in ahead.pop().groups:
            if group not in groups:
                groups[group] = None
                for link in group.links:
                    if link not in seen:
                        seen[link] = None
                        ahead.append(link)
    return groups


def max_min_rates(groups: Iterable[FlowGroup]) -> dict[FlowGroup, float]:
    """Return the max-min fair rates, in bytes per second, of groups that cross only these links.

    Progressive filling: all rates rise together until a group reaches its cap or a link is full.
    The groups that this holds back keep their rate, and the others rise on (Bertsekas and Gallager,
    section 6.5.2).
    """
    rising = dict.fromkeys(groups)
    if len(rising) == 1:  # as with workers that have equal links
        (group,) = rising
        return {group: min(group.cap, min([link.rate for link in group.links]) / group.size)}
    free: dict[SimulatedLink, float] = {}
    flows: dict[SimulatedLink, int] = {}
    for group in rising:
        for link in group.links:
            free[link] = link.rate
            flows[link] = flows.get(link, 0) + group.size
    rates: dict[FlowGroup, float] = {}
    level = 0.0
    while rising:
        # A level never falls but by rounding: at least the last one, so that no rate becomes 0.
        levels = {link: max(free[link] / count, level) for link, count in flows.items() if count}
        level = min(levels.values())
        held = [group for group in rising if group.cap <= level]
        if not held:
            full = [link for link, least in levels.items() if least == level]
            crossing = dict.fromkeys(group for link in full for group in link.groups)
            held = [group for group in crossing if group in rising]
            if len(held) == len(rising):
                return rates | dict.fromkeys(held, level)
        for group in held:
            del rising[group]
            rates[group] = rate = min(group.cap, level)
            for link in group.links:
                free[link] -= rate * group.size
                flows[link] -= group.size
    return rates
