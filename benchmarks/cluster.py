"""The cluster benchmark: how fast virtual time passes, in messages a second on one core.

    python -m benchmarks.cluster [--clients 64] [--seconds 2] [--rounds 5] [--json out.json]

*bare* is what the simulation itself takes: protocols that answer each other with 100 bytes over the
network in memory, without limits and through a server's link of 1 Gbit/s. The others are real
clients and a real server over it (pings, exchanges of 400 bytes), and a whole simulated cluster;
there most of the time is the clients' and the server's own. Time is the processor's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import aiops
from aiops.config import Config
from aiops.errors import UsageError
from aiops.sim.virtual.world import World
from aiops.testing import Cluster, Deadweight, Host, Line, Links, LogNormal, simulate
from benchmarks import report

_GBIT = 125e6  # bytes per second
_LATENCY = 1e-4
_THINK = 1e-3  # seconds between two requests of a client
_PORT = 7171


@dataclass(frozen=True)
class Options:
    """What to measure."""

    clients: int = 64
    seconds: float = 2.0
    rounds: int = 5


class _Player(asyncio.BufferedProtocol):
    """Answers whatever comes with 100 bytes, until time is up."""

    def __init__(self, until: float) -> None:
        self._until, self._room = until, memoryview(bytearray(1024))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        if time.process_time() < self._until:
            self._transport.write(bytes(100))
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def serve(self) -> None:
        """Begin a rally."""
        self._transport.write(bytes(100))


async def _bare(world: World, clients: int, until: float) -> None:
    loop = asyncio.get_running_loop()
    with world.network.at("server"):
        await loop.create_server(lambda: _Player(until), "127.0.0.1", _PORT)
    players = []
    for number in range(clients):
        with world.network.at(f"client-{number}"):
            _transport, player = await loop.create_connection(
                lambda: _Player(until), "127.0.0.1", _PORT
            )
        await asyncio.sleep(_THINK / 7)  # they are not in step
        players.append(player)
        player.serve()
    await asyncio.gather(*(player.ended for player in players))


async def _real(world: World, clients: int, until: float, *, exchange: bool) -> None:
    arrays = {"w": np.ones(100, np.float32)}

    async def talk(url: str, number: int) -> None:
        async with aiops.AsyncClient(url, role="worker", name=f"client-{number}") as client:
            params = await client.define(arrays)
            await asyncio.sleep(_THINK * number / clients)
            while time.process_time() < until:
                await asyncio.sleep(_THINK)
                await (client.exchange(params, arrays) if exchange else client.ping())

    with world.network.at("server"):
        serving = aiops.serve(policy="asgd")
        server = await serving.__aenter__()
    talks = []
    for number in range(clients):
        with world.network.at(f"client-{number}"):
            talks.append(asyncio.ensure_future(talk(server.url, number)))
    await asyncio.gather(*talks)
    await serving.__aexit__(None, None, None)


def _measure(
    options: Options, rate: float | None, run: Callable[[World, int, float], Awaitable[None]]
) -> float:
    world = World()
    if rate is not None:
        world.network.add(Host("server", (Line(rate),), (Line(rate),), _LATENCY))

    async def main() -> None:
        await run(world, options.clients, time.process_time() + options.seconds)

    begin = time.process_time()
    world.run(main())
    return world.network.messages / (time.process_time() - begin)


def _cluster(options: Options) -> float:
    links = Links(worker="1Gbit/s", server="1Gbit/s", latency=_LATENCY)
    cluster = Cluster(
        server=Config(policy="fasgd"),
        workers=options.clients,
        workload=Deadweight(400),
        computing=LogNormal(0.1),
        links=links,
        gradients=int(2000 * options.seconds),
    )
    begin = time.process_time()
    return simulate(cluster).messages / (time.process_time() - begin)


_CASES: Mapping[str, Callable[[Options], float]] = {
    "bare, no limits": lambda options: _measure(options, None, _bare),
    "bare, 1 Gbit/s": lambda options: _measure(options, _GBIT, _bare),
    "pings, 1 Gbit/s": lambda options: _measure(
        options, _GBIT, lambda *where: _real(*where, exchange=False)
    ),
    "exchanges, 1 Gbit/s": lambda options: _measure(
        options, _GBIT, lambda *where: _real(*where, exchange=True)
    ),
    "cluster, FASGD": _cluster,
}


def run(options: Options, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: messages a second, by case.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    if min(options.clients, options.rounds) < 1 or not options.seconds > 0:
        raise UsageError("clients, rounds and seconds are positive")
    about = report.machine()
    _cluster(replace(options, seconds=0.1))  # kernels are compiled
    found: dict[str, list[float]] = {name: [] for name in _CASES}
    for number, name in itertools.product(range(options.rounds), _CASES):
        found[name].append(_CASES[name](options))
        say(f"round {number + 1}, {name}: {found[name][-1]:,.0f} messages/s")
    cases = {name: report.spread(rates) | {"rounds": rates} for name, rates in found.items()}
    return {"benchmark": "cluster", "machine": about, "options": asdict(options), "cases": cases}


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    rows = [
        [name, f"{case['median']:,.0f}", f"{case['min']:,.0f}-{case['max']:,.0f}"]
        for name, case in result["cases"].items()
    ]
    options = result["options"]
    title = (
        f"Virtual time with {options['clients']} clients, messages a second on one core; medians"
        f" over {options['rounds']} rounds"
    )
    return report.table(title, ("what", "messages/s", "min-max"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.cluster", description=__doc__.partition("\n")[0])
    standard = Options()
    parser.add_argument("--clients", type=int, default=standard.clients)
    parser.add_argument("--seconds", type=float, default=standard.seconds, help="per case")
    parser.add_argument("--rounds", type=int, default=standard.rounds)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""

    def measure(chosen: dict[str, Any]) -> dict[str, Any]:
        return run(replace(Options(), **chosen), report.say)

    report.main(_parser(), measure, table, argv)


if __name__ == "__main__":
    main()
