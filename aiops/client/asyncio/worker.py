"""The async worker: the same methods as `Worker`, awaited; many may train on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Self, TypeAlias

from aiops.client import variables
from aiops.client.asyncio.client import AsyncClient
from aiops.client.facade import WorkerFacade, initial
from aiops.client.lr_factors import LrFactors
from aiops.client.params import Params
from aiops.client.program import Program, T, drive_awaiting
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.training_loop import (
    Gradients,
    JoinBackground,
    Offer,
    Op,
    Send,
    SendInBackground,
    TrainingLoop,
)
from aiops.common import forks
from aiops.common.closing import AsyncClosing
from aiops.common.tls_files import Tls
from aiops.errors import ConnectionLost, NotReady, UsageError
from aiops.model.layout import Array
from aiops.model.tables import Table
from aiops.tracing import Tracing
from aiops.wire.data_messages import GivenTask, TakeTask

__all__ = ["AsyncCompute", "AsyncWorker"]

AsyncCompute: TypeAlias = Callable[[Params], Gradients | Awaitable[Gradients]]


class _TaskTransfer:
    """A transfer that a task carries while gradients are computed."""

    def __init__(self, client: AsyncClient, transfer: Transfer, tracing: Tracing | None) -> None:
        self._server = client.url
        self.ended = 0
        carrying = client.carry(transfer)
        if tracing is not None:
            carrying = self._timed(carrying, tracing)
        self.task = asyncio.get_running_loop().create_task(carrying)
        self.task.add_done_callback(_retrieved)

    async def _timed(
        self, carrying: Coroutine[Any, Any, Receipt | None], tracing: Tracing
    ) -> Receipt | None:
        """Carry, and note the end: those who wait may go on before a callback of the task's."""
        try:
            return await carrying
        finally:
            self.ended = tracing.now()

    @property
    def over(self) -> bool:
        return self.task.done()

    @property
    def receipt(self) -> Receipt | None:
        return self.task.result() if self.over and self.error is None else None

    @property
    def error(self) -> BaseException | None:
        if self.task.cancelled():  # the task that waits for it was not
            return ConnectionLost(f"{self._server}: the push in the background was cancelled")
        return self.task.exception() if self.over else None


class AsyncWorker(WorkerFacade, AsyncClosing):
    """One worker of a training run, for asyncio: `Worker`'s twin.

    ::

        async with aiops.AsyncWorker("aiops://host:7171", params) as worker:
            for batch in data:
                await worker.step(gradients(worker.params, batch))

    It does what `Worker` does, without a thread: the event loop answers the server, and tasks carry
    the transfers in the background. A function that computes long blocks the loop: compute such
    gradients elsewhere (``await asyncio.to_thread(...)``). Otherwise nothing is sent meanwhile, and
    a server with a heartbeat misses the answers. (It then ends the connection, and the next step
    makes another.) What the worker itself computes long, directions of large matrices, it computes
    in a thread.

    One step is taken at a time; rows and statistics may be requested meanwhile. A step may be
    cancelled, and the worker goes on: local steps and transfers under way are neither lost nor
    counted twice. (Where each gradient travels as it is, it is unknown, as after a lost connection,
    whether a cancelled one has become part of the model.) A worker belongs to the process that made
    it: in a fork every call raises `UsageError`, and `close` does nothing.

    Parameters
    ----------
    url, params, tables, views, overlap, token, name, timeout, tls, checksums
        As `Worker`'s. All times are the event loop's (`asyncio.loop.time`), in seconds.

    Attributes
    ----------
    params, last, steps, recomputed, compute_seconds, idle_seconds
        As `Worker`'s; available once it is connected.

    Raises
    ------
    UsageError
        When the URL, the name or the time-out is invalid. `connect` raises all other errors.
    """

    _client: AsyncClient

    def __init__(
        self,
        url: str | None = None,
        params: Mapping[str, Array] | None = None,
        *,
        tables: Mapping[str, Table] | None = None,
        views: bool = False,
        overlap: bool | int | None = None,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        tls: Tls | None = None,
        checksums: bool | None = None,
    ) -> None:
        self._client = AsyncClient(
            url,
            role="worker",
            token=token,
            name=name,
            timeout=timeout,
            tls=tls,
            checksums=checksums,
        )
        self._session = self._client._session
        self._initial, self._tables, self._views = initial(params, tables), tables, views
        self._overlap = variables.overlap(overlap)
        self._carrying: set[asyncio.Task[Receipt | None]] = set()
        self._busy = self._transferring = False  # in a step; in the part of it that uses the server
        self._transferred = asyncio.Event()
        self._offering: asyncio.Task[None] | None = None
        self._directing: asyncio.Task[Gradients] | None = None
        forks.note(self)

    async def connect(self) -> Self:
        """Connect, and offer the model (``async with`` does it); raises as `Worker` does."""
        async with self._turn("connect"):
            if self._begun is None:
                params = await self._client.define(self._initial, self._tables, views=self._views)
                self._begun = self._begin_loop(params, asyncio.get_running_loop().time)
                self._initial = {}
                self._session.book.seconds = self._begun.seconds
                self._client.send_log()
        return self

    async def step(
        self, gradients: Gradients | AsyncCompute, lr_factor: LrFactors = None
    ) -> Receipt:
        """Push the gradients of one mini-batch as the policy has it, and update `params`.

        Parameters
        ----------
        gradients
            As `Worker.step`'s; the function may be a coroutine function.
        lr_factor
            As `Worker.step`'s.

        Returns
        -------
        As `Worker.step`.

        Raises
        ------
        UsageError
            As `Worker.step`, and when another task is in the middle of a step.
        BadPush, StaleGradient, ConnectionLost, DeadlineExceeded
            As `Worker.step`.
        """
        if self._closed:
            self._check()
        steps, again = self._begun or self._steps, callable(gradients)
        self._claim("step")
        try:
            if not steps.direct:
                steps.check(again=again)
            factors = None if lr_factor is None else steps.lr_factors(lr_factor)
            receipt = None
            while receipt is None:
                given = gradients(self.params) if callable(gradients) else gradients
                if inspect.isawaitable(given):
                    given = await given
                if steps.directed:
                    given = await self._directions(steps, given)
                if self._offering is not None:
                    await asyncio.wait([self._offering])
                self._transferring = True
                try:
                    if steps.direct and factors is None:
                        receipt = await self._exchange(steps, given, again)
                    else:
                        receipt = await self._play(steps.step(given, factors, again=again))
                finally:
                    self._transferring = False
                    if self._offering is not None:
                        self._transferred.set()
            if not receipt.pushed:
                await asyncio.sleep(0)  # so that begun transfers go out, and other tasks run
            return receipt
        finally:
            self._busy = False

    async def _exchange(
        self, steps: TrainingLoop, gradients: Gradients, again: bool
    ) -> Receipt | None:
        """Take a step in which the gradient travels by itself."""
        steps.begin(again=again)
        try:
            receipt = await self._client.exchange(steps.params, gradients)
        except BaseException as error:
            return await self._play(steps.failed(error, again=again))
        return steps.took(receipt)

    async def _directions(self, steps: TrainingLoop, gradients: Gradients) -> Gradients:
        """Make directions, in a thread if that takes long: the server is answered meanwhile."""
        if self._directing is not None:  # a step that was cancelled has left it
            await asyncio.wait([self._directing])
        elsewhere = steps.elsewhere(gradients, self.room)
        if elsewhere is None:
            return steps.directions(gradients, self.room)
        self._directing = asyncio.create_task(asyncio.to_thread(elsewhere))
        self._directing.add_done_callback(_retrieved)
        return await asyncio.shield(self._directing)

    async def refresh(self) -> int:
        """Bring `params` up to date without pushing, as `Worker.refresh`; return their version."""
        async with self._turn("refresh"):
            return await self._play(self._steps.refresh())

    async def evaluation(self) -> Params:
        """Return the server's parameters where the model is evaluated, as `Worker.evaluation`."""
        return await self._client.fetch(evaluation=True)

    async def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table; all as `Worker.fetch_rows`."""
        connection = None  # the newest before the last offer, which may have outlasted it
        while True:
            try:
                return await self._client.fetch_rows(name, ids, out)
            except NotReady:
                if self._begun is None or self._session.info.connection == connection:
                    raise
            connection = self._session.info.connection
            if self._offering is None:  # else another task has begun it
                self._offering = asyncio.create_task(self._offer(self._begun))
                self._offering.add_done_callback(_retrieved)
            await asyncio.shield(self._offering)

    async def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        version: int | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> Receipt:
        """Push gradients of rows of a table; all else as `AsyncClient.push_rows`."""
        return await self._client.push_rows(name, ids, grads, version, lr_factor=lr_factor)

    async def exchange_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        next_ids: Any,
        *,
        out: Array | None = None,
        version: int | None = None,
    ) -> tuple[Receipt, Array]:
        """Push and fetch rows of a table in one round trip; all else as `Client.exchange_rows`."""
        return await self._client.exchange_rows(
            name, ids, grads, next_ids, out=out, version=version
        )

    async def _offer(self, steps: TrainingLoop) -> None:
        """Offer the model when no step uses the server; none does before that is over."""
        try:
            while self._transferring:
                self._transferred.clear()
                await self._transferred.wait()
            await self._play(steps.offer())
        finally:
            self._offering = None

    async def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set; all as `Worker.take_task`."""
        connection = None  # as in `Worker.fetch_rows`
        while True:
            try:
                return await self._client.take_task(asked)
            except NotReady:
                if self._begun is None or self._session.info.connection == connection:
                    raise
            connection = self._session.info.connection
            async with self._turn("take_task"):
                await self._play(self._steps.offer())

    async def push_rest(self) -> None:
        """Push what the policy has not pushed yet; all as `Worker.push_rest`."""
        async with self._turn("push_rest"):
            await self._play(self._steps.flush())

    def log(self, **values: Any) -> None:
        """Log numbers about the training, such as ``loss=0.3``; all else as `Client.log`.

        It is no coroutine, and does not wait.
        """
        self._client.log(**values)

    async def stats(self) -> dict[str, Any]:
        """Return the server's statistics: a dict of JSON's types."""
        return await self._client.stats()

    async def close(self, *, flush: bool = True) -> None:
        """Push what has not been pushed yet, and leave the server; may be called twice.

        Parameters
        ----------
        flush
            As `Worker.close`'s.

        Raises
        ------
        UsageError
            When another task is in the middle of a step. That step is broken off.
        ConnectionLost, DeadlineExceeded, BadPush
            When the last push failed. In every case the connection is closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if flush and self._begun is not None:
                async with self._turn("close"):
                    await self._play(self._begun.flush())
        finally:
            if self._tracing is not None:
                self._tracing.end()
            for task in self._carrying:
                task.cancel()
            try:
                await self._client.close()
            finally:
                if self._tracing is not None:
                    await self._tracing.wait_closed()

    async def abandon(self) -> None:
        """Leave the server without pushing the rest."""
        await self.close(flush=False)

    def _claim(self, what: str) -> None:
        """Refuse another step from now on: a step is one whole, however often it waits."""
        if self._forked:
            self._check()
        if self._busy:
            raise UsageError(
                f"a worker does one thing at a time, and another task is in the middle of a step:"
                f" await that before {what}(), or give each task an AsyncWorker of its own"
            )
        self._busy = True

    @contextlib.asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        """Refuse a step meanwhile."""
        self._claim(what)
        try:
            if self._offering is not None:
                await asyncio.wait([self._offering])
            self._transferring = True
            yield
        finally:
            self._busy = self._transferring = False
            self._transferred.set()

    async def _play(self, script: Program[Op, T]) -> T:
        return await drive_awaiting(script, self._carry_out)

    async def _carry_out(self, order: Op) -> Any:
        match order:
            case Send(transfer):
                return await self._client.carry(transfer)
            case Offer(params):
                return await self._client.offer(params, self._tables)
            case SendInBackground(transfer):
                begun = _TaskTransfer(self._client, transfer, self._tracing)
                self._carrying.add(begun.task)
                begun.task.add_done_callback(self._carrying.discard)
                return begun
            case JoinBackground(_TaskTransfer() as background):
                await asyncio.wait([background.task])  # which has a deadline of its own
                return None


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Take note of a task's error, which those who wait for it are told: it is not logged."""
    if not task.cancelled():
        task.exception()
