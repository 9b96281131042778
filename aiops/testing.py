"""Test what you build on aiops: in virtual time, over a network in memory, with faults on demand.

Servers and clients are the real ones. What they wait for takes no time, and the same test does the
same every time, on every machine::

    import aiops
    from aiops import testing

    async def main():
        async with aiops.serve(policy="my_package.mine:Mine") as server:
            async with aiops.AsyncWorker(server.url, params) as worker:
                ...

    testing.run(main())

`docs/testing.md` shows how; this module is all that is needed:

- `run` runs a coroutine in virtual time, and `virtual` makes of a coroutine function a test that
  does; `network` is what its connections cross;
- `play` has faults happen at stated times, and `Network.after` between two bytes;
- `until` waits until something is so;
- `Cluster` and `simulate` train a whole cluster: how long does it take, how idle are the workers,
  what staleness do they see, what is learnt (with `Links`, `Cut`, `Silence`, `Kill`, `Join`, the
  models of compute time `Fixed`, `LogNormal`, `Straggler`, `Diurnal`, and the workload
  `Deadweight`; `aiops.lab.workloads.PerceptronWorkload` is one on real data).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from aiops.errors import UsageError
from aiops.sim.cluster.computing import Computing, Diurnal, Fixed, LogNormal, Straggler
from aiops.sim.cluster.course import simulate
from aiops.sim.cluster.outcome import Labour, Outcome, Sample
from aiops.sim.cluster.spec import Cluster, Cut, Join, Kill, Links, Silence
from aiops.sim.cluster.workload import Deadweight, Workload
from aiops.sim.virtual import faults, waiting
from aiops.sim.virtual.host import Host
from aiops.sim.virtual.loop import Deadlock, VirtualLoop
from aiops.sim.virtual.network import Network
from aiops.sim.virtual.sharing import Line
from aiops.sim.virtual.world import World

__all__ = [
    "Cluster",
    "Computing",
    "Cut",
    "Deadlock",
    "Deadweight",
    "Diurnal",
    "Fixed",
    "Host",
    "Join",
    "Kill",
    "Labour",
    "Line",
    "Links",
    "LogNormal",
    "Network",
    "Outcome",
    "Sample",
    "Silence",
    "Straggler",
    "VirtualLoop",
    "Workload",
    "network",
    "play",
    "run",
    "simulate",
    "until",
    "virtual",
]

T = TypeVar("T")
P = ParamSpec("P")

LIMIT = 86400.0
"""Virtual seconds that a test may take, unless it says otherwise: a day."""


def run(
    main: Coroutine[Any, Any, T],
    *,
    seed: int = 0,
    limit: float = LIMIT,
    pieces: int | None = None,
    apply_seconds: Callable[[int], float] | None = None,
) -> T:
    """Run a coroutine in virtual time, and return its result.

    Time moves only when everybody waits, and then to the next thing that is due. Servers and
    clients that are made in it take their clocks and their entropy from it. An exception in a
    callback is raised here, and not only logged.

    >>> async def main():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(main())
    3600.0

    Parameters
    ----------
    main
        What to run. Tasks that it leaves behind are cancelled.
    seed
        Of everything that is random.
    limit
        Virtual seconds that it may take.
    pieces
        At most so many bytes arrive at once, a random number of them each time; None: all.
    apply_seconds
        How long a server works on an update, of the bytes that it touches; None: no time.

    Raises
    ------
    Deadlock
        When everybody waits and no timer runs; the text says who waits where.
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
    """Make of a coroutine function one that runs it in virtual time, such as a test.

    >>> @virtual(seed=3)
    ... async def test_an_hour(seconds=3600.0):
    ...     await asyncio.sleep(seconds)
    ...     assert asyncio.get_running_loop().time() == seconds
    >>> test_an_hour()

    Parameters
    ----------
    settings
        As of `run`.
    """

    def wrap(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            return run(function(*args, **named), **settings)

        return call

    return wrap


async def until(check: Callable[[], bool], what: str, limit: float = 60.0) -> None:
    """Wait, in virtual time, until something is so.

    It is looked at whenever nothing more happens at a moment, before time goes on.

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
        Says whether it is so. What it raises is raised here.
    what
        What is waited for, for the error.
    limit
        Virtual seconds.

    Raises
    ------
    DeadlineExceeded
        When it is not so within the limit; the text says who waits where.
    UsageError
        Outside of `run`.
    """
    await waiting.until(network().loop, check, what, limit)


def network() -> Network:
    """Return the network that the connections of the running coroutine cross.

    Describe its hosts (`Network.add`), be on one (`Network.at`), break one (`Network.cut`), now or
    between two bytes (`Network.after`).

    Raises
    ------
    UsageError
        Outside of `run`.
    """
    here = asyncio.get_running_loop()
    if not isinstance(here, VirtualLoop) or here.network is None:
        raise UsageError(
            "there is no simulated network here: use it in a coroutine that run() runs"
        )
    return here.network


def play(script: str) -> None:
    """Have faults happen at stated times from now: see `aiops.sim.virtual.faults.play`.

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
        When a line makes no sense, or outside of `run`.
    """
    faults.play(network(), script)
