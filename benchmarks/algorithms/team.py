"""One run: a server and its workers, real processes over TCP, and looks at what they learn."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aiops.client.aio import AsyncClient
from aiops.lab.demo.children import ONE_CORE, Child, Family
from aiops.lab.demo.run import LOOK_DEADLINE, READY_DEADLINE, STALL_DEADLINE, START_DEADLINE
from aiops.net import signals
from benchmarks.algorithms.cases import Case
from benchmarks.algorithms.link import Line, Proxy
from benchmarks.algorithms.problem import Bench
from benchmarks.algorithms.worker import Report, Task

_ROOT = str(Path(__file__).resolve().parents[2])

Look = Callable[[int, Mapping[str, Any]], Awaitable[None]]
"""Is given the number of steps that all workers together have done, and the parameters."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is to be run; see `benchmarks.algorithms.worker.Task` for what is not said here.

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

    case: Case
    seed: int = 0
    steps: int = 0
    seconds: float = 0.0
    warmup: float = 0.0
    paces: tuple[float, ...] = ()
    line: Line | None = None
    looks: int = 0


@dataclass
class Outcome:
    """What came of it: wall-clock seconds, the server's statistics, what the workers said."""

    seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)
    workers: list[Report] = field(default_factory=list)
    merges: list[float] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """The share of their time that the workers waited."""
        return sum(w.idle for w in self.workers) / sum(w.seconds for w in self.workers)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(w.sent + w.received for w in self.workers)


async def carry_out(run: Run, bench: Bench, look: Look) -> Outcome:
    """Start everybody, say go, look now and then, and end everybody.

    Raises
    ------
    DemoFailed
        When a process fails or a deadline passes; ``details["stderr"]`` has its last lines.
    Interrupted
        On SIGINT or SIGTERM.
    """
    async with Family() as family:
        with signals.heard(family.interrupt):
            try:
                async with AsyncExitStack() as stack:
                    return await _Team(run, bench, look, family, stack).run()
            finally:
                await family.close()


class _Team:
    """One run's course; every wait goes through `Family.within`."""

    def __init__(
        self, run: Run, bench: Bench, look: Look, family: Family, stack: AsyncExitStack
    ) -> None:
        self._run, self._bench, self._look = run, bench, look
        self._family, self._stack = family, stack
        count = bench.problem.workers
        self._ready = [False] * count
        self._steps = [0] * count
        self._reports: list[Report | None] = [None] * count
        self._snapshots: list[tuple[int, Path]] = []  # not yet looked at, after how many steps
        self._params: Any = None
        self._heard = asyncio.Event()
        self._environment = {
            **ONE_CORE,
            "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH")))),
        }

    async def run(self) -> Outcome:
        """Run it from beginning to end."""
        within, run, outcome = self._family.within, self._run, Outcome()
        direct = url = await within(START_DEADLINE, "starting the server", self._start_server())
        if run.line is not None:
            proxy = Proxy(url, run.line, self._bench.nbytes)
            url = (await self._stack.enter_async_context(proxy)).url
            outcome.merges = proxy.merges
        children = [await self._start_worker(url, index) for index in range(len(self._ready))]
        await within(READY_DEADLINE, "starting the workers", self._all_ready())
        observer = AsyncClient(direct, name="benchmark", timeout=LOOK_DEADLINE)
        self._stack.push_async_callback(observer.close)
        await within(LOOK_DEADLINE, "connecting to the server", observer.connect())
        began = time.perf_counter()
        for child in children:
            child.say_the_word()
        await self._watch(observer)
        outcome.seconds = time.perf_counter() - began
        await within(LOOK_DEADLINE, "the last look", self._take_look(observer))
        outcome.stats = await within(LOOK_DEADLINE, "the statistics", observer.stats())
        outcome.workers = [report for report in self._reports if report is not None]
        return outcome

    async def _start_server(self) -> str:
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not said.done():
                said.set_result(line.strip())

        case = self._run.case
        flags = [f"--policy={case.policy}", f"--workers={len(self._ready)}", "--port=0"]
        flags += [f"--set={name}={value}" for name, value in case.settings.items()]
        command = ("aiops.net.child_guard", "aiops.server", *flags, "--log-level=warning")
        environment = {"PYTHONPATH": self._environment["PYTHONPATH"]}
        await self._family.start(
            "the server", command, on_line, environment=environment, lasting=True
        )
        return await said

    async def _start_worker(self, url: str, index: int) -> Child:
        run, bench, count = self._run, self._bench, len(self._ready)
        snapshots = run.case.averaging and not index and run.looks
        task = Task(
            url=url,
            index=index,
            workers=count,
            sizes=bench.sizes,
            data=str(bench.folder),
            batch_size=bench.problem.batch_size,
            seed=run.seed,
            steps=run.steps // count + (index < run.steps % count),
            seconds=run.seconds,
            warmup=run.warmup,
            pace=run.paces[index] if run.paces else 0.0,
            averaging=run.case.averaging,
            snapshots=str(bench.folder) if snapshots else "",
            looks=run.looks,
        )

        def on_line(line: str) -> None:
            said = json.loads(line)
            if "ready" in said:
                self._ready[index] = True
            elif "idle" in said:
                self._reports[index] = Report(**said)
            else:
                self._steps[index] = said["steps"]
            if "snapshot" in said:
                self._snapshots.append((sum(self._steps), Path(said["snapshot"])))
            self._heard.set()

        command = ("benchmarks.algorithms.worker", json.dumps(asdict(task)))
        name = f"worker-{index + 1}"
        return await self._family.start(name, command, on_line, environment=self._environment)

    async def _all_ready(self) -> None:
        while not all(self._ready):
            self._heard.clear()
            await self._heard.wait()

    async def _watch(self, observer: AsyncClient) -> None:
        """Look at every so many steps, until all workers are done."""
        run, every = self._run, self._run.steps / max(self._run.looks, 1)
        due = every if run.looks else float("inf")
        while None in self._reports:
            self._heard.clear()
            patience = run.seconds + STALL_DEADLINE
            await self._family.within(patience, "the next steps of any worker", self._heard.wait())
            if run.case.averaging:
                await self._look_at_snapshots()
            elif sum(self._steps) >= due:
                due = every * (sum(self._steps) // every + 1)
                await self._family.within(LOOK_DEADLINE, "a look", self._take_look(observer))

    async def _take_look(self, observer: AsyncClient) -> None:
        if self._run.case.averaging:
            await self._look_at_snapshots()
        elif self._run.looks:
            steps = self._run.steps if None not in self._reports else sum(self._steps)
            self._params = await observer.fetch(self._params)
            await self._look(steps, self._params)

    async def _look_at_snapshots(self) -> None:
        while self._snapshots:
            steps, path = self._snapshots.pop(0)
            await self._look(steps, await asyncio.to_thread(_taken, path))


def _taken(path: Path) -> dict[str, Any]:
    """Read a snapshot, and remove it."""
    with np.load(path) as arrays:
        params = dict(arrays)
    path.unlink()
    return params
