"""The course of one run: server, link, workers, and looks at what they learn."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiops.client.aio import AsyncClient
from aiops.lab.demo.children import ONE_CORE, Child, Family
from aiops.lab.demo.run import LOOK_DEADLINE, READY_DEADLINE, STALL_DEADLINE, START_DEADLINE
from aiops.lab.experiments.bandwidth.case import Case
from aiops.lab.experiments.bandwidth.worker import Report, Task
from aiops.lab.experiments.material import Material
from aiops.lab.slow_link import Direction, Throttle
from aiops.net import signals

PATIENCE = 300.0
"""Seconds that a worker waits for an answer: a slow link or a small budget takes its time."""

_GLANCE = 0.02  # seconds between two looks at who is there still


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at a run.

    Attributes
    ----------
    seconds
        Since training began.
    gradients, version
        Mini-batches computed, and updates made.
    pushed, fetched
        Bytes that the workers' sockets have carried, all included.
    loss, error
        On the test set: nats, and the share of 1 that is wrong.
    """

    seconds: float
    gradients: int
    version: int
    pushed: int
    fetched: int
    loss: float
    error: float


@dataclass
class Outcome:
    """What came of a run; ``report`` is the server's at the end."""

    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    workers: list[Report] = field(default_factory=list)
    link: Mapping[Direction, int] = field(default_factory=dict)

    @property
    def idle(self) -> float:
        """The share of their time that the workers waited."""
        seconds = sum(report.seconds for report in self.workers)
        return sum(report.idle for report in self.workers) / seconds if seconds else 0.0


async def carry_out(
    case: Case, material: Material, on_progress: Callable[[int], None] = lambda done: None
) -> Outcome:
    """Run a case from beginning to end; ``on_progress`` is told the gradients so far.

    Raises
    ------
    DemoFailed
        When a process fails or a deadline passes; ``details["stderr"]`` has its last lines.
    Interrupted
        On SIGINT or SIGTERM.
    """
    async with Family() as family, AsyncExitStack() as stack:
        stack.enter_context(signals.heard(family.interrupt))
        course = _Course(case, material, family, stack, on_progress)
        try:
            return await course.run()
        finally:
            await family.close()


class _Course:
    """Every step waits through `Family.within`."""

    def __init__(
        self,
        case: Case,
        material: Material,
        family: Family,
        stack: AsyncExitStack,
        on_progress: Callable[[int], None],
    ) -> None:
        self._case, self._material = case, material
        self._family, self._stack, self._on_progress = family, stack, on_progress
        processes = len(case.processes())
        self._ready = [False] * processes
        self._gradients = [0] * processes
        self._reports: list[Report | None] = [None] * processes
        self._heard = asyncio.Event()
        self._params: Any = None
        self._began = 0.0
        self._tickets = Path()
        self._outcome = Outcome()

    async def run(self) -> Outcome:
        within, case, outcome = self._family.within, self._case, self._outcome
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="aiops-bandwidth-"))
        self._tickets = Path(folder) / "tickets"
        direct = url = await within(START_DEADLINE, "starting the server", self._start_server())
        link: Throttle | None = None
        if case.link:
            link = Throttle(direct, rate=case.link, delay=case.delay)
            url = self._stack.enter_context(link).url
        children = [await self._start(url, number) for number in range(len(self._ready))]
        await within(READY_DEADLINE, "starting the workers", self._all_ready())
        observer = AsyncClient(direct, name="bandwidth", timeout=LOOK_DEADLINE)
        self._stack.push_async_callback(observer.close)
        await within(LOOK_DEADLINE, "connecting to the server", observer.connect())
        await within(LOOK_DEADLINE, "the first look", self._look(observer))
        self._began = time.monotonic()
        for child in children:
            child.say_the_word()
        await self._watch(observer)
        outcome.seconds = time.monotonic() - self._began
        await within(LOOK_DEADLINE, "the workers' goodbyes", self._all_left(observer))
        await within(LOOK_DEADLINE, "the last look", self._look(observer))
        outcome.workers = [report for report in self._reports if report is not None]
        outcome.link = link.carried if link is not None else {}
        return outcome

    # ------------------------------------------------------------ the children

    async def _start_server(self) -> str:
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not said.done():
                said.set_result(line.strip())

        command = ("aiops.net.child_guard", "aiops.server", *self._case.server_flags())
        await self._family.start("the server", command, on_line, lasting=True)
        return await said

    async def _start(self, url: str, number: int) -> Child:
        case, material = self._case, self._material
        workers = case.processes()[number]
        task = Task(
            url=url,
            indices=list(workers),
            tickets=str(self._tickets),
            gradients=case.gradients,
            workers=case.workers,
            sizes=material.sizes,
            data=str(material.folder),
            batch_size=case.batch_size,
            seed=case.seed,
            timeout=PATIENCE,
        )

        def on_line(line: str) -> None:
            said = json.loads(line)
            if "ready" in said:
                self._ready[number] = True
            elif "idle" in said:
                self._reports[number] = Report(**said)
                self._gradients[number] = said["gradients"]
            else:
                self._gradients[number] = said["gradients"]
            self._heard.set()

        command = ("aiops.lab.experiments.bandwidth.worker", json.dumps(asdict(task)))
        name = f"the process of workers {workers.start + 1} to {workers.stop}"
        return await self._family.start(name, command, on_line, environment=ONE_CORE)

    async def _all_ready(self) -> None:
        while not all(self._ready):
            self._heard.clear()
            await self._heard.wait()

    async def _all_left(self, observer: AsyncClient) -> None:
        """Wait until the server has heard the last byte of every worker."""
        while True:
            crew = (await observer.stats())["workers"]
            if not any(row["present"] and row["role"] == "worker" for row in crew):
                return
            await asyncio.sleep(_GLANCE)

    # ------------------------------------------------------------ looking on

    async def _watch(self, observer: AsyncClient) -> None:
        """Look now and then, by the gradients computed, until all workers are done."""
        case, within = self._case, self._family.within
        every = case.gradients / (case.samples + 1)
        due = every if case.samples else float("inf")
        patience = STALL_DEADLINE + PATIENCE
        while None in self._reports:
            self._heard.clear()
            await within(patience, "the next gradients of any worker", self._heard.wait())
            done = sum(self._gradients)
            self._on_progress(done)
            if due <= done < case.gradients:
                due = every * (done // every + 1)
                await within(LOOK_DEADLINE, "a look", self._look(observer))
        self._on_progress(sum(self._gradients))  # the last may have come during a look

    async def _look(self, observer: AsyncClient) -> None:
        """Fetch statistics and parameters, and test these."""
        seconds = time.monotonic() - self._began if self._began else 0.0
        gradients = sum(self._gradients)
        report, self._params = await asyncio.gather(observer.stats(), observer.fetch(self._params))
        loss, accuracy = await asyncio.to_thread(self._material.test, self._params)
        account = report["ledger"]
        self._outcome.report = report
        self._outcome.samples.append(
            Sample(
                seconds=round(seconds, 3),
                gradients=gradients,
                version=self._params.version,
                pushed=account["pushed"]["bytes"],
                fetched=account["fetched"]["bytes"],
                loss=loss,
                error=1 - accuracy,
            )
        )
