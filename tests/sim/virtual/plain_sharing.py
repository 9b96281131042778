"""A plain scheduler of flows: every flow is paced again at every change.

`aiops.sim.virtual.fair_sharing` must give the same rates and times, except for rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from aiops.sim.virtual.links import LinkFlow, SimulatedLink

_CLOSE = 1e-12


def share(flows: Iterable[LinkFlow]) -> dict[LinkFlow, float]:
    """Return the max-min fair rates of all flows that there are, in bytes per second."""
    rates: dict[LinkFlow, float] = {}
    paths = {flow: flow.path for flow in flows}
    while len(rates) < len(paths):
        fair: dict[SimulatedLink, float] = {}
        for line in dict.fromkeys(line for path in paths.values() for line in path):
            users = [flow for flow in line.flows if flow not in rates]
            if users:
                used = sum(rates[flow] for flow in line.flows if flow in rates)
                fair[line] = (line.rate - used) / len(users)
        lowest = min(fair.values())
        for line in fair:
            if fair[line] <= lowest * (1 + _CLOSE):
                for flow in line.flows:
                    rates.setdefault(flow, lowest)
    return rates


class PlainScheduler:
    """All the flows of a network; its methods are `FlowScheduler`'s."""

    unsettled = True

    def __init__(self) -> None:
        self._left: dict[LinkFlow, float] = {}
        self._rates: dict[LinkFlow, float] = {}
        self._since = 0.0
        self.waiting: list[LinkFlow] = []

    def begin(self, flow: LinkFlow, nbytes: float, now: float) -> None:
        self._go_on(now)
        self._left[flow] = nbytes
        for line in flow.path:
            line.flows[flow] = None

    def leave(self, flow: LinkFlow, now: float) -> None:
        self._go_on(now)
        del self._left[flow]
        self._rates.pop(flow, None)
        for line in flow.path:
            del line.flows[flow]
            if not line.flows:
                line.idle(now)

    def advance(self, now: float) -> None:
        self._go_on(now)
        while over := [
            flow
            for flow, left in self._left.items()
            if flow in self._rates and left <= 1e-9 * self._rates[flow]
        ]:
            self.leave(over[0], now)
            over[0].crossed()

    def settle(self, now: float) -> float:
        while self.waiting:
            self.waiting.pop(0).ready()
        self._go_on(now)
        self._rates = share(self._left)
        return min(
            (now + self._left[flow] / rate for flow, rate in self._rates.items()), default=inf
        )

    def rate(self, flow: LinkFlow) -> float:
        """Return what a flow is given now."""
        return self._rates[flow]

    def _go_on(self, now: float) -> None:
        for flow, rate in self._rates.items():
            self._left[flow] = max(self._left[flow] - rate * (now - self._since), 0.0)
        self._since = now
