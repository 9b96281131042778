"""The averaging half of a worker: a loop that runs beside training.

`ModelAverager` gives it a thread of its own, `AsyncModelAverager` a task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiops import messages
from aiops.client.lookup import looked_up
from aiops.client.meeting import MeetingClient
from aiops.client.neighbours import Listener, take_part
from aiops.client.replica import Replica
from aiops.client.turns import TurnLock
from aiops.collective import LIMIT, Flat, Ring, fit
from aiops.errors import (
    AiopsError,
    BadPush,
    ConnectionLost,
    DeadlineExceeded,
    NotReady,
    RemoteProtocolError,
    Unauthorised,
    Unavailable,
    UsageError,
)
from aiops.layout import Arena
from aiops.surroundings import SURROUNDINGS
from aiops.wire import Traffic

_log = logging.getLogger("aiops.client")

_PASSING = (ConnectionLost, RemoteProtocolError, Unavailable, NotReady)
"""What costs one round, and not the run."""

_SLOWEST = 64 * 1024
"""Bytes per second that a round must manage in all, beyond the time-out."""

_WITHDRAWAL = 2.0  # seconds that the server has to hear that this worker averages no more
_AGAIN = 0.05  # seconds before a first average is tried again


@dataclass(slots=True)
class Averages:
    """What became of a worker's averages.

    Attributes
    ----------
    rounds
        Averages taken over, with at least one other worker.
    alone
        Times that nobody else was ready.
    failed
        Rounds given up, because a worker died in the midst of one, say.
    workers
        How many were in the last round, this one included.
    seconds
        Time spent in rounds (not in waiting for them).
    traffic
        Bytes to and from other workers.
    last_error
        What the last failed round failed at.
    """

    rounds: int = 0
    alone: int = 0
    failed: int = 0
    workers: int = 0
    seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    last_error: AiopsError | None = None


class Averaging:
    """Everything that happens on the averaging thread's event loop.

    Parameters
    ----------
    replica, lock
        The model, and what guards it.
    url, token, name, timeout, host
        As `ModelAverager`'s.
    """

    def __init__(
        self,
        replica: Replica,
        lock: TurnLock,
        *,
        url: str,
        token: str | None,
        name: str | None,
        timeout: float,
        host: str | None,
    ) -> None:
        self._replica, self._lock, self._host, self._timeout = replica, lock, host, timeout
        self._client = MeetingClient(url, role="worker", token=token, name=name, timeout=timeout)
        self.stats = Averages()
        self.plan: Mapping[str, Any] = {}
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.error: BaseException | None = None  # what ended it
        self.loop: asyncio.AbstractEventLoop | None = None
        self.steps = 0  # taken so far; written by the training thread
        self._taken = 0  # averages taken over, alone ones included: 0 is new
        self._paused = False

    async def main(self) -> None:
        """Connect, take the first average, and go on until cancelled."""
        self.loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._idle, self._wake = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._asked: list[concurrent.futures.Future[int]] = []
        try:
            async with self._client:
                await self._begin()
                try:
                    await self._first()
                    self.started.set_result(None)
                    await self._go_on()
                finally:
                    await self._listener.close()
        except BaseException as error:
            self._end(error)
            if not isinstance(error, AiopsError | asyncio.CancelledError):
                raise

    def _end(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = ConnectionLost("this averager was closed")
        self.error = error
        asked: list[concurrent.futures.Future[Any]] = [self.started, *self._asked]
        for waiting in asked:
            if not waiting.done():
                waiting.set_exception(error)

    # ------------------------------------------------------------ asked for by the training thread

    async def abort(self) -> None:
        """Average no more; return when nothing is under way."""
        self._paused = True
        # A request to meet that is under way is answered too, with nobody or with a last round. If
        # the server does not answer, there is nobody to withdraw from.
        with contextlib.suppress(AiopsError, TimeoutError):
            async with asyncio.timeout(_WITHDRAWAL):
                await self._client.meet("", 0, self._taken)
        await self._idle.wait()

    async def resume(self) -> None:
        """Average again."""
        self._paused = False
        self._wake.set()

    def ask(self, answer: concurrent.futures.Future[int]) -> None:
        """Average now; the answer is how many workers were in it."""
        self._asked.append(answer)
        self._wake.set()

    def stepped(self) -> bool:
        """Count a step of training; say whether an average is to be waited for now."""
        self.steps += 1
        return self.steps <= int(self.plan["warmup"])

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received from, and sent to, the server and the other workers."""
        others = self.stats.traffic
        received, sent = self._client.traffic
        return received + others.bytes_in, sent + others.bytes_out

    @property
    def over(self) -> bool:
        """Whether there is nothing left to end."""
        return self._task is None or self._task.done()

    async def end(self, patience: float) -> None:
        """Finish what is under way, if that is quick, and end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.abort()
        assert self._task is not None
        self._task.cancel()

    # ------------------------------------------------------------ the loop

    async def _begin(self) -> None:
        """Learn what the server wants, and get ready."""
        client, replica = self._client, self._replica
        plan = client.plan.get("average")
        if not isinstance(plan, dict):
            raise UsageError(
                f"{client.url} runs {client.policy!r}, which averages no models: start it with"
                " --policy average, or use aiops.Worker"
            )
        self.plan = plan
        layout = await client.agree(replica.arrays())
        self._copy, self._flat = Arena(layout), Flat(layout)
        here = self._host or SURROUNDINGS.get().reached_at or client.local_host
        self._host = await looked_up(here, self._timeout)
        try:
            self._listener = Listener(self._host, plan["stall"])
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._host} for other workers ({error.strerror or error}): pass"
                " host=... an address of this machine that they can reach"
            ) from None

    async def _first(self) -> None:
        """Take the first average: the model that the others have, if there are any."""
        until = asyncio.get_running_loop().time() + self._timeout
        try:
            while not self._taken:
                await self._average(until=until)
                if not self._taken:
                    async with asyncio.timeout_at(until):
                        await asyncio.sleep(_AGAIN)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            last = self.stats.last_error
            raise DeadlineExceeded(
                f"{self._client.url}: other workers average here, but none shared its model"
                f" with this one in {self._timeout:g} s ({last or 'they are away'}): are they"
                " paused by abort()? timeout=... allows more"
            ) from None

    async def _go_on(self) -> None:
        """Average every interval, and when asked."""
        while True:
            await self._pause()
            asked = len(self._asked)  # they stay there until answered, should this be the end
            count = 0
            if asked or not self._paused:
                count = await self._average(bool(asked))
            for answer in self._asked[:asked]:
                if not answer.done():
                    answer.set_result(count)
            del self._asked[:asked]

    async def _pause(self) -> None:
        """Wait for the interval to pass, or for a wish; while paused, for a wish.

        While warming up every step ends with an average, and those between are for newcomers only:
        they keep out of the others' way for as long as these would wait for this worker's step.
        """
        while not self._asked:
            self._wake.clear()
            warming = self.steps < self.plan["warmup"]
            interval = self.plan["interval"] + (self.plan["grace"] if warming else 0.0)
            try:
                async with asyncio.timeout(None if self._paused else interval):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _average(self, asked: bool = False, until: float | None = None) -> int:
        """Take part in one round; return how many were in it, 0 when it came to nothing.

        Raises
        ------
        TimeoutError
            When no round has begun by the loop's time ``until``.
        """
        self._idle.clear()
        try:
            await self._copy_out()
            if self._paused and not asked:  # meanwhile
                return 0
            async with asyncio.timeout_at(until):
                told = await self._meet()
            if not told.members:
                return 0
            if len(told.members) == 1:
                self.stats.alone += 1
                self._taken += 1
            else:
                await self._round(told)
            self.stats.workers = len(told.members)
            return len(told.members)
        except _PASSING as error:
            self._failed(error)
            return 0
        except Unauthorised as error:
            if error.details.get("worker") is None:
                raise
            self._failed(error)
            return 0
        finally:
            self._idle.set()

    async def _copy_out(self) -> None:
        """Copy the model, and see that it may be shared."""
        async with self.locked():
            self._replica.copy_out(self._copy)
        self._flat.load(self._copy)
        for name, values in self._flat.views:
            if not fit(values):
                raise BadPush(
                    f"{name!r} holds a value that is not finite or not below {LIMIT:g}, and is not"
                    " averaged: training has diverged; lower the learning rate",
                    tensor=name,
                )

    async def _meet(self) -> messages.Round:
        """Wait for others."""
        assert self._host is not None
        try:
            return await self._client.meet(self._host, self._listener.port, self._taken)
        except NotReady:  # the server was started anew
            await self._client.define_again(self._copy.views)
            raise

    async def _round(self, told: messages.Round) -> None:
        """Average with the others, and take the mean over."""
        counts = [counts for _host, _port, counts in told.members]
        if not (told.rank < len(counts) and any(counts)):
            raise RemoteProtocolError(f"{self._client.url} told of a round that cannot be")
        loop = asyncio.get_running_loop()
        ring = Ring(told.rank, counts, self._flat)
        allowed = self._timeout + self._flat.data.nbytes / _SLOWEST
        began = loop.time()
        try:
            async with asyncio.timeout(allowed):
                stall = self.plan["stall"]
                await take_part(told, ring, self._listener, stall, self.stats.traffic)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"round {told.number} took longer than {allowed:.0f} s: a worker is too slow"
            ) from None
        finally:
            self.stats.seconds += loop.time() - began
        prepared = self._replica.prepare(self._flat, self._copy)
        async with self.locked():
            self._replica.add(prepared)
        self._taken += 1
        self.stats.rounds += 1

    def _failed(self, error: AiopsError) -> None:
        self.stats.failed += 1
        if type(error) is not type(self.stats.last_error):  # once per kind of trouble
            _log.warning("an average was given up: %s", error)
        self.stats.last_error = error

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the lock, without blocking this loop while others have it."""
        loop = asyncio.get_running_loop()
        had: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not had.done():
                had.set_result(None)

        def granted() -> None:
            loop.call_soon_threadsafe(settle)

        self._lock.request(granted)
        try:
            await had
        except BaseException:
            self._lock.cancel(granted)
            raise
        try:
            yield
        finally:
            self._lock.release()
