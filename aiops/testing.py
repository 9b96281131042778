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

- `run` runs a coroutine in virtual time; `network` is what its connections cross;
- `play` has faults happen at stated times;
- `Cluster` and `simulate` train a whole cluster: how long does it take, how idle are the workers,
  what staleness do they see, what is learnt (with `Links`, `Cut`, `Kill`, `Join`, the models of
  compute time `Fixed`, `LogNormal`, `Straggler`, `Diurnal`, and the workloads `Training` and
  `Deadweight`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiops.errors import UsageError
from aiops.sim.cluster.computing import Computing, Diurnal, Fixed, LogNormal, Straggler
from aiops.sim.cluster.course import simulate
from aiops.sim.cluster.outcome import Labour, Outcome, Sample
from aiops.sim.cluster.spec import Cluster, Cut, Join, Kill, Links
from aiops.sim.cluster.workload import Deadweight, Training, Workload
from aiops.sim.virtual import faults
from aiops.sim.virtual.loop import Deadlock, VirtualLoop
from aiops.sim.virtual.network import Host, Network
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
    "Straggler",
    "Training",
    "VirtualLoop",
    "Workload",
    "network",
    "play",
    "run",
    "simulate",
]

T = TypeVar("T")

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


def network() -> Network:
    """Return the network that the connections of the running coroutine cross.

    Describe its hosts (`Network.add`), be on one (`Network.at`), break one (`Network.cut`).

    Raises
    ------
    UsageError
        Outside of `run`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop) or loop.network is None:
        raise UsageError(
            "there is no simulated network here: use it in a coroutine that run() runs"
        )
    return loop.network


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
