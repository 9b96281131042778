"""The course of a demo: start everybody, say go, watch, test, end everybody."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Protocol

from aiops.client.aio import AsyncClient
from aiops.client.params import Params
from aiops.lab.demo.children import ONE_CORE, Child, DemoFailed, Family
from aiops.lab.demo.record import Crewman, Record
from aiops.lab.demo.worker import Progress, Task
from aiops.lab.workloads import MLP, Dataset
from aiops.net import signals

START_DEADLINE = 60.0
"""Seconds the server has to listen."""
READY_DEADLINE = 120.0
"""Seconds the workers have to load their data and connect."""
STALL_DEADLINE = 60.0
"""Seconds within which some worker must report progress (the first updates compile the kernels)."""
LOOK_DEADLINE = 20.0
"""Seconds the server has to answer the observer."""

_FRAME = 0.1  # seconds between two frames of the display


class Display(Protocol):
    """Whoever shows a record to people."""

    def show(self, record: Record) -> None:
        """Show how things stand; called several times per second."""


async def run(record: Record, data: Dataset, display: Display) -> None:
    """Run a demo from beginning to end; ``record`` holds what happened, also after an error.

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
    DemoFailed
        When a process fails or a deadline passes.
    Interrupted
        On SIGINT or SIGTERM.
    """
    async with Family() as family:
        painter = asyncio.create_task(_paint(record, display))
        with signals.heard(family.interrupt):
            try:
                await _Demo(record, data, family).run()
            finally:
                painter.cancel()
                await family.close()
                display.show(record)


async def _paint(record: Record, display: Display) -> None:
    while True:
        display.show(record)
        await asyncio.sleep(_FRAME)


class _Demo:
    """One run's course; every step waits through `Family.within`."""

    def __init__(self, record: Record, data: Dataset, family: Family) -> None:
        self._record, self._data, self._family = record, data, family
        settings = record.settings
        self._model = MLP((data.features, settings.hidden, data.classes))
        self._params: Params | None = None
        self._began = 0.0
        self._heard = asyncio.Event()  # a worker said something, or ended

    async def run(self) -> None:
        record, within = self._record, self._family.within
        record.phase = "starting the server"
        record.url = await within(START_DEADLINE, "starting the server", self._start_server())
        record.phase = "starting the workers"
        children = [await self._start_worker(worker) for worker in record.workers]
        await within(READY_DEADLINE, "starting the workers", self._all_ready())
        observer = AsyncClient(record.url, name="demo", timeout=LOOK_DEADLINE)
        try:
            await within(LOOK_DEADLINE, "connecting to the server", observer.connect())
            await within(LOOK_DEADLINE, "the first look", self._look(observer))
            record.phase = "training"
            self._began = time.monotonic()
            for child in children:
                child.say_the_word()
            await self._train(observer)
            record.phase = "testing"
            await within(LOOK_DEADLINE, "the last look", self._look(observer))
            record.phase = "done"
        finally:
            await observer.close()

    # ------------------------------------------------------------ the children

    async def _start_server(self) -> str:
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not said.done():
                said.set_result(line.strip())

        command = ("aiops.net.child_guard", "aiops.server", *self._record.settings.server_flags())
        await self._family.start("the server", command, on_line, lasting=True)
        return await said

    async def _start_worker(self, worker: Crewman) -> Child:
        settings = self._record.settings
        task = Task(
            url=self._record.url,
            index=self._record.workers.index(worker),
            workers=settings.workers,
            dataset=settings.dataset,
            hidden=settings.hidden,
            steps=worker.share,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )

        def on_line(line: str) -> None:
            said = json.loads(line)
            if "ready" in said:
                worker.ready = True
            else:
                worker.progress = Progress(**said)
            self._heard.set()

        command = ("aiops.lab.demo.worker", *task.flags())
        return await self._family.start(worker.name, command, on_line, environment=ONE_CORE)

    async def _all_ready(self) -> None:
        while not all(worker.ready for worker in self._record.workers):
            self._heard.clear()
            await self._heard.wait()

    # ------------------------------------------------------------ training

    async def _train(self, observer: AsyncClient) -> None:
        """Wait until every worker is done; they may never all fall silent meanwhile."""
        record, family = self._record, self._family
        watching = asyncio.create_task(self._watch(observer))
        enders = [asyncio.create_task(self._ended(child)) for child in family.children[1:]]
        try:
            while not all(worker.ended for worker in record.workers):
                self._heard.clear()
                await family.within(STALL_DEADLINE, "the next step of any worker", self._news())
                if watching.done():
                    watching.result()
        finally:
            record.seconds = time.monotonic() - self._began
            self._began = 0.0
            for task in (watching, *enders):
                task.cancel()
            await asyncio.gather(watching, *enders, return_exceptions=True)

    async def _ended(self, child: Child) -> None:
        await child.ended.wait()
        for worker in self._record.workers:
            worker.ended = worker.ended or worker.name == child.name
        self._heard.set()

    async def _news(self) -> None:
        await self._heard.wait()

    # ------------------------------------------------------------ the observer

    async def _watch(self, observer: AsyncClient) -> None:
        """Look now and then: often at first, when most is learnt, then twice per second."""
        while True:
            await asyncio.sleep(min(0.5, 0.1 + self._record.seconds / 10))
            await self._look(observer)

    async def _look(self, observer: AsyncClient) -> None:
        """Fetch statistics and parameters, and test these."""
        if self._began:
            self._record.seconds = time.monotonic() - self._began
        try:
            async with asyncio.timeout(LOOK_DEADLINE):
                report, self._params = await asyncio.gather(
                    observer.stats(), observer.fetch(self._params)
                )
        except TimeoutError:
            raise DemoFailed(f"the server did not answer within {LOOK_DEADLINE:g} s") from None
        data = self._data
        loss, accuracy = await asyncio.to_thread(
            self._model.evaluate, self._params, data.test_x, data.test_y
        )
        self._record.note(report, self._params.version, loss, accuracy)
