"""Tests of programs on aiops: in virtual time, over a network in memory, with faults on demand.

Servers and clients are the real ones. Waiting takes no real time, and a test runs the same way
every time, on every machine::

    import aiops
    from aiops import testing

    async def main():
        async with aiops.serve(policy="my_package.mine:Mine") as server:
            async with aiops.AsyncWorker(server.url, params) as worker:
                ...

    testing.run(main())

`docs/testing.md` has examples. The module offers:

- `run`, which runs a coroutine in virtual time, and `virtual`, which makes a coroutine function a
  test that does; `network` returns the network that its connections cross;
- `play`, which schedules faults, and `Network.after`, which places one between two bytes;
- `until`, which waits until a condition holds;
- `ServerMachine`, a server that crashes, loses its power, fills its disk, and comes back;
- `points` at which a process can be ended: `crash_at` does so in a real one (`FaultyDisk`);
- `Cluster` and `simulate`, which train a whole cluster and return its time, the workers' idle time
  and staleness, and the learning curve (with the server's `Config`, `StarTopology`, `Cut`,
  `Silence`, `Kill`, `Join`, the models of compute time `Fixed`, `LogNormal`, `Straggler`,
  `Diurnal`, and the workload `Deadweight`; `aiops.lab.workloads.PerceptronWorkload` is one on real
  data).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from aiops.errors import UsageError
from aiops.net.faults import crash_at
from aiops.net.faulty_disk import FaultyDisk, points
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Computing, Diurnal, Fixed, LogNormal, Straggler
from aiops.sim.cluster.result import ClusterResult, ClusterSample, WorkerUsage
from aiops.sim.cluster.run import simulate
from aiops.sim.cluster.spec import Cluster, Cut, Join, Kill, Silence, StarTopology
from aiops.sim.cluster.workload import Deadweight, Workload
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.host import Host
from aiops.sim.virtual.links import SimulatedLink
from aiops.sim.virtual.loop import Deadlock, VirtualLoop
from aiops.sim.virtual.network import Network
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.sim.virtual.world import World

__all__ = [
    "Cluster",
    "ClusterResult",
    "ClusterSample",
    "Computing",
    "Config",
    "Cut",
    "Deadlock",
    "Deadweight",
    "Diurnal",
    "FaultyDisk",
    "Fixed",
    "Host",
    "Join",
    "Kill",
    "LogNormal",
    "Network",
    "ServerMachine",
    "Silence",
    "SimulatedLink",
    "StarTopology",
    "Straggler",
    "VirtualDisk",
    "VirtualLoop",
    "WorkerUsage",
    "Workload",
    "crash_at",
    "network",
    "play",
    "points",
    "run",
    "simulate",
    "until",
    "virtual",
]

T = TypeVar("T")
P = ParamSpec("P")

LIMIT = 86400.0
"""Virtual seconds that `run` allows by default: a day."""


def run(
    main: Coroutine[Any, Any, T],
    *,
    seed: int = 0,
    limit: float = LIMIT,
    pieces: int | None = None,
    apply_seconds: Callable[[int], float] | None = None,
) -> T:
    """Run a coroutine in virtual time, and return its result.

    Time moves only when every task waits, and then to the next timer or arrival. Servers and
    clients that are made in the coroutine take their clocks and their entropy from it. An exception
    in a callback is raised here, and not only logged.

    >>> async def main():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(main())
    3600.0

    Parameters
    ----------
    main
        The coroutine. Tasks that it leaves behind are cancelled.
    seed
        Of everything that is random.
    limit
        Virtual seconds that it may take.
    pieces
        The most bytes that arrive at once, a random number each time; None: all there are.
    apply_seconds
        From the bytes that an update touches to the seconds that a server takes for it; None: no
        time.

    Raises
    ------
    Deadlock
        When every task waits and no timer runs; the text lists the tasks and where each waits.
    DeadlineExceeded
        When the limit is reached.
    """
    try:
        world = World(seed=seed, limit=limit, pieces=pieces, apply_seconds=apply_seconds)
    except UsageError:
        main.close()
        raise
    return world.run(main)


def virtual(**settings: Any) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]:
    """Make a coroutine function an ordinary one, such as a test, that runs in virtual time.

    >>> @virtual(seed=3)
    ... async def test_an_hour(seconds=3600.0):
    ...     await asyncio.sleep(seconds)
    ...     assert asyncio.get_running_loop().time() == seconds
    >>> test_an_hour()

    Parameters
    ----------
    settings
        Keyword arguments of `run`.
    """

    def wrap(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            return run(function(*args, **named), **settings)

        return call

    return wrap


async def until(check: Callable[[], bool], what: str, limit: float = 60.0) -> None:
    """Wait, in virtual time, until a condition holds.

    The condition is checked whenever time is about to go on.

    >>> async def main():
    ...     done = []
    ...     asyncio.get_running_loop().call_later(5, done.append, "it")
    ...     await until(lambda: bool(done), "it is done")
    ...     return asyncio.get_running_loop().time()
    >>> run(main())
    5.0

    Parameters
    ----------
    check
        The condition. An exception of it is raised here.
    what
        The condition in words, for the error.
    limit
        Virtual seconds.

    Raises
    ------
    DeadlineExceeded
        When it does not hold within the limit; the text lists the tasks and where each waits.
    UsageError
        Outside of `run`.
    """
    await network().loop.until(check, what, limit)


def network() -> Network:
    """Return the network that the connections of the running coroutine cross.

    `Network.add` describes a host, `Network.at` places tasks and connections on one, `Network.cut`
    breaks its connections, and `Network.after` does so between two bytes.

    Raises
    ------
    UsageError
        Outside of `run`.
    """
    here = asyncio.get_running_loop()
    found = here.network if isinstance(here, VirtualLoop) else None
    if not isinstance(found, Network):
        raise UsageError(
            "there is no simulated network here: use it in a coroutine that run() runs"
        )
    return found


def play(script: str) -> None:
    """Schedule faults: one a line, as seconds from now, a fault, and a host's name.

    >>> async def main():
    ...     play('''
    ...         0.5  cut      alice
    ...         2    silence  bob
    ...         4.5  restore  bob
    ...     ''')
    >>> run(main())

    Raises
    ------
    UsageError
        When a line cannot be read, or outside of `run`.
    """
    network().play(script)
