"""The cluster benchmark: the speed of virtual time, in messages a second on one core.

    python -m benchmarks.cluster [--clients 64] [--many 1000] [--seconds 2] [--rounds 5]
                                 [--json out.json] [--plot out.png]

*bare* is what the simulation itself takes: protocols that answer each other with 100 bytes (the
many, with 4,000) over the network in memory, without limits and at 1 Gbit/s. The others are real
clients and a real server over it (pings, exchanges of 400 bytes), and a whole simulated cluster;
there most of the time is the clients' and the server's own. *many* share the server's link and keep
it full: hundreds of messages are on it at any time. Time is the processor's.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np

import aiops
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.serving.config import Config
from aiops.sim.virtual.world import World
from aiops.testing import (
    Cluster,
    Deadweight,
    Host,
    LogNormal,
    SimulatedLink,
    StarTopology,
    simulate,
)
from benchmarks import plots, report
from benchmarks.compare import Cell

_GBIT = 125e6  # bytes per second
_LATENCY = 1e-4
_THINK = 1e-3  # seconds between two requests of a client
_PORT = 7171
_ASKED = 64  # calls of `up` between two readings of the clock
_BLOCK = 4000  # bytes of a message of the many
_MANY = ", many"  # a case's name ends so
_FULL = 40_000  # bytes of a model of which many workers fill the server's link


@dataclass(frozen=True)
class Options:
    """The settings of a measurement."""

    clients: int = 64
    many: Annotated[int, "clients on a full link"] = 1000
    seconds: Annotated[float, "per case"] = 2.0
    rounds: int = 5


class _Time:
    """A limit in seconds of the processor. Its clock is slow, so it is read now and then."""

    def __init__(self, seconds: float) -> None:
        self._end, self._asked, self._is_up = time.process_time() + seconds, 0, False

    def up(self) -> bool:
        """Return whether they are over."""
        self._asked += 1
        if not self._asked % _ASKED:
            self._is_up = self._is_up or time.process_time() >= self._end
        return self._is_up


class _Player(asyncio.BufferedProtocol):
    """Answers whatever comes with as many bytes, until time is up."""

    def __init__(self, limit: _Time, nbytes: int) -> None:
        self._time, self._data = limit, bytes(nbytes)
        self._room = memoryview(bytearray(nbytes))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        if not self._time.up():
            self._transport.write(self._data)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def serve(self) -> None:
        """Begin a rally."""
        self._transport.write(self._data)


async def _bare(world: World, clients: int, limit: _Time, nbytes: int = 100) -> None:
    loop = asyncio.get_running_loop()
    with world.network.at("server"):
        await loop.create_server(lambda: _Player(limit, nbytes), "127.0.0.1", _PORT)
    players = []
    for number in range(clients):
        with world.network.at(f"client-{number}"):
            _transport, player = await loop.create_connection(
                lambda: _Player(limit, nbytes), "127.0.0.1", _PORT
            )
        await asyncio.sleep(_THINK / 7)  # they are not in step
        players.append(player)
        player.serve()
    await asyncio.gather(*(player.ended for player in players))


async def _real(world: World, clients: int, limit: _Time, *, exchange: bool) -> None:
    arrays = {"w": np.ones(100, np.float32)}

    async def run_client(url: str, number: int) -> None:
        async with aiops.AsyncClient(url, role="worker", name=f"client-{number}") as client:
            params = await client.define(arrays)
            await asyncio.sleep(_THINK * number / clients)
            while not limit.up():
                await asyncio.sleep(_THINK)
                await (client.exchange(params, arrays) if exchange else client.ping())

    with world.network.at("server"):
        serving = aiops.serve(policy="asgd")
        server = await serving.__aenter__()
    running = []
    for number in range(clients):
        with world.network.at(f"client-{number}"):
            running.append(asyncio.ensure_future(run_client(server.url, number)))
    await asyncio.gather(*running)
    await serving.__aexit__(None, None, None)


def _measure(
    options: Options, rate: float | None, run: Callable[[World, int, _Time], Awaitable[None]]
) -> float:
    world = World()
    if rate is not None:
        names = {"server": _LATENCY, **{f"client-{n}": 0.0 for n in range(options.clients)}}
        for name, latency in names.items():
            up, down = SimulatedLink(rate), SimulatedLink(rate)
            world.network.add(Host(name, (up,), (down,), latency))

    async def main() -> None:
        await run(world, options.clients, _Time(options.seconds))

    begin = time.process_time()
    world.run(main())
    return world.network.messages / (time.process_time() - begin)


def _crowded(options: Options) -> Options:
    return replace(options, clients=options.many)


def _cluster(options: Options, nbytes: int = 400) -> float:
    links = StarTopology(worker="1Gbit/s", server="1Gbit/s", latency=_LATENCY)
    cluster = Cluster(
        server=Config(policy="fasgd"),
        workers=options.clients,
        workload=Deadweight(nbytes),
        computing=LogNormal(0.1),
        links=links,
        gradients=max(int(2000 * options.seconds), 4 * options.clients),
    )
    begin = time.process_time()
    return simulate(cluster).messages / (time.process_time() - begin)


_CASES: Mapping[str, Callable[[Options], float]] = {
    "bare, no limits": lambda options: _measure(options, None, _bare),
    "bare, 1 Gbit/s": lambda options: _measure(options, _GBIT, _bare),
    "bare, 1 Gbit/s" + _MANY: lambda options: _measure(
        _crowded(options), _GBIT, partial(_bare, nbytes=_BLOCK)
    ),
    "pings, 1 Gbit/s": lambda options: _measure(
        options, _GBIT, lambda *where: _real(*where, exchange=False)
    ),
    "exchanges, 1 Gbit/s": lambda options: _measure(
        options, _GBIT, lambda *where: _real(*where, exchange=True)
    ),
    "cluster, FASGD": _cluster,
    "cluster, FASGD" + _MANY: lambda options: _cluster(_crowded(options), _FULL),
}


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: messages a second, by case.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    if min(options.clients, options.many, options.rounds) < 1 or not options.seconds > 0:
        raise UsageError("clients, many, rounds and seconds are positive")
    about = machine()
    _cluster(replace(options, seconds=0.1))  # kernels are compiled
    found: dict[str, list[float]] = {name: [] for name in _CASES}
    for number, name in itertools.product(range(options.rounds), _CASES):
        gc.collect()  # a case does not pay for what the one before it has left
        found[name].append(_CASES[name](options))
        log(f"round {number + 1}, {name}: {found[name][-1]:,.0f} messages/s")
    cases = {name: report.spread(rates) | {"rounds": rates} for name, rates in found.items()}
    return record("benchmark", "cluster", options, {"cases": cases}, about)


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    rows = [
        [name, f"{case['median']:,.0f}", f"{case['min']:,.0f}-{case['max']:,.0f}"]
        for name, case in result["cases"].items()
    ]
    options = result["options"]
    title = (
        f"Virtual time with {options['clients']} clients (many: {options['many']:,}), messages a"
        f" second on one core; medians over {options['rounds']} rounds"
    )
    return report.table(title, ("what", "messages/s", "min-max"), rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for name, case in result["cases"].items():
        yield Cell.of(name, "messages/s", case)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw messages a second, a row for each case."""
    cases, options = result["cases"], result["options"]
    names = list(dict.fromkeys(name.removesuffix(_MANY) for name in cases))
    crowds = {f"{options['clients']} clients": "", f"{options['many']:,} clients": _MANY}
    lines = [
        plots.rows(
            label, {row: cases[name + end] for row, name in enumerate(names) if name + end in cases}
        )
        for label, end in crowds.items()
    ]
    panel = Panel("", "messages a second, one core", "", lines, log="x", ticks=names)
    return Figure("How fast virtual time passes", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the table of a report."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
