"""The course of a simulated run: a real server, real workers, and what happens to them."""

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
from aiops.sim.cluster.members import AveragingWorker, Member, carried, mean_model, member
from aiops.sim.cluster.outcome import Labour, Outcome, Sample, digest_of
from aiops.sim.cluster.spec import Cluster, Cut, Happening, Join, Silence
from aiops.sim.virtual.world import World

SERVER = "server"
"""The name of the server's host."""


Progress: TypeAlias = Callable[[int, float], None]


def simulate(
    cluster: Cluster,
    on_progress: Progress = lambda done, seconds: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a cluster from beginning to end, in virtual time.

    Parameters
    ----------
    cluster
        What to run.
    on_progress
        Told the mini-batches so far and the virtual seconds of training, after each mini-batch.
    stopping
        Asked then whether to end: the outcome is what it has come to by that moment.

    Raises
    ------
    UsageError
        When the server's settings cannot work, or not together with the cluster's.
    AiopsError
        Whatever ends a worker: nothing is passed over.
    """
    world = World(seed=cluster.seed, pieces=cluster.pieces, apply_seconds=cluster.apply_time())

    async def main() -> Outcome:
        return await _Course(cluster, world, on_progress, stopping).run()

    return world.run(main())


class _Course:
    """One run."""

    def __init__(
        self, cluster: Cluster, world: World, on_progress: Progress, stopping: Callable[[], bool]
    ) -> None:
        self._cluster, self._network, self._loop = cluster, world.network, world.loop
        self._on_progress, self._stopping = on_progress, stopping
        self._complete = True
        self._initial = cluster.workload.initial(cluster.seed)
        self._server: Server
        self._workers: list[Member] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._presences: dict[int, _Presence] = {}
        self._connected = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()  # all of the beginning are
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._left = inf if cluster.gradients is None else cluster.gradients
        self._done = 0  # mini-batches
        self._began = 0.0
        self._timers: list[asyncio.TimerHandle] = []
        self._silent: dict[str, float] = {}  # hosts, and until when
        self._samples: list[Sample] = []

    async def run(self) -> Outcome:
        cluster, loop = self._cluster, self._loop
        self._network.add(cluster.links.host(SERVER, "server"))
        with self._network.at(SERVER):
            config = dataclasses.replace(cluster.server, workers=cluster.workers)
            self._kind = member(config)
            self._server = Server(config)
            await self._server.start()
            serving = loop.create_task(self._server.serve(), name=SERVER)
        serving.add_done_callback(self._ended)
        for _ in range(cluster.workers):
            self._add_worker()
        await asyncio.wait([self._ready, self._over], return_when=asyncio.FIRST_COMPLETED)
        self._began = loop.time()
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
            patience = self._cluster.patience
            worker = self._kind(self._server.url, self._initial, name=name, timeout=patience)
            task = self._loop.create_task(self._train(worker, number), name=name)
        self._workers.append(worker)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    async def _train(self, worker: Member, number: int) -> None:
        cluster, loop = self._cluster, self._loop
        pace = cluster.computing.pace(number, cluster.seed)
        gradient = cluster.workload.gradient(number, cluster.seed)

        async def compute(params: Mapping[str, Array]) -> Mapping[str, Array]:
            found = gradient(params)
            seconds = pace(loop.time() - self._began)
            self._presences[number].computes(loop.time(), seconds)
            await asyncio.sleep(seconds)
            return found

        async with worker:
            self._connected += 1
            if self._connected == cluster.workers:
                self._ready.set_result(None)
            await asyncio.shield(self._ready)
            presence = self._presences[number] = _Presence(loop.time())
            try:
                while self._left > 0:
                    self._left -= 1
                    await worker.step(compute)
                    self._done += 1
                    self._on_progress(self._done, loop.time() - self._began)
                    if self._stopping():
                        self._complete = False
                        self._time_is_up()
            finally:
                presence.until = loop.time()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """See whether the end of a task is the end of all."""
        if self._over.done():
            return
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._over.set_exception(error)
        elif all(task.done() for task in self._tasks):
            self._over.set_result(None)

    # ------------------------------------------------------------ what happens

    def _set_timers(self) -> None:
        cluster, after = self._cluster, self._after
        for happening in cluster.schedule:
            after(happening.at, self._happen, happening)
        if cluster.every is not None:
            self._look_again(cluster.every, 0)
        if cluster.seconds is not None:
            after(cluster.seconds, self._time_is_up)

    def _after(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self._timers.append(self._loop.call_at(self._began + seconds, call, *args))

    def _time_is_up(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _happen(self, happening: Happening) -> None:
        if isinstance(happening, Join):
            for _ in range(happening.workers):
                self._add_worker()
            return
        name, task = f"worker-{happening.worker}", self._tasks[happening.worker]
        if isinstance(happening, Cut):
            self._network.cut(name)
        elif isinstance(happening, Silence):
            until = self._loop.time() + happening.seconds
            self._silent[name] = max(until, self._silent.get(name, 0.0))
            self._network.silence(name)
            self._timers.append(self._loop.call_at(until, self._hear_again, name))
        elif not task.done():
            self._network.kill(name)
            task.cancel()

    def _hear_again(self, name: str) -> None:
        if self._loop.time() >= self._silent[name]:  # and not in the midst of another silence
            self._network.restore(name)

    # ------------------------------------------------------------ what is seen

    def _look_again(self, every: float, count: int) -> None:
        self._look()
        self._after((count + 1) * every, self._look_again, every, count + 1)

    def _look(self) -> None:
        found = self._cluster.workload.test(self._params())
        if found is not None:
            engine = self._server.engine
            nbytes = carried(self._workers)
            seconds = self._loop.time() - self._began
            self._samples.append(
                Sample(seconds, self._done, engine.answers.version, nbytes, *found)
            )

    def _params(self) -> Mapping[str, Array]:
        """Return what has been learnt: the server's parameters, or the workers' models' mean."""
        if self._kind is AveragingWorker:
            there = [n for n in self._presences if self._network.host(f"worker-{n}").alive]
            return mean_model([self._workers[number] for number in there or self._presences])
        store = self._server.engine.store
        assert store is not None, "the first worker has defined the model"
        return store.current.arena.views

    def _outcome(self) -> Outcome:
        self._look()
        engine = self._server.engine
        report = engine.report()
        params = {name: np.array(array) for name, array in self._params().items()}
        version = int(report["version"])
        return Outcome(
            seconds=self._loop.time() - self._began,
            gradients=self._done,
            version=version,
            staleness={int(tau): count for tau, count in report["staleness"].items()},
            workers=tuple(map(self._labour, range(len(self._workers)))),
            params=params,
            samples=tuple(self._samples),
            messages=self._network.messages,
            report=report,
            digest=digest_of(params, version, report["ledger"]),
            complete=self._complete,
        )

    def _labour(self, number: int) -> Labour:
        worker, presence = self._workers[number], self._presences.get(number)
        if presence is None:  # it has not come so far
            return Labour(0, 0, 0.0, 0.0, 0, 0)
        until = self._loop.time() if presence.until is None else presence.until
        compute = presence.computed(until)
        idle = max(until - presence.since - compute, 0.0)
        return Labour(worker.steps, worker.recomputed, compute, idle, *worker.traffic)


@dataclass
class _Presence:
    """When a worker took part: from its first mini-batch to the end of its last step."""

    since: float
    until: float | None = None
    _compute: float = 0.0  # seconds, of the mini-batch that it is at as well
    _ready: float = 0.0  # when that is or was finished

    def computes(self, now: float, seconds: float) -> None:
        """Note that a mini-batch is begun, and how long it takes."""
        self._compute, self._ready = self._compute + seconds, now + seconds

    def computed(self, until: float) -> float:
        """Return for how long it has computed until then."""
        return self._compute - max(self._ready - until, 0.0)
