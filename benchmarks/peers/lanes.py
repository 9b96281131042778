"""aiops through its public `aiops.AsyncClient`: several requests under way on one connection.

Several coroutines (the setting ``lanes``) share a client, and each asks again as soon as it is
answered. What they ask for is the setting ``way``: a ``push``, a ``fetch`` of the whole model, or
an ``exchange``, which is both in one round trip.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers import ours
from benchmarks.peers.base import (
    Array,
    Job,
    Setting,
    Times,
    check_server,
    check_worker,
    gradient,
)
from benchmarks.peers.ours import ENVIRONMENT, check_transport, missing

if TYPE_CHECKING:
    from aiops.client.params import Params

__all__ = ["ENVIRONMENT", "SETTINGS", "WAYS", "Server", "Worker", "missing"]

WAYS = ("push", "fetch", "exchange")
SETTINGS: Mapping[str, Setting] = {**ours.SETTINGS, "lanes": 1, "way": "exchange"}

_SILENCE = "3600"  # seconds: between rounds the client's loop stands still, and answers no ping


class Server(ours.Server):
    """The real server."""

    def flags(self) -> list[str]:
        """Return its command-line flags."""
        return [*super().flags(), "--failure-timeout", _SILENCE]

    def check(self, cycles: int) -> None:
        """Fail unless every push was applied once."""
        check_server(self.parameters(), 0 if self._job.settings["way"] == "fetch" else cycles)


class Worker:
    """A client, an event loop that runs while requests do, and a model for each lane."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        self._job = job
        self._way = str(job.settings["way"])
        self._gradient = {"w": gradient(job.elements)}
        self._runner = asyncio.Runner(loop_factory=_loop_factory())
        self._runner.run(self._connect(address))
        self.params: Array = self._model["w"]

    async def _connect(self, address: str) -> None:
        import aiops

        self._client = await aiops.AsyncClient(address, role="worker").connect()
        check_transport(self._client, self._job)
        self._model = await self._client.define({"w": np.zeros(self._job.elements, np.float32)})
        self._lanes = [self._model.copy() for _ in range(int(self._job.settings["lanes"]))]

    def cycle(self) -> None:
        """Make one request."""
        self.run(1)

    def run(self, cycles: int) -> Times:
        """Make ``cycles`` requests, with one under way in each lane; time each."""
        return self._runner.run(self._run(cycles))

    async def _run(self, cycles: int) -> Times:
        times: list[tuple[float, float]] = []
        left = iter(range(cycles))
        await asyncio.gather(*(self._lane(into, left, times) for into in self._lanes))
        return times

    async def _lane(
        self, into: Params, left: Iterator[int], times: list[tuple[float, float]]
    ) -> None:
        ask, clock = self._asking(into), time.perf_counter
        for _ in left:
            begin = clock()
            await ask()
            times.append((begin, clock()))

    def _asking(self, into: Params) -> Callable[[], Awaitable[Any]]:
        client, gradients = self._client, self._gradient
        if self._way == "push":
            return lambda: client.push(into, gradients)
        if self._way == "exchange":
            return lambda: client.exchange(into, gradients)

        def fetch() -> Awaitable[Any]:
            into.version = -1  # otherwise a model that has not changed is not sent again
            return client.fetch(into)

        return fetch

    def check(self, cycles: int) -> str:
        """Fail unless what was brought is whole and of a version that there was."""
        if self._way == "exchange":
            for into in self._lanes:
                check_worker(into["w"], 0, cycles, whole=True)
        made = 0 if self._way == "fetch" else cycles
        self._runner.run(self._fetch_all())
        for into in self._lanes:
            check_worker(into["w"], made, made, whole=True)
        return "whole"

    async def _fetch_all(self) -> None:
        """Fetch into every lane at once, over what is no version at all."""
        for into in self._lanes:
            into["w"][:] = np.nan
            into.version = -1
        await asyncio.gather(*map(self._client.fetch, self._lanes))

    def close(self) -> None:
        """Say goodbye."""
        self._runner.run(self._client.close())
        self._runner.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's loops, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
