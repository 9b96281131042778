"""One run of ``aiops bandwidth``: server, slow link, workers, and tests of what they learn."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.bandwidth.networks import Material
from aiops.lab.experiments.bandwidth.worker import BandwidthReport, BandwidthTask
from aiops.lab.slow_link import Direction, SlowLink
from aiops.lab.training_run import LOOK_DEADLINE, STALL_DEADLINE, TrainingRun

PATIENCE = 300.0
"""Seconds that a worker waits for an answer: a slow link or a small budget takes its time."""

_POLL = 0.02  # seconds between two looks at which workers are still connected


@dataclass(frozen=True, kw_only=True)
class BandwidthSample:
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
class BandwidthOutcome:
    """The outcome of a run; ``report`` is the server's statistics at the end."""

    seconds: float = 0.0
    samples: list[BandwidthSample] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    workers: list[BandwidthReport] = field(default_factory=list)
    link: Mapping[Direction, int] = field(default_factory=dict)

    @property
    def idle(self) -> float:
        """The share of their time that the workers waited."""
        seconds = sum(report.seconds for report in self.workers)
        return sum(report.idle for report in self.workers) / seconds if seconds else 0.0


async def carry_out(
    case: BandwidthCase,
    files: Material,
    on_progress: Callable[[int], None] = lambda done: None,
) -> BandwidthOutcome:
    """Run a case from beginning to end; ``on_progress`` is called with the gradients so far.

    Raises
    ------
    ProcessFailed
        When a process fails or a deadline passes; ``details["stderr"]`` has its last lines.
    Interrupted
        On SIGINT or SIGTERM.
    """
    async with (
        AsyncExitStack() as stack,  # the link and the tickets, which outlive the processes
        TrainingRun("bandwidth", len(case.processes())) as processes,
    ):
        return await _BandwidthRun(case, files, processes, stack, on_progress).run()


class _BandwidthRun:
    """The phases of one run."""

    def __init__(
        self,
        case: BandwidthCase,
        files: Material,
        processes: TrainingRun,
        stack: AsyncExitStack,
        on_progress: Callable[[int], None],
    ) -> None:
        self._case, self._files = case, files
        self._processes, self._stack, self._on_progress = processes, stack, on_progress
        self._gradients = [0] * len(case.processes())
        self._began = 0.0
        self._outcome = BandwidthOutcome()

    async def run(self) -> BandwidthOutcome:
        processes, case, outcome = self._processes, self._case, self._outcome
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="aiops-bandwidth-"))
        url = await processes.start_server(case.server)
        link: SlowLink | None = None
        if case.link:
            link = SlowLink(url, rate=case.link, delay=case.delay)
            url = self._stack.enter_context(link).url
        for workers in case.processes():
            self._start(url, workers, str(Path(folder) / "tickets"))
        await processes.wait_ready()
        await processes.within(LOOK_DEADLINE, "the first look", self._look())
        self._began = time.monotonic()
        processes.go()
        await self._watch()
        outcome.seconds = time.monotonic() - self._began
        await processes.within(LOOK_DEADLINE, "the end of the workers", self._until_all_left())
        await processes.within(LOOK_DEADLINE, "the last look", self._look())
        outcome.workers = [BandwidthReport(**report) for report in processes.reports if report]
        outcome.link = link.carried if link is not None else {}
        return outcome

    def _start(self, url: str, workers: range, tickets: str) -> None:
        case, files = self._case, self._files
        task = BandwidthTask(
            url=url,
            indices=list(workers),
            tickets=tickets,
            gradients=case.gradients,
            workers=case.workers,
            network=case.network,
            sizes=files.sizes,
            data=str(files.folder),
            batch_size=case.batch_size,
            seed=case.seed,
            timeout=PATIENCE,
        )
        name = f"the process of workers {workers.start + 1} to {workers.stop}"
        module = "aiops.lab.experiments.bandwidth.worker"
        self._processes.start_worker(name, module, task)

    async def _until_all_left(self) -> None:
        """Wait until the server has received the last byte of every worker."""
        while True:
            clients = (await self._processes.observer.stats())["workers"]
            if not any(row["present"] and row["role"] == "worker" for row in clients):
                return
            await asyncio.sleep(_POLL)

    async def _watch(self) -> None:
        """Look at times spread evenly over the gradients, until all workers are done."""
        case, processes = self._case, self._processes
        every = case.gradients / (case.samples + 1)
        due = every if case.samples else float("inf")
        while not processes.finished:
            number, message = await processes.message(STALL_DEADLINE + PATIENCE)
            self._gradients[number] = message.get("report", message)["gradients"]
            done = sum(self._gradients)
            self._on_progress(done)
            if due <= done < case.gradients:
                due = every * (done // every + 1)
                await processes.within(LOOK_DEADLINE, "a look", self._look())

    async def _look(self) -> None:
        """Add a sample to the outcome."""
        seconds = time.monotonic() - self._began if self._began else 0.0
        gradients = sum(self._gradients)
        look = await self._processes.look(self._files.test)
        account = look.report["ledger"]
        self._outcome.report = look.report
        self._outcome.samples.append(
            BandwidthSample(
                seconds=round(seconds, 3),
                gradients=gradients,
                version=look.version,
                pushed=account["pushed"]["bytes"],
                fetched=account["fetched"]["bytes"],
                loss=look.loss,
                error=1 - look.accuracy,
            )
        )
