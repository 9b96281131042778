"""The async model averager: `ModelAverager`'s methods, awaited; many may train on one loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Self

from aiops.client.averager_facade import FAREWELL, AveragerFacade
from aiops.common.closing import AsyncClosing
from aiops.errors import DeadlineExceeded, UsageError
from aiops.model.layout import Array

__all__ = ["AsyncModelAverager"]


class AsyncModelAverager(AveragerFacade, AsyncClosing):
    """One worker of an asynchronous model average, for asyncio: `ModelAverager`'s twin.

    ::

        async with aiops.client.AsyncModelAverager("aiops://host:7171", params) as averager:
            for batch in data:
                async with averager.step():
                    for name, gradient in gradients(params, batch).items():
                        params[name] -= averager.lr * gradient
            await averager.average()               # a last one, with whoever is still there

    It averages as `ModelAverager` does, and decides nothing else: a task of the event loop does
    what there a thread does. So the loop must get its turns: gradients that take long are best
    computed elsewhere (``await asyncio.to_thread(...)``), under the step if you like.

    Parameters
    ----------
    url, params, token, name, timeout, host
        As `ModelAverager`'s; ``params`` are overwritten when `connect` has returned.

    Attributes
    ----------
    lock, stats
        As `ModelAverager`'s.

    Raises
    ------
    UsageError
        When the URL, the time-out or a tensor cannot be. What a server may have to say is raised
        by `connect`.
    """

    def __init__(
        self,
        url: str,
        params: Mapping[str, Array] | Any,
        *,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        host: str | None = None,
    ) -> None:
        super().__init__(url, params, token=token, name=name, timeout=timeout, host=host)
        self._averaging: asyncio.Task[None] | None = None
        self._inside: asyncio.Task[Any] | None = None  # the task that is in a step

    async def connect(self) -> Self:
        """Connect, and take the first average (``async with`` does it). Raises as there."""
        self._check()
        if self._averaging is None:
            self._averaging = asyncio.get_running_loop().create_task(self._core.main())
        started = asyncio.wrap_future(self._core.started)
        # It may be that nobody waits any more when it fails.
        started.add_done_callback(lambda future: future.cancelled() or future.exception())
        await asyncio.shield(started)
        return self

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Hold the lock for one step of training. See `ModelAverager.step`.

        Raises
        ------
        BadPush
            When the model holds a value that is not finite: training has diverged.
        UsageError
            When this averager is not connected, or closed, or the step is within another.
        """
        self._outside("step")
        async with self.lock.awaited():
            self._inside = asyncio.current_task()
            try:
                yield
            finally:
                self._inside = None
        if self._core.stepped():
            await self.average()

    async def average(self) -> int:
        """Average now, also after `abort`, and wait for it. See `ModelAverager.average`."""
        self._outside("average")
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._core.ask(answer)
        count: int = await self._wait(asyncio.wrap_future(answer), "the average")
        return count

    async def abort(self) -> None:
        """Stop averaging; return when no average is under way. See `ModelAverager.abort`."""
        self._outside("abort")
        await self._wait(self._core.abort(), "an average under way")

    async def resume(self) -> None:
        """Average again after `abort`."""
        self._outside("resume")
        await self._core.resume()

    async def close(self) -> None:
        """Say goodbye, so that nobody waits for this worker; may be called twice."""
        if self._closed:
            return
        self._closed = True
        averaging = self._averaging
        if averaging is None or averaging.done():
            return
        if self._core.started.done():
            await self._core.end(FAREWELL)
        else:
            averaging.cancel()
        await asyncio.wait([averaging])

    # ------------------------------------------------------------ inside

    def _outside(self, what: str) -> None:
        """Refuse what waits for the lock to who holds it, and everything before `connect`."""
        self._check()
        if not self._core.started.done():
            raise UsageError(f"{what}() needs a connection: use async with, or await connect()")
        if self._inside is not None and self._inside is asyncio.current_task():
            raise UsageError(f"{what}() waits for the lock that this step holds: leave it first")

    async def _wait(self, work: asyncio.Future[Any] | Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                return await work
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise self._late(what) from None
