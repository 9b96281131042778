"""Run a job: start its processes, hand on what they print, carry out the supervision's orders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from aiops.client.asyncio.client import AsyncClient
from aiops.common import urls
from aiops.errors import AiopsError
from aiops.launch.program import JOB, Place, UserProgram, server_command, worker_name
from aiops.launch.supervision import (
    END,
    INTERRUPT,
    KILL,
    SERVER,
    Finish,
    JobEvent,
    JobInterrupted,
    JobOrder,
    JobTick,
    ProcessEnded,
    Say,
    ServerReady,
    Start,
    Stop,
    Supervision,
)
from aiops.net import signals
from aiops.net.process_tree import Lines, kill_session, send

_LOOK, _ANSWER = 0.5, 1.0
"""Seconds between two looks at the server's statistics, and that it has to answer."""

_CHUNK = 1 << 16


class Watcher(Protocol):
    """Is told what happens in a job."""

    def line(self, rank: int, text: str, *, error: bool) -> None:
        """Take a line that a process has printed; ``error``: on its standard error."""

    def say(self, text: str) -> None:
        """Take a sentence about the job."""

    def begun(self, rank: int, restarts: int) -> None:
        """Note that a process has been started; ``restarts``: how often before."""

    def ended(self, rank: int, status: int) -> None:
        """Note that a process has ended, with this exit status; -n: by signal n."""

    def look(self, report: Mapping[str, Any] | None) -> None:
        """Take the server's statistics, None if it does not answer."""


def _stop(pid: int, how: str) -> None:
    """Have the leader of a session end, as `Stop` says."""
    if how == KILL:
        kill_session(pid)
    elif how == INTERRUPT:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGINT)
    else:
        send(pid, signal.SIGTERM)


class Job:
    """A server and its workers, from the first process to the last.

    Parameters
    ----------
    program
        What the workers run.
    workers
        How many.
    flags
        The server's: of `aiops serve`.
    supervision
        Decides.
    watcher
        Is told what happens.
    seed, threads
        As `Place`'s.
    environment
        The variables of all processes.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        program: UserProgram,
        workers: int,
        flags: Sequence[str],
        supervision: Supervision,
        watcher: Watcher,
        *,
        seed: int,
        threads: int,
        environment: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program, self._workers, self._flags = program, workers, flags
        self._supervision, self._watcher, self._now = supervision, watcher, clock
        self._seed, self._threads = seed, threads
        self._mark = secrets.token_hex(16)
        self._environment = {**environment, JOB: self._mark}
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._children: dict[int, int] = {}  # processes by rank
        self._tasks: set[asyncio.Task[None]] = set()
        self._url = ""
        self._observer: AsyncClient | None = None
        self._joined: set[str] = set()  # names of workers that the server has known
        self._reaper: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Run it; return the exit status.

        SIGINT and SIGTERM end it, as `aiops.launch.supervision` says.

        Raises
        ------
        OSError
            When a process cannot be started.
        """
        with signals.handled(lambda number: self._post(JobInterrupted(self._now(), number))):
            try:
                await self._guard()
                looking = asyncio.create_task(self._keep_looking())
                self._tasks.add(looking)
                return await self._supervised()
            finally:
                await self._clean_up()

    async def _supervised(self) -> int:
        orders = self._supervision.begin()
        while True:
            for order in orders:
                if isinstance(order, Finish):
                    return order.status
                await self._carry_out(order)
            wait = self._supervision.wake_at - self._now()
            try:
                event = await asyncio.wait_for(
                    self._events.get(), None if wait == inf else max(0.0, wait)
                )
            except TimeoutError:
                event = JobTick(self._now())
            if isinstance(event, ServerReady):
                self._url = self._url or event.url
            orders = self._supervision.handle(event)

    def _post(self, event: JobEvent) -> None:
        self._events.put_nowait(event)

    async def _carry_out(self, order: JobOrder) -> None:
        match order:
            case Start(rank, restarts):
                await self._start(rank, restarts)
            case Stop(rank, how):
                if (rank, how) == (SERVER, END):
                    self._watcher.look(await self._look())  # the last
                if rank in self._children:
                    _stop(self._children[rank], how)
            case Say(text):
                self._watcher.say(text)

    # ------------------------------------------------------------ processes

    async def _guard(self) -> None:
        """Start the process that ends the others if this one is killed."""
        self._reaper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiops.launch.reaper"),
            stdin=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )

    def _tell_reaper(self, what: str, pid: int) -> None:
        assert self._reaper is not None
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.write(f"{what} {pid}\n".encode())

    async def _start(self, rank: int, restarts: int) -> None:
        if rank == SERVER:
            port = urls.parse_all(self._url)[0].port if self._url else None
            words, environment = server_command(self._flags, port), self._environment
        else:
            words = self._program.command
            environment = Place(
                *(rank, self._workers, restarts, self._url, self._seed, self._threads)
            ).variables(self._environment)
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._tell_reaper("begun", process.pid)
        self._children[rank] = process.pid
        self._watcher.begun(rank, restarts)
        task = asyncio.create_task(self._attend(rank, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, rank: int, process: asyncio.subprocess.Process) -> None:
        """Hand on what a process prints, and post its end."""
        assert process.stdout is not None
        assert process.stderr is not None
        reading = [
            asyncio.create_task(self._read(rank, process.stdout, error=False)),
            asyncio.create_task(self._read(rank, process.stderr, error=True)),
        ]
        status = await process.wait()
        # What it has started may hold the pipes open; what it printed itself is there already.
        _done, left = await asyncio.wait(reading, timeout=0.2)
        for task in left:
            task.cancel()
        self._tell_reaper("ended", process.pid)
        del self._children[rank]
        if rank != SERVER:
            await self._look()  # it may have joined since the last look
        self._watcher.ended(rank, status)
        joined = worker_name(rank) in self._joined
        self._post(ProcessEnded(self._now(), rank, status, joined))

    async def _read(self, rank: int, pipe: asyncio.StreamReader, *, error: bool) -> None:
        lines, first = Lines(), rank == SERVER and not error
        while True:
            chunk = await pipe.read(_CHUNK)
            for line in lines.feed(chunk):
                if first:
                    first = False
                    self._post(ServerReady(self._now(), line.strip()))
                else:
                    self._watcher.line(rank, line, error=error)
            if not chunk:
                return

    async def _clean_up(self) -> None:
        for child in self._children.values():
            _stop(child, KILL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._observer is not None:
            with contextlib.suppress(AiopsError, TimeoutError):
                await asyncio.wait_for(self._observer.close(), 0.2)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()  # it kills what workers have left behind, and ends
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reaper.wait(), 1.0)

    # ------------------------------------------------------------ the server's statistics

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self._watcher.look(await self._look())

    async def _look(self) -> Mapping[str, Any] | None:
        """Return the server's statistics, or None; note the workers that it knows."""
        if not self._url:
            return None
        try:
            async with asyncio.timeout(_ANSWER):
                if self._observer is None:
                    observer = AsyncClient(self._url, name="aiops run", timeout=_ANSWER)
                    await observer.connect()
                    self._observer = observer
                report = await self._observer.stats()
        except (AiopsError, TimeoutError, OSError):
            return None
        self._joined |= {row["name"] for row in report["workers"] if row["role"] == "worker"}
        return report
