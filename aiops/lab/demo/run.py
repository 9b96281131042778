"""One demo from beginning to end: start the processes, train, test now and then, end them."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from aiops.client.params import Params
from aiops.lab.demo.record import DemoRecord
from aiops.lab.demo.worker import DemoTask, Progress
from aiops.lab.training_run import LOOK_DEADLINE, STALL_DEADLINE, TrainingRun
from aiops.lab.workloads import MLP, Dataset

_FRAME = 0.1  # seconds between two frames of the display


class Display(Protocol):
    """A display of a record."""

    def show(self, record: DemoRecord) -> None:
        """Show the record as it is now; called several times per second."""


async def run(record: DemoRecord, data: Dataset, display: Display) -> None:
    """Run a demo; ``record`` holds what happened, also after an error.

    Parameters
    ----------
    record
        A fresh one.
    data
        The data set of its settings, flat: workers load their own, this one is for testing.
    display
        Is shown the record several times per second.

    Raises
    ------
    ProcessFailed
        When a process fails or a deadline passes.
    Interrupted
        On SIGINT or SIGTERM.
    """

    def on_ready(number: int) -> None:
        record.workers[number].ready = True

    painter = asyncio.create_task(_paint(record, display))
    try:
        async with TrainingRun("demo", record.settings.workers, on_ready) as processes:
            await _Demo(record, data, processes, display).run()
    finally:
        painter.cancel()
        display.show(record)


async def _paint(record: DemoRecord, display: Display) -> None:
    while True:
        display.show(record)
        await asyncio.sleep(_FRAME)


class _Demo:
    """The phases of one demo."""

    def __init__(
        self, record: DemoRecord, data: Dataset, processes: TrainingRun, display: Display
    ) -> None:
        self._record, self._data, self._processes = record, data, processes
        self._display = display
        self._model = MLP((data.features, record.settings.hidden, data.classes))
        self._began = 0.0

    async def run(self) -> None:
        record, processes = self._record, self._processes
        self._begin("starting the server")
        record.url = await processes.start_server(record.settings.server)
        self._begin("starting the workers")
        for index in range(len(record.workers)):
            self._start_worker(index)
        await processes.wait_ready()
        await processes.within(LOOK_DEADLINE, "the first look", self._look())
        self._begin("training")
        self._began = time.monotonic()
        processes.go()
        await self._train()
        self._begin("testing")
        await processes.within(LOOK_DEADLINE, "the last look", self._look())
        self._begin("done")

    def _begin(self, phase: str) -> None:
        """Begin a phase, and show it: it may be shorter than a frame."""
        self._record.phase = phase
        self._display.show(self._record)

    def _start_worker(self, index: int) -> None:
        settings, worker = self._record.settings, self._record.workers[index]
        task = DemoTask(
            url=self._record.url,
            index=index,
            workers=settings.workers,
            dataset=settings.dataset,
            hidden=settings.hidden,
            steps=worker.share,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
        self._processes.start_worker(worker.name, "aiops.lab.demo.worker", task)

    async def _train(self) -> None:
        """Take the workers' messages until all have reported; look now and then meanwhile."""
        record, processes = self._record, self._processes
        watching = asyncio.create_task(self._watch())
        try:
            while not processes.finished:
                number, message = await processes.message(STALL_DEADLINE)
                worker = record.workers[number]
                worker.progress = Progress(**message.get("report", message))
                worker.ended = "report" in message
                if watching.done():
                    watching.result()
        finally:
            record.seconds = time.monotonic() - self._began
            self._began = 0.0
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Look now and then: often at first, when most is learnt, then twice per second."""
        while True:
            await asyncio.sleep(min(0.5, 0.1 + self._record.seconds / 10))
            await self._look()

    async def _look(self) -> None:
        """Add a sample to the record."""
        if self._began:
            self._record.seconds = time.monotonic() - self._began
        self._record.note(*await self._processes.look(self._test))

    def _test(self, params: Params) -> tuple[float, float]:
        return self._model.evaluate(params, self._data.test_x, self._data.test_y)
