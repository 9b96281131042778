"""The run of a simulated cluster: a real server, real workers, and scheduled events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np

from aiops.model.layout import Array
from aiops.serving.server import Server
from aiops.sim.cluster.result import ClusterResult, ClusterSample, WorkerUsage, digest_of
from aiops.sim.cluster.spec import Cluster, ClusterEvent, Cut, Join, Silence
from aiops.sim.cluster.workers import (
    AveragingWorker,
    SimulatedWorker,
    carried,
    mean_model,
    worker_kind,
)
from aiops.sim.virtual.loop import VirtualTimer
from aiops.sim.virtual.world import World

SERVER = "server"
"""The name of the server's host."""


Progress: TypeAlias = Callable[[int, float], None]


def simulate(
    cluster: Cluster,
    on_progress: Progress = lambda done, seconds: None,
    stopping: Callable[[], bool] = lambda: False,
) -> ClusterResult:
    """Run a cluster from beginning to end, in virtual time.

    Parameters
    ----------
    cluster
        The settings.
    on_progress
        Called after each mini-batch with the mini-batches so far and the virtual seconds of
        training.
    stopping
        Called after each mini-batch; True ends the run, and its result is that of the moment.

    Raises
    ------
    UsageError
        When the server's settings cannot work, or not together with the cluster's.
    AiopsError
        The first error that ends a worker.
    """
    world = World(seed=cluster.seed, pieces=cluster.pieces, apply_seconds=cluster.apply_time())

    async def main() -> ClusterResult:
        return await _ClusterRun(cluster, world, on_progress, stopping).run()

    return world.run(main())


class _ClusterRun:
    """One run."""

    def __init__(
        self, cluster: Cluster, world: World, on_progress: Progress, stopping: Callable[[], bool]
    ) -> None:
        self._cluster, self._network, self._loop = cluster, world.network, world.loop
        self._on_progress, self._stopping = on_progress, stopping
        self._complete = True
        self._initial = cluster.workload.initial(cluster.seed)
        self._server: Server
        self._workers: list[SimulatedWorker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._presences: dict[int, _Presence] = {}
        self._connected = 0
        self._ready: asyncio.Future[None] = (
            self._loop.create_future()
        )  # all first workers are connected
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._left = inf if cluster.gradients is None else cluster.gradients
        self._done = 0  # mini-batches
        self._began = 0.0
        self._timers: list[VirtualTimer] = []
        self._silent: dict[str, float] = {}  # hosts, and until when
        self._samples: list[ClusterSample] = []

    async def run(self) -> ClusterResult:
        cluster, loop = self._cluster, self._loop
        self._network.add(cluster.links.host(SERVER, "server"))
        with self._network.at(SERVER):
            config = dataclasses.replace(cluster.server, workers=cluster.workers)
            self._kind = worker_kind(config)
            self._server = Server(config)
            await self._server.start()
            serving = loop.create_task(self._server.serve(), name=SERVER)
        serving.add_done_callback(self._ended)
        for _ in range(cluster.workers):
            self._add_worker()
        await asyncio.wait([self._ready, self._over], return_when=asyncio.FIRST_COMPLETED)
        self._began = loop.now
        self._set_timers()
        await self._over
        outcome = self._outcome()
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.stop()
        await serving
        return outcome

    # ------------------------------------------------------------ workers

    def _add_worker(self) -> None:
        number = len(self._tasks)
        name = f"worker-{number}"
        self._network.add(self._cluster.links.host(name, "worker"))
        with self._network.at(name):
            url, overlap, patience = self._server.url, self._cluster.overlap, self._cluster.patience
            worker = self._kind(url, self._initial, overlap=overlap, name=name, timeout=patience)
            task = self._loop.create_task(self._train(worker, number), name=name)
        self._workers.append(worker)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    async def _train(self, worker: SimulatedWorker, number: int) -> None:
        cluster, loop = self._cluster, self._loop
        pace = cluster.computing.pace(number, cluster.seed)
        gradient = cluster.workload.gradient(number, cluster.seed)

        async def compute(params: Mapping[str, Array]) -> Mapping[str, Array]:
            found, now = gradient(params), loop.now
            seconds = pace(now - self._began)
            presence.computes(now, seconds)
            await asyncio.sleep(seconds)
            return found

        async with worker:
            self._connected += 1
            if self._connected == cluster.workers:
                self._ready.set_result(None)
            await asyncio.shield(self._ready)
            presence = self._presences[number] = _Presence(loop.now)
            try:
                while self._left > 0:
                    self._left -= 1
                    await worker.step(compute)
                    self._done += 1
                    self._on_progress(self._done, loop.now - self._began)
                    if self._stopping():
                        self._complete = False
                        self._time_is_up()
            finally:
                presence.until = loop.now

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the run with the last task, or with an error."""
        error = None if task.cancelled() else task.exception()  # else asyncio logs it
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        elif all(task.done() for task in self._tasks):
            self._over.set_result(None)

    # ------------------------------------------------------------ events

    def _set_timers(self) -> None:
        cluster, after = self._cluster, self._after
        for event in cluster.schedule:
            after(event.at, self._happen, event)
        if cluster.every is not None:
            self._sample_every(cluster.every, 0)
        if cluster.seconds is not None:
            after(cluster.seconds, self._time_is_up)

    def _after(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self._timers.append(self._loop.call_at(self._began + seconds, call, *args))

    def _time_is_up(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _happen(self, event: ClusterEvent) -> None:
        if isinstance(event, Join):
            for _ in range(event.workers):
                self._add_worker()
            return
        name, task = f"worker-{event.worker}", self._tasks[event.worker]
        if isinstance(event, Cut):
            self._network.cut(name)
        elif isinstance(event, Silence):
            until = self._loop.now + event.seconds
            self._silent[name] = max(until, self._silent.get(name, 0.0))
            self._network.silence(name)
            self._timers.append(self._loop.call_at(until, self._restore, name))
        elif not task.done():
            self._network.kill(name)
            task.cancel()

    def _restore(self, name: str) -> None:
        if self._loop.now >= self._silent[name]:  # no other silence is under way
            self._network.restore(name)

    # ------------------------------------------------------------ results

    def _sample_every(self, every: float, count: int) -> None:
        self._sample()
        self._after((count + 1) * every, self._sample_every, every, count + 1)

    def _sample(self) -> None:
        found = self._cluster.workload.test(self._params())
        if found is not None:
            engine = self._server.engine
            nbytes = carried(self._workers)
            seconds = self._loop.now - self._began
            self._samples.append(ClusterSample(seconds, self._done, engine.version, nbytes, *found))

    def _params(self) -> Mapping[str, Array]:
        """Return the server's parameters for evaluation, or the mean of the workers' models."""
        if self._kind is AveragingWorker:
            there = [n for n in self._presences if self._network.host(f"worker-{n}").alive]
            return mean_model([self._workers[number] for number in there or self._presences])
        training = self._server.engine.training
        assert training is not None, "the model is defined"
        return training.evaluated().views

    def _outcome(self) -> ClusterResult:
        self._sample()
        engine = self._server.engine
        report = engine.report()
        params = {name: np.array(array) for name, array in self._params().items()}
        version = int(report["version"])
        return ClusterResult(
            seconds=self._loop.now - self._began,
            gradients=self._done,
            version=version,
            staleness={int(tau): count for tau, count in report["staleness"].items()},
            workers=tuple(map(self._usage, range(len(self._workers)))),
            params=params,
            samples=tuple(self._samples),
            messages=self._network.messages,
            report=report,
            digest=digest_of(params, version, report["ledger"]),
            complete=self._complete,
        )

    def _usage(self, number: int) -> WorkerUsage:
        worker, presence = self._workers[number], self._presences.get(number)
        if presence is None:  # it is not connected yet
            return WorkerUsage(0, 0, 0.0, 0.0, 0, 0)
        until = self._loop.now if presence.until is None else presence.until
        compute = presence.computed(until)
        idle = max(until - presence.since - compute, 0.0)
        return WorkerUsage(worker.steps, worker.recomputed, compute, idle, *worker.traffic)


@dataclass
class _Presence:
    """The time in which a worker took part: from its first mini-batch to its last step."""

    since: float
    until: float | None = None
    _compute: float = 0.0  # seconds, with those of the present mini-batch
    _ready: float = 0.0  # when the present mini-batch ends

    def computes(self, now: float, seconds: float) -> None:
        """Note that a mini-batch is begun, and how long it takes."""
        self._compute, self._ready = self._compute + seconds, now + seconds

    def computed(self, until: float) -> float:
        """Return the seconds of computing until a time."""
        return self._compute - max(self._ready - until, 0.0)
