"""The async model averager: `ModelAverager`'s methods, awaited; many may train on one loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Self

from aiops.client.averager_facade import LEAVE_TIMEOUT, AveragerFacade
from aiops.client.averaging import AveragingLoop
from aiops.common.closing import AsyncClosing
from aiops.common.tls_files import Tls
from aiops.errors import DeadlineExceeded, UsageError
from aiops.model.layout import Array
from aiops.wire.data_messages import GivenTask, TakeTask

__all__ = ["AsyncModelAverager"]


class AsyncModelAverager(AveragerFacade, AsyncClosing):
    """One worker of an asynchronous model average, for asyncio: `ModelAverager`'s twin.

    ::

        async with aiops.client.AsyncModelAverager("aiops://host:7171", params) as averager:
            for batch in data:
                async with averager.step():
                    for name, gradient in gradients(params, batch).items():
                        params[name] -= averager.lr * gradient
            await averager.average()               # a last one, with those still there

    It averages as `ModelAverager` does, in a task of the event loop instead of a thread. A function
    that computes long blocks the loop, and with it the averages: compute such gradients elsewhere
    (``await asyncio.to_thread(...)``), if need be within the step.

    Parameters
    ----------
    url, params, token, name, timeout, host, tls
        As `ModelAverager`'s; ``params`` are overwritten before `connect` returns.

    Attributes
    ----------
    lock, stats, steps, lr, plan, traffic
        As `ModelAverager`'s.

    Raises
    ------
    UsageError
        When the URL, the time-out or a tensor is invalid. `connect` raises the other errors.
    """

    def __init__(
        self,
        url: str | None = None,
        params: Mapping[str, Array] | Any = None,
        *,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        host: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(url, params, token=token, name=name, timeout=timeout, host=host, tls=tls)
        self._averaging: asyncio.Task[None] | None = None
        self._inside: asyncio.Task[Any] | None = None  # the task that is in a step

    async def connect(self) -> Self:
        """Connect, and take the first average (``async with`` does it).

        Raises as `ModelAverager` does.
        """
        self._check()
        if self._averaging is None:
            self._averaging = asyncio.get_running_loop().create_task(self._core.main())
        started = asyncio.wrap_future(self._core.started)
        # Retrieve its exception even if this call was cancelled: asyncio would log it otherwise.
        started.add_done_callback(lambda future: future.cancelled() or future.exception())
        await asyncio.shield(started)
        return self

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Hold the lock for one step of training, as `ModelAverager.step`.

        Raises
        ------
        BadPush
            When the model holds a value that is not finite: training has diverged.
        UsageError
            When this averager is not connected, or closed, or the step is within another.
        """
        averaging = self._outside("step")
        async with self.lock.awaited():
            self._inside = asyncio.current_task()
            try:
                yield
                self._core.info.stepped()
            finally:
                self._inside = None
        if averaging.stepped():
            await self.average()

    async def average(self) -> int:
        """Average now, also after `abort`, and wait for it, as `ModelAverager.average`."""
        averaging = self._outside("average")
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()
        averaging.ask(answer)
        count: int = await self._wait(asyncio.wrap_future(answer), "the average")
        return count

    async def abort(self) -> None:
        """Stop averaging, as `ModelAverager.abort`; return when no average is under way."""
        await self._wait(self._outside("abort").abort(), "an average under way")

    async def resume(self) -> None:
        """Average again after `abort`."""
        await self._outside("resume").resume()

    async def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set (`aiops.data` does), as `ModelAverager.take_task`."""
        self._outside("take_task")
        return await self._core.take_task(asked)

    async def push_rest(self) -> None:
        """Average now, if this model has examples that no round had (`aiops.data` does)."""
        self._outside("push_rest")
        info = self._core.info
        async with self.lock.awaited():
            info.stepped()
        if info.unsettled:
            await self.average()

    async def close(self) -> None:
        """Leave the server, so that no other worker waits for this one; may be called twice."""
        if self._closed:
            return
        self._closed = True
        averaging = self._averaging
        if averaging is None or averaging.done():
            return
        if self._core.started.done():
            await self._core.end(LEAVE_TIMEOUT)
        else:
            averaging.cancel()
        await asyncio.wait([averaging])

    # ------------------------------------------------------------ inside

    def _outside(self, what: str) -> AveragingLoop:
        """Return what averages; refuse the task that holds the lock, and calls before `connect`."""
        self._check()
        if not self._core.started.done():
            raise UsageError(f"{what}() needs a connection: use async with, or await connect()")
        if self._inside is not None and self._inside is asyncio.current_task():
            raise UsageError(f"{what}() waits for the lock that this step holds: leave it first")
        return self._core.started.result()

    async def _wait(self, work: asyncio.Future[Any] | Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                return await work
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise self._late(what) from None
