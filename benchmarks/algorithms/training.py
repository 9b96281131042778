"""One run: a server and its workers, real processes over TCP, and tests of what they learn."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aiops.lab.training_run import LOOK_DEADLINE, STALL_DEADLINE, TrainingRun
from aiops.serving.config import Config
from benchmarks.algorithms.cases import AlgorithmCase
from benchmarks.algorithms.link import Proxy, SlowLine
from benchmarks.algorithms.problem import Bench
from benchmarks.algorithms.worker import AlgorithmReport, AlgorithmTask

_ROOT = str(Path(__file__).resolve().parents[2])

Look = Callable[[int, Mapping[str, Any]], Awaitable[None]]
"""Is given the number of steps that all workers together have done, and the parameters."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The plan of one run; its other fields are those of `AlgorithmTask`.

    Attributes
    ----------
    steps
        Over all workers, or 0: then ``seconds`` says when to stop.
    paces
        Each worker's seconds per gradient; empty: as long as it takes.
    line
        What lies between each worker and the server, or None: nothing.
    looks
        How many looks are taken while it runs; there is one more at the end.
    """

    case: AlgorithmCase
    seed: int = 0
    steps: int = 0
    seconds: float = 0.0
    warmup: float = 0.0
    paces: tuple[float, ...] = ()
    line: SlowLine | None = None
    looks: int = 0


@dataclass
class TrainingOutcome:
    """The outcome: wall-clock seconds, the server's statistics, the workers' reports."""

    seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)
    workers: list[AlgorithmReport] = field(default_factory=list)
    merges: list[float] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """The share of their time that the workers waited."""
        return sum(w.idle for w in self.workers) / sum(w.seconds for w in self.workers)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(w.sent + w.received for w in self.workers)


async def carry_out(plan: TrainingPlan, bench: Bench, look: Look | None = None) -> TrainingOutcome:
    """Carry out a plan; ``look`` is called now and then, and at the end.

    Raises
    ------
    ProcessFailed
        When a process fails or a deadline passes; ``details["stderr"]`` has its last lines.
    Interrupted
        On SIGINT or SIGTERM.
    """
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    count = bench.problem.workers
    async with (
        AsyncExitStack() as stack,
        TrainingRun("benchmark", count, environment={"PYTHONPATH": path}) as processes,
    ):
        return await _AlgorithmRun(plan, bench, look, processes, stack).run()


class _AlgorithmRun:
    """The phases of one run."""

    def __init__(
        self,
        plan: TrainingPlan,
        bench: Bench,
        look: Look | None,
        processes: TrainingRun,
        stack: AsyncExitStack,
    ) -> None:
        self._plan, self._bench, self._look = plan, bench, look
        self._processes, self._stack = processes, stack
        self._steps = [0] * bench.problem.workers
        self._snapshots: list[tuple[int, Path]] = []  # not yet looked at, after how many steps
        self._params: Any = None

    async def run(self) -> TrainingOutcome:
        processes, plan, outcome = self._processes, self._plan, TrainingOutcome()
        chosen = [f"{name}={value}" for name, value in plan.case.settings.items()]
        server = Config(policy=plan.case.policy, workers=len(self._steps), set=chosen)
        url = await processes.start_server(server)
        if plan.line is not None:
            proxy = Proxy(url, plan.line, self._bench.nbytes)
            url = (await self._stack.enter_async_context(proxy)).url
            outcome.merges = proxy.merges
        for index in range(len(self._steps)):
            task = self._task(url, index)
            module = "benchmarks.algorithms.worker"
            processes.start_worker(f"worker-{index + 1}", module, task)
        await processes.wait_ready()
        began = time.perf_counter()
        processes.go()
        await self._watch()
        outcome.seconds = time.perf_counter() - began
        await processes.within(LOOK_DEADLINE, "the last look", self._take_look())
        statistics = processes.observer.stats()
        outcome.stats = await processes.within(LOOK_DEADLINE, "the statistics", statistics)
        outcome.workers = [AlgorithmReport(**report) for report in processes.reports if report]
        return outcome

    def _task(self, url: str, index: int) -> AlgorithmTask:
        plan, bench, count = self._plan, self._bench, len(self._steps)
        snapshots = plan.case.averaging and not index and plan.looks
        return AlgorithmTask(
            url=url,
            index=index,
            workers=count,
            sizes=bench.sizes,
            data=str(bench.folder),
            batch_size=bench.problem.batch_size,
            seed=plan.seed,
            steps=plan.steps // count + (index < plan.steps % count),
            seconds=plan.seconds,
            warmup=plan.warmup,
            pace=plan.paces[index] if plan.paces else 0.0,
            averaging=plan.case.averaging,
            snapshots=str(bench.folder) if snapshots else "",
            looks=plan.looks,
        )

    async def _watch(self) -> None:
        """Look at times spread evenly over the steps, until all workers are done."""
        plan, processes = self._plan, self._processes
        every = plan.steps / max(plan.looks, 1)
        due = every if plan.looks else float("inf")
        while not processes.finished:
            number, message = await processes.message(plan.seconds + STALL_DEADLINE)
            self._steps[number] = message.get("steps", self._steps[number])
            if "snapshot" in message:
                self._snapshots.append((sum(self._steps), Path(message["snapshot"])))
            if plan.case.averaging:
                await self._look_at_snapshots()
            elif sum(self._steps) >= due:
                due = every * (sum(self._steps) // every + 1)
                await processes.within(LOOK_DEADLINE, "a look", self._take_look())

    async def _take_look(self) -> None:
        processes, plan = self._processes, self._plan
        if plan.case.averaging:
            await self._look_at_snapshots()
        elif plan.looks:
            steps = plan.steps if None not in processes.reports else sum(self._steps)
            self._params = await processes.observer.fetch(self._params)
            await self._show(steps, self._params)

    async def _look_at_snapshots(self) -> None:
        while self._snapshots:
            steps, path = self._snapshots.pop(0)
            await self._show(steps, await asyncio.to_thread(_take, path))

    async def _show(self, steps: int, params: Mapping[str, Any]) -> None:
        if self._look is not None:
            await self._look(steps, params)


def _take(path: Path) -> dict[str, Any]:
    """Read a snapshot, and remove it."""
    with np.load(path) as arrays:
        params = dict(arrays)
    path.unlink()
    return params
