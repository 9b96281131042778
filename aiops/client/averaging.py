"""The averaging half of a worker: a loop that runs beside training and begins the rounds.

`ModelAverager` gives it a thread of its own, `AsyncModelAverager` a task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from typing import Any

from aiops.client.fair_lock import FairLock
from aiops.client.meeting import MeetingClient
from aiops.client.replica import Replica
from aiops.client.rounds import Rounds
from aiops.errors import AiopsError, ConnectionLost, DeadlineExceeded

_WITHDRAWAL = 2.0  # seconds that the withdrawal at the server may take
_AGAIN = 0.05  # seconds before a first average is tried again


class Averaging:
    """The averaging of one worker, on an event loop.

    Parameters
    ----------
    replica, lock
        The model, and the lock that guards it.
    url, token, name, timeout, host
        As `ModelAverager`'s.

    Attributes
    ----------
    rounds
        The averages themselves.
    """

    def __init__(
        self,
        replica: Replica,
        lock: FairLock,
        *,
        url: str,
        token: str | None,
        name: str | None,
        timeout: float,
        host: str | None,
    ) -> None:
        self._timeout = timeout
        self._client = MeetingClient(url, role="worker", token=token, name=name, timeout=timeout)
        self.rounds = Rounds(self._client, replica, lock, timeout, host)
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.error: BaseException | None = None  # what ended it
        self.loop: asyncio.AbstractEventLoop | None = None
        self.steps = 0  # taken so far; written by the training thread
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
                await self.rounds.begin()
                try:
                    await self._first()
                    self.started.set_result(None)
                    await self._go_on()
                finally:
                    await self.rounds.close()
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
        # Without an answer of the server there is no round to withdraw from.
        with contextlib.suppress(AiopsError, TimeoutError):
            async with asyncio.timeout(_WITHDRAWAL):
                await self.rounds.withdraw()
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
        return self.steps <= int(self.rounds.plan["warmup"])

    @property
    def over(self) -> bool:
        """True once the loop has ended."""
        return self._task is None or self._task.done()

    async def end(self, patience: float) -> None:
        """Finish what is under way, if that is quick, and end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.abort()
        assert self._task is not None
        self._task.cancel()

    # ------------------------------------------------------------ the loop

    async def _first(self) -> None:
        """Take the first average: the model that the others have, if there are any."""
        until = asyncio.get_running_loop().time() + self._timeout
        try:
            while not self.rounds.taken:
                await self._average(until=until)
                if not self.rounds.taken:
                    async with asyncio.timeout_at(until):
                        await asyncio.sleep(_AGAIN)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            last = self.rounds.stats.last_error
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
            plan = self.rounds.plan
            warming = self.steps < plan["warmup"]
            interval = plan["interval"] + (plan["grace"] if warming else 0.0)
            try:
                async with asyncio.timeout(None if self._paused else interval):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _average(self, asked: bool = False, until: float | None = None) -> int:
        """Take part in one round, unless paused meanwhile; return how many were in it.

        Raises
        ------
        TimeoutError
            When no round has begun by the loop's time ``until``.
        """
        self._idle.clear()
        try:
            return await self.rounds.take(lambda: asked or not self._paused, until)
        finally:
            self._idle.set()
