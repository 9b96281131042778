"""A server and worker processes that train over TCP: started, begun together, watched.

The demo, ``aiops bandwidth`` and ``aiops bench algorithms`` all run this way::

    async with TrainingRun("demo", workers) as run:
        await run.start_server(Config(policy="fasgd"))
        run.start_worker("worker-1", "aiops.lab.demo.worker", task)
        ...
        await run.wait_ready()                 # connects the observer, too
        run.go()
        while not run.finished:
            number, message = await run.message(deadline)

`aiops.lab.training_worker` is the workers' side: lines of JSON on standard output, ``{"ready":
true}`` first, then progress, and ``{"report": ...}`` last. A child that fails, a deadline that
passes and a signal end every wait with an error.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar

from aiops.client.asyncio.client import AsyncClient
from aiops.client.params import Params
from aiops.lab.processes import ONE_THREAD, ProcessFailed, SupervisedProcess, Supervisor, command
from aiops.net import signals
from aiops.serving.config import Config

T = TypeVar("T")

START_DEADLINE = 60.0
"""Seconds the server has to listen."""
READY_DEADLINE = 120.0
"""Seconds the workers have to load their data and connect."""
STALL_DEADLINE = 60.0
"""Seconds within which some worker must report progress (the first updates compile the kernels)."""
LOOK_DEADLINE = 20.0
"""Seconds the server has to answer the observer."""


class Look(NamedTuple):
    """The server's statistics, a version of its parameters, and their loss and accuracy."""

    report: dict[str, Any]
    version: int
    loss: float
    accuracy: float


class TrainingRun(AsyncExitStack):
    """One run. SIGINT and SIGTERM interrupt it; its ``async with`` block ends all its processes.

    Parameters
    ----------
    name
        The observer's, as the server's statistics list it.
    workers
        How many worker processes are started.
    on_ready
        Is called with the number of each worker process that is ready.
    environment
        Variables that all processes have beside this one's.

    Attributes
    ----------
    url
        The server's address.
    observer
        A client that is no worker, for statistics and parameters; connected by `wait_ready`.
    ready, reports
        By worker process: whether it is ready; its report at the end, or None.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        on_ready: Callable[[int], None] = lambda number: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.url = ""
        self.observer: AsyncClient
        self.ready = [False] * workers
        self.reports: list[Mapping[str, Any] | None] = [None] * workers
        self._name, self._on_ready = name, on_ready
        self._environment = dict(environment or {})
        self._supervisor = Supervisor()
        self.push_async_callback(self._supervisor.close)
        self.enter_context(signals.handled(self._supervisor.interrupt))
        self._workers: list[SupervisedProcess] = []
        self._params: Params | None = None
        self._messages: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """True when every worker has reported, and every message has been taken."""
        return None not in self.reports and not self._messages

    async def within(self, seconds: float, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, as `aiops.lab.processes.Supervisor.within` does."""
        return await self._supervisor.within(seconds, what, coroutine)

    async def start_server(self, settings: Config) -> str:
        """Start ``python -m aiops.server``, at a free port; return its address."""
        settings = replace(settings, port=0, log_level="warning")
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not address.done():
                address.set_result(line.strip())

        async def start() -> str:
            self._supervisor.start(
                "the server",
                command("aiops.server", *settings.flags()),
                on_line,
                environment=self._environment,
                lasting=True,
            )
            return await address

        self.url = await self.within(START_DEADLINE, "starting the server", start())
        return self.url

    def start_worker(self, name: str, module: str, task: Any) -> SupervisedProcess:
        """Start a worker process.

        Parameters
        ----------
        name
            The process's, for errors.
        module
            A module that calls `aiops.lab.training_worker.run`.
        task
            A dataclass of plain values: the module's argument, as JSON.
        """
        number = len(self._workers)

        def on_line(line: str) -> None:
            message = json.loads(line)
            if "ready" in message:
                self.ready[number] = True
                self._on_ready(number)
            else:
                self._messages.append((number, message))
                self.reports[number] = message.get("report")
            self._changed.set()

        child = self._supervisor.start(
            name,
            command(module, json.dumps(asdict(task)), guarded=False),
            on_line,
            environment={**ONE_THREAD, **self._environment},
        )
        self._workers.append(child)
        return child

    async def wait_ready(self) -> None:
        """Wait until every worker is ready; connect the observer."""
        await self.within(READY_DEADLINE, "starting the workers", self._until_ready())
        self.observer = AsyncClient(self.url, name=self._name, timeout=LOOK_DEADLINE)
        self.push_async_callback(self.observer.close)
        await self.within(LOOK_DEADLINE, "connecting to the server", self.observer.connect())

    def go(self) -> None:
        """Have all workers begin to train."""
        for child in self._workers:
            child.write_line("go")

    async def message(self, seconds: float) -> tuple[int, Mapping[str, Any]]:
        """Return the next message of any worker, with its number.

        Raises
        ------
        ProcessFailed
            When none comes within this many seconds, or a process fails meanwhile.
        Interrupted
            On SIGINT or SIGTERM.
        """
        while not self._messages:
            self._changed.clear()
            await self.within(seconds, "the next step of any worker", self._changed.wait())
        return self._messages.popleft()

    async def look(self, test: Callable[[Params], tuple[float, float]]) -> Look:
        """Fetch the server's statistics and parameters, and test these on another thread.

        Raises
        ------
        ProcessFailed
            When the server does not answer in time.
        """
        observer = self.observer
        try:
            async with asyncio.timeout(LOOK_DEADLINE):
                answers = observer.stats(), observer.fetch(self._params, evaluation=True)
                report, self._params = await asyncio.gather(*answers)
        except TimeoutError:
            raise ProcessFailed(f"the server did not answer within {LOOK_DEADLINE:g} s") from None
        return Look(report, self._params.version, *await asyncio.to_thread(test, self._params))

    async def _until_ready(self) -> None:
        while not all(self.ready):
            self._changed.clear()
            await self._changed.wait()
