"""The averaging half of a worker: a loop that runs beside training and begins the rounds.

`ModelAverager` gives it a thread of its own, `AsyncModelAverager` a task. The training half meets
it in three steps: `Averaging` is what was asked for; `Averaging.task` is known once it runs; and
`Averaging.started` has an `AveragingLoop` once the first average was taken.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Mapping
from typing import Any

from aiops.client.fair_lock import FairLock
from aiops.client.replica import Replica
from aiops.client.rounds import Averages, Rounds, RoundsClient
from aiops.client.server_info import ServerInfo
from aiops.client.traced_rounds import TracedRounds
from aiops.common.tls_files import Tls
from aiops.errors import AiopsError, ConnectionLost, DeadlineExceeded, NotReady
from aiops.wire.data_messages import GivenTask, TakeTask

_WITHDRAWAL = 2.0  # seconds that the withdrawal at the server may take
_AGAIN = 0.05  # seconds before a first average is tried again


class Averaging:
    """The averaging of one worker, on an event loop.

    Parameters
    ----------
    replica, lock
        The model, and the lock that guards it.
    url, token, name, timeout, host, tls
        As `ModelAverager`'s.

    Attributes
    ----------
    stats
        The counts of the averages.
    task
        The task that runs `main`, once it does.
    started
        The loop, once it has taken the first average; or the error that ended it before.
    error
        The error that ended it, if it has ended.
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
        tls: Tls | None,
    ) -> None:
        self._replica, self._lock, self._timeout, self._host = replica, lock, timeout, host
        self._client = RoundsClient(url, token=token, name=name, timeout=timeout, tls=tls)
        self.stats: Averages = Averages()
        self.task: concurrent.futures.Future[asyncio.Task[Any]] = concurrent.futures.Future()
        self.started: concurrent.futures.Future[AveragingLoop] = concurrent.futures.Future()
        self.error: BaseException | None = None

    async def main(self) -> None:
        """Connect, take the first average, and go on until cancelled."""
        task = asyncio.current_task()
        if task is not None:
            self.task.set_result(task)
        try:
            async with self._client:
                made = Rounds if self._client._tracing is None else TracedRounds
                rounds = await made.begun(
                    self._client, self._replica, self._lock, self._timeout, self._host, self.stats
                )
                try:
                    averaging = AveragingLoop(rounds)
                    await self._first(averaging)
                    self.started.set_result(averaging)
                    await averaging.run()
                finally:
                    await rounds.close()
        except BaseException as error:
            self._end(error)
            if not isinstance(error, AiopsError | asyncio.CancelledError):
                raise

    def log(self, values: Mapping[str, Any]) -> None:
        """Log numbers, on any thread, as `Client.log`."""
        self._client.note_log(values)
        if self.task.done():
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                loop = self.task.result().get_loop()
                loop.call_soon_threadsafe(self._client.send_log)

    def _end(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = ConnectionLost("this averager was closed")
        self.error = error
        averaging = self.loop
        if averaging is not None:
            averaging.fail(error)
        elif not self.started.done():
            self.started.set_exception(error)

    async def _first(self, averaging: AveragingLoop) -> None:
        """Take the first average: the model that the others have, if there are any."""
        rounds = averaging.rounds
        until = asyncio.get_running_loop().time() + self._timeout
        try:
            while not rounds.taken:
                await averaging.average(until=until)
                if not rounds.taken:
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

    # ------------------------------------------------------------ as the training half sees it

    @property
    def loop(self) -> AveragingLoop | None:
        """The loop, if it has been started."""
        if not self.started.done() or self.started.exception() is not None:
            return None
        return self.started.result()

    @property
    def plan(self) -> Mapping[str, Any]:
        """The policy's settings, as the server announced them; empty before the start."""
        return {} if self.loop is None else self.loop.rounds.plan

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received from, and sent to, the server and the other workers."""
        others, (received, sent) = self.stats.traffic, self._client.traffic
        return received + others.bytes_in, sent + others.bytes_out

    # ------------------------------------------------------------ data sets

    @property
    def info(self) -> ServerInfo:
        """The knowledge of the server, and of the examples in hand."""
        return self._client.info

    @property
    def token(self) -> str | None:
        """The token for the server."""
        return self._client.token

    async def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set; a server that has come back is offered the model again."""
        try:
            return await self._client.take_task(asked)
        except NotReady:
            await self._client.define_again(self._replica.arrays())
            return await self._client.take_task(asked)

    async def end(self, patience: float) -> None:
        """Finish what is under way, if that takes at most ``patience`` seconds, and end."""
        if self.loop is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.loop.abort()
        self.task.result().cancel()


class AveragingLoop:
    """The loop beside training: an average every interval, and when asked.

    Parameters
    ----------
    rounds
        The averages themselves.

    Attributes
    ----------
    steps
        Steps of training so far; written by the training thread.
    """

    steps: int

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.steps = 0
        self._paused = False
        self._idle, self._wake = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._asked: list[concurrent.futures.Future[int]] = []

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

    def fail(self, error: BaseException) -> None:
        """Give all that was asked for this error."""
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(error)

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Average every interval, and when asked; without end."""
        while True:
            await self._pause()
            asked = len(self._asked)  # they stay there until answered, should this be the end
            count = 0
            if asked or not self._paused:
                count = await self.average(bool(asked))
            for answer in self._asked[:asked]:
                if not answer.done():
                    answer.set_result(count)
            del self._asked[:asked]

    async def _pause(self) -> None:
        """Wait for the interval to pass, or for a wish; while paused, for a wish.

        While warming up every step ends with an average, and those between are for newcomers only:
        they keep out of the others' way for as long as these would wait for this worker's step.
        Under a budget the interval lasts until the rounds so far have been paid for.
        """
        while not self._asked:
            self._wake.clear()
            plan = self.rounds.plan
            warming = self.steps < plan["warmup"]
            interval = plan["interval"] + (plan["grace"] if warming else 0.0)
            interval = max(interval, self.rounds.spacing.wait(asyncio.get_running_loop().time()))
            try:
                async with asyncio.timeout(None if self._paused else interval):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def average(self, asked: bool = False, until: float | None = None) -> int:
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
