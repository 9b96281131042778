"""Max-min fair sharing of links: the scheduler agrees with a plain one on any flows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiops import testing
from aiops.sim.virtual.fair_sharing import FlowScheduler
from aiops.sim.virtual.links import LinkFlow, SimulatedLink
from aiops.testing import Host
from tests.sim.virtual.plain_sharing import PlainScheduler, share

RATES = (1.0, 2.0, 3.0, 10.0, 10.0, 100.0)


@dataclass(frozen=True)
class Crossing:
    """A flow of a scenario."""

    begins: float
    nbytes: float
    path: tuple[int, ...]
    dropped: float = inf
    """When it is thrown away, if it has not crossed by then."""


class Noted(LinkFlow):
    """A flow that is noted in a list when it has crossed."""

    def __init__(self, path: tuple[SimulatedLink, ...], over: list[Noted]) -> None:
        super().__init__(path)
        self.over = over

    def crossed(self) -> None:
        self.over.append(self)


def play(
    traffic: FlowScheduler | PlainScheduler, rates: Sequence[float], crossings: Sequence[Crossing]
) -> tuple[list[float], list[int]]:
    """Return when each flow has crossed (infinity: it was dropped), and the order in which."""
    lines = [SimulatedLink(rate) for rate in rates]
    over: list[Noted] = []
    flows = [Noted(tuple(lines[index] for index in one.path), over) for one in crossings]
    numbers = {flow: number for number, flow in enumerate(flows)}
    events = [(one.begins, 1, number) for number, one in enumerate(crossings)]
    events += [(one.dropped, 0, number) for number, one in enumerate(crossings)]
    events = sorted((event for event in events if event[0] < inf), reverse=True)
    crossed, order, now, begun = [inf] * len(flows), list[int](), 0.0, set[int]()
    while (ahead := traffic.settle(now)) < inf or events:
        now = min(ahead, events[-1][0] if events else inf)
        traffic.advance(now)
        for flow in over:
            crossed[numbers[flow]] = now
            order.append(numbers[flow])
        over.clear()
        while events and events[-1][0] <= now:
            _when, begins, number = events.pop()
            if begins:
                begun.add(number)
                traffic.begin(flows[number], crossings[number].nbytes, now)
            elif number in begun and crossed[number] == inf:
                traffic.leave(flows[number], now)
    assert not any(line.flows for line in lines)
    return crossed, order


def agree(rates: Sequence[float], crossings: Sequence[Crossing]) -> None:
    """Check that traffic goes as in the plain way."""
    crossed, plainly = (
        # One that crosses in the moment in which it is dropped may do either, as sums are rounded.
        [min(when, one.dropped) for when, one in zip(whens, crossings, strict=True)]
        for whens in (play(kind(), rates, crossings)[0] for kind in (FlowScheduler, PlainScheduler))
    )
    assert crossed == pytest.approx(plainly, rel=1e-9, abs=1e-6)


numbers = st.integers(0, 60).map(lambda tenths: tenths / 10)


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[float], list[Crossing]]:
    """Lines, and flows over some of them that begin, cross and are dropped."""
    rates = draw(st.lists(st.sampled_from(RATES), min_size=1, max_size=6))
    path = st.lists(st.integers(0, len(rates) - 1), min_size=1, max_size=3, unique=True).map(tuple)
    crossing = st.builds(
        Crossing,
        begins=numbers,
        nbytes=st.integers(0, 200).map(float),
        path=path,
        dropped=st.one_of(st.just(inf), st.just(inf), numbers),
    )
    return rates, draw(st.lists(crossing, min_size=1, max_size=14))


@st.composite
def stars(draw: st.DrawFn) -> tuple[list[float], list[Crossing]]:
    """A line that all share, and one for each: some of these are what limits, and some are not."""
    workers = draw(st.integers(2, 12))
    own = draw(st.lists(st.sampled_from(RATES), min_size=workers, max_size=workers))
    crossing = st.builds(
        lambda begins, nbytes, worker: Crossing(begins, float(nbytes), (worker + 1, 0)),
        numbers,
        st.integers(1, 100),
        st.integers(0, workers - 1),
    )
    return [20.0, *own], draw(st.lists(crossing, min_size=1, max_size=30))


class TestAgainstThePlainWay:
    @settings(deadline=None)
    @example(
        ([1.0], [Crossing(0.7, 4.0, (0,), dropped=4.8), Crossing(4.6, 1.0, (0,))])  # due at 4.8
    )
    @given(scenarios())
    def test_any_lines_and_flows(self, scenario: tuple[list[float], list[Crossing]]) -> None:
        agree(*scenario)

    @settings(deadline=None)
    @given(stars())
    def test_a_server_and_its_workers(self, scenario: tuple[list[float], list[Crossing]]) -> None:
        agree(*scenario)

    @pytest.mark.parametrize("seed", range(4))
    def test_racks(self, seed: int) -> None:
        """Workers' lines, two racks' and a server's: hundreds of flows, dozens at a time."""
        rng = np.random.default_rng(seed)
        rates = [100.0, 60.0, 60.0, *rng.uniform(1, 20, 20)]
        crossings = []
        for _ in range(150):
            worker, begins = int(rng.integers(20)), float(rng.uniform(0, 30))
            dropped = begins + float(rng.uniform(0, 4)) if rng.random() < 0.2 else inf
            path = (3 + worker, 1 + worker % 2, 0)
            crossings.append(Crossing(begins, float(rng.uniform(1, 100)), path, dropped))
        agree(rates, crossings)


class TestRates:
    def test_a_flow_can_have_more_only_from_one_that_has_no_more(self) -> None:
        """The definition of max-min fairness, on random networks."""
        rng = np.random.default_rng(0)
        for _ in range(100):
            lines = [SimulatedLink(float(rng.uniform(1, 100))) for _ in range(rng.integers(1, 6))]
            traffic, flows = FlowScheduler(), []
            for _ in range(rng.integers(1, 12)):
                count = rng.integers(1, len(lines) + 1)
                flows.append(LinkFlow(tuple(rng.choice(np.array(lines), count, replace=False))))
                traffic.begin(flows[-1], 100.0, 0.0)
            traffic.settle(0.0)
            for line in lines:
                assert sum(flow.speed for flow in line.flows) <= line.rate * (1 + 1e-9)
            for flow in flows:
                full = [
                    line
                    for line in flow.path
                    if sum(other.speed for other in line.flows) >= line.rate * (1 - 1e-9)
                ]
                assert any(
                    flow.speed >= max(other.speed for other in line.flows) * (1 - 1e-9)
                    for line in full
                ), "no line holds this flow back"
            assert {flow: flow.speed for flow in flows} == pytest.approx(share(flows))

    def test_a_flow_alone_has_its_thinnest_line(self) -> None:
        flow, traffic = LinkFlow((SimulatedLink(7.0), SimulatedLink(3.0))), FlowScheduler()
        traffic.begin(flow, 6.0, 1.0)
        assert (traffic.settle(1.0), flow.speed) == (3.0, 3.0)


class TestOrder:
    def test_equals_end_together_and_who_began_first_is_first(self) -> None:
        """To the last bit: workers in step stay in step."""
        rates = [10.0] * 9
        crossings = [Crossing(0.0, 7.0, (number + 1, 0)) for number in range(8)]
        crossed, order = play(FlowScheduler(), rates, crossings)
        assert len(set(crossed)) == 1
        assert crossed[0] == pytest.approx(5.6)
        assert order == list(range(8))

    def test_who_is_held_back_by_a_line_of_its_own_leaves_the_rest(self) -> None:
        slow, fast = Crossing(0.0, 20.0, (1, 0)), Crossing(0.0, 20.0, (2, 0))
        crossed, order = play(FlowScheduler(), [10.0, 2.0, 100.0], [slow, fast, fast])
        assert crossed == pytest.approx([10.0, 5.0, 5.0])
        assert order == [1, 2, 0]


class TestCost:
    def test_a_change_does_not_concern_the_others(self) -> None:
        """Of a thousand equal flows on one line none is told when one more begins or ends."""
        traffic, shared = FlowScheduler(), SimulatedLink(1000.0)
        flows = [LinkFlow((SimulatedLink(10.0), shared)) for _ in range(1000)]
        for number, flow in enumerate(flows):
            traffic.begin(flow, 100.0 + number, 0.0)
        traffic.settle(0.0)
        marks = [flow.mark for flow in flows]
        assert len({flow.group for flow in flows}) == 1
        traffic.leave(flows[500], 3.0)
        traffic.settle(3.0)
        traffic.begin(flows[500], 50.0, 6.0)
        traffic.settle(6.0)
        assert [flow.mark for flow in flows if flow is not flows[500]] == [
            mark for number, mark in enumerate(marks) if number != 500
        ]
        assert flows[0].speed == pytest.approx(1.0)


async def exchange(seed: int, plain: bool) -> list[tuple[float, str, int]]:
    """Have hosts of all kinds write to a server, and be cut; return what arrived when."""
    network, loop = testing.network(), asyncio.get_running_loop()
    if plain:
        network.medium.scheduler = cast(FlowScheduler, PlainScheduler())
        network.loop.flow_scheduler = network.medium.scheduler
    rng = np.random.default_rng(seed)
    rack = SimulatedLink(3000.0)
    network.add(
        Host("server", (SimulatedLink(4000.0),), (SimulatedLink(4000.0, burst=500.0),), 0.01)
    )
    arrived: list[tuple[float, str, int]] = []

    class Listening(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.name = transport.get_extra_info("peername")[0]

        def data_received(self, data: bytes) -> None:
            arrived.append((loop.time(), self.name, len(data)))

    with network.at("server"):
        await loop.create_server(Listening, "127.0.0.1", 7)
    for number in range(8):
        line, latency = (
            SimulatedLink(float(rng.choice([500.0, 1000.0, 8000.0]))),
            float(rng.uniform(0, 0.2)),
        )
        up = (line, rack) if number % 2 else (line,)
        network.add(Host(f"client-{number}", up, (), latency))
        with network.at(f"client-{number}"):
            transport, _protocol = await loop.create_connection(asyncio.Protocol, "server", 7)
        for _ in range(10):
            loop.call_later(
                float(rng.uniform(0, 20)), transport.write, bytes(rng.integers(1, 2000))
            )
    testing.play("4 cut client-1\n7.5 cut client-2\n9 silence client-3\n11 restore client-3")
    await asyncio.sleep(200)
    return arrived


class TestNetwork:
    @pytest.mark.parametrize("seed", range(6))
    def test_bytes_arrive_when_the_plain_way_has_them(self, seed: int) -> None:
        fast, plain = (testing.run(exchange(seed, way)) for way in (False, True))
        assert len(fast) > 60
        assert [what[1:] for what in fast] == [what[1:] for what in plain]
        assert [when for when, *_what in fast] == pytest.approx([when for when, *_what in plain])
