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
from aiops.common.launchers import worker_name
from aiops.common.variables import JOB
from aiops.errors import AiopsError
from aiops.launch.program import Team, UserProgram, server_command
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
    WorkersSeen,
)
from aiops.net import signals
from aiops.net.cpu_count import run_as_batch, usable
from aiops.net.process_tree import Lines, busy_seconds, kill_session, send

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

    def look(self, report: Mapping[str, Any] | None, busy: Mapping[int, float]) -> None:
        """Take the server's statistics, None if it does not answer.

        ``busy``: by rank, the seconds that a worker has computed, or waited for a processor.
        """


def _stop(pid: int, how: str, number: int = signal.SIGINT) -> None:
    """Have the leader of a session end, as `Stop` says."""
    if how == KILL:
        kill_session(pid)
    elif how == INTERRUPT:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
    else:
        send(pid, signal.SIGTERM)


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Job:
    """A server and its workers, from the first process to the last.

    Parameters
    ----------
    program
        What the workers run.
    team
        They.
    flags
        The server's: of `aiops serve`.
    supervision
        Decides.
    watcher
        Is told what happens.
    environment
        The variables of all processes.
    under
        The processes of other ranks are another launcher's: what the worker here prints goes to
        this command's own output, and signals that are for programs are passed on to it.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        program: UserProgram,
        team: Team,
        flags: Sequence[str],
        supervision: Supervision,
        watcher: Watcher,
        *,
        environment: Mapping[str, str],
        under: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program, self._team, self._flags = program, team, flags
        self._supervision, self._watcher, self._now = supervision, watcher, clock
        self._under = under
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
        passed_on = (signal.SIGUSR1, signal.SIGUSR2) if self._under else ()
        with (
            signals.handled(lambda number: self._post(JobInterrupted(self._now(), number))),
            signals.each_handled(dict.fromkeys(passed_on, self._pass_on)),
        ):
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
                self._url = self._url or urls.local_url(event.url)
            orders = self._supervision.handle(event)

    def _post(self, event: JobEvent) -> None:
        self._events.put_nowait(event)

    def _pass_on(self, number: int) -> None:
        for rank, child in self._children.items():
            if rank != SERVER:
                send(child, signal.Signals(number))

    async def _carry_out(self, order: JobOrder) -> None:
        match order:
            case Start(rank, restarts):
                await self._start(rank, restarts)
            case Stop(rank, how, number):
                if (rank, how) == (SERVER, END):
                    self._watcher.look(await self._look(), {})  # the last
                if rank in self._children and how == END and self._under:
                    send(self._children[rank], signal.SIGINT)  # it ignores SIGTERM
                elif rank in self._children:
                    _stop(self._children[rank], how, number)
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
            place = self._team.place(rank, restarts, self._url)
            environment = place.variables(self._environment)
        output = None if self._under and rank != SERVER else asyncio.subprocess.PIPE
        first: Callable[[], None] | None = None
        if rank == SERVER and self._under:
            # Schedulers send SIGTERM to all processes: the server is to end after the workers.
            first = _ignore_sigterm
        elif not self._under and rank != SERVER and self._team.local_workers > usable():
            first = run_as_batch
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            preexec_fn=first,
        )
        self._tell_reaper("begun", process.pid)
        self._children[rank] = process.pid
        self._watcher.begun(rank, restarts)
        task = asyncio.create_task(self._attend(rank, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, rank: int, process: asyncio.subprocess.Process) -> None:
        """Hand on what a process prints, and post its end."""
        reading = [
            asyncio.create_task(self._read(rank, pipe, error=pipe is process.stderr))
            for pipe in (process.stdout, process.stderr)
            if pipe is not None
        ]
        status = await process.wait()
        if reading:
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
            report = await self._look()
            workers = {r: pid for r, pid in self._children.items() if r != SERVER}
            busy = {rank: busy_seconds(pid) for rank, pid in workers.items()}
            self._watcher.look(report, {r: spent for r, spent in busy.items() if spent is not None})

    async def _look(self) -> Mapping[str, Any] | None:
        """Return the server's statistics, or None; note the workers that it knows."""
        if not self._url:
            return None
        try:
            async with asyncio.timeout(_ANSWER):
                if self._observer is None:
                    name = "aiops join of rank 0" if self._under else "aiops run"
                    observer = AsyncClient(self._url, name=name, timeout=_ANSWER)
                    await observer.connect()
                    self._observer = observer
                report = await self._observer.stats()
        except (AiopsError, TimeoutError, OSError):
            return None
        rows = [row for row in report["workers"] if row["role"] == "worker"]
        present = {row["name"] for row in rows if row["present"]}
        self._joined |= {row["name"] for row in rows}
        if self._under:
            self._post(WorkersSeen(self._now(), self._ranks(self._joined), self._ranks(present)))
        return report

    def _ranks(self, names: set[str]) -> frozenset[int]:
        return frozenset(r for r in range(self._team.workers) if worker_name(r) in names)


def run_job(job: Job) -> int:
    """Run a job to its end; return the exit status.

    Raises
    ------
    AiopsError
        When a process cannot be started.
    """
    try:
        return asyncio.run(job.run())
    except OSError as error:
        raise AiopsError(f"a process cannot be started: {error.strerror or error}") from None
