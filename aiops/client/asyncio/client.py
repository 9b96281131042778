"""The async client: the same methods as `Client`, awaited; concurrent calls share a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from aiops.client.asyncio.connection import AsyncConnection
from aiops.client.asyncio.dialling import AsyncDialler
from aiops.client.asyncio.short_way import BEAT
from aiops.client.backoff import Attempts, Repetitions, overdue
from aiops.client.calls import Ask, Call
from aiops.client.facade import Facade
from aiops.client.params import Params, Stamped
from aiops.client.pending import given_up
from aiops.client.program import T, drive_awaiting
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Transfer
from aiops.common import forks
from aiops.common.closing import AsyncClosing
from aiops.common.tls_files import Tls
from aiops.errors import AiopsError, ConnectionLost, Unavailable
from aiops.model.layout import Array
from aiops.model.tables import Table
from aiops.tracing import AT_CLOSE
from aiops.wire import messages
from aiops.wire.data_messages import GivenTask, TakeTask

_LOG_AGAIN = 0.01  # seconds between looks at what is logged, at least


class AsyncClient(Facade, AsyncClosing):
    """A connection to a server, for asyncio. Use it as ``async with AsyncClient(url) as ps``.

    Calls may run concurrently: they are pipelined on one connection, and the server may answer them
    in another order. Concurrent calls must not share an ``into``. A call may be cancelled; whether
    a push that was under way has been applied is then unknown. A client belongs to the process that
    made it, and to one event loop: in a fork every call raises `UsageError`.

    Parameters
    ----------
    url, role, token, name, timeout, tls, checksums
        As `Client`'s.

    Raises
    ------
    UsageError
        When the URL, the name or the time-out is invalid. `connect` and all calls raise the other
        errors of `Client`.
    """

    _last_spans = AT_CLOSE  # seconds that its traces have at the end

    def __init__(
        self,
        url: str | None = None,
        *,
        role: str = "observer",
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        tls: Tls | None = None,
        checksums: bool | None = None,
    ) -> None:
        super().__init__(
            url,
            role=role,
            token=token,
            name=name,
            timeout=timeout,
            pongs=True,
            tls=tls,
            checksums=checksums,
        )
        self._window = asyncio.Semaphore(messages.REMEMBERED)  # pushes under way, at most
        self._connection: AsyncConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._dialler = AsyncDialler(self._session, self._tls)
        self._attempts = Attempts(self._servers, self._env.randbelow, 0.0)
        self._repetitions = Repetitions(self._env.randbelow)
        self._repetition: asyncio.TimerHandle | None = None  # of requests that were refused
        self._session.on_refused = self._repeat
        self._log_timer: asyncio.TimerHandle | None = None  # of what is logged
        self._loop: asyncio.AbstractEventLoop | None = None  # once it has connected
        forks.note(self)

    # ------------------------------------------------------------ what it can do

    async def connect(self) -> Self:
        """Connect (``async with`` and each call do it); raises as `Client` does."""
        if self._closed:
            raise self._unusable()
        ready = self._ready
        if self._keeper is None or ready is None:
            self._loop = loop = asyncio.get_running_loop()
            self._ready = ready = loop.create_future()
            self._attempts.restart(loop.time() + self.timeout)
            self._attempts.said = None
            self._keeper = loop.create_task(self._keep(ready))
        await asyncio.shield(ready)
        return self

    async def offer(
        self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None
    ) -> bool:
        """Offer a model, as `Client.offer`; return whether it was taken."""
        return await self._do(self._calls.offer(arrays, tables))

    async def define(
        self,
        arrays: Mapping[str, Array],
        tables: Mapping[str, Table] | None = None,
        *,
        views: bool = False,
    ) -> Params:
        """Offer a model, as `Client.define`; return the server's parameters."""
        return await self._do(self._calls.define(arrays, tables, views))

    async def fetch(self, into: Params | None = None, *, evaluation: bool = False) -> Params:
        """Return the server's parameters, as `Client.fetch`."""
        return await self._do(self._calls.fetch(into, evaluation=evaluation))

    async def push(self, params: Stamped, gradients: Mapping[str, Array]) -> Receipt:
        """Push gradients computed at ``params``; parameters, result and errors as `Client.push`'s.

        Do not change the gradients before it returns. At most 64 pushes are under way at once;
        further calls wait.
        """
        return await self._do(self._calls.push(params, gradients))

    async def exchange(
        self, params: Params, gradients: Mapping[str, Array], into: Params | None = None
    ) -> Receipt:
        """Push, and bring ``params`` up to date, in one round trip, as `Client.exchange`."""
        if self._connection is None:
            await self.connect()
        if self._session.info.plan.get("routine", "direct") != "direct":
            self._calls.check_direct()
        connection, done = self._connection, None
        short = None if connection is None else connection.short
        if short is not None and (into is None or into is params) and not self._window.locked():
            begun = short.exchange(params, gradients)
            if isinstance(begun, Receipt):
                return begun
            done = begun
        into = params if into is None else into
        request, began = partial(self._requests.push, gradients, params, into), None
        async with self._window:  # which does not wait if the exchange is under way
            if short is not None and done is not None:
                try:
                    outcome = await (short.outcome(params, done) if short.looks else done)
                except BaseException:  # cancelled
                    given = short.give_up(done)
                    if given is not None:
                        self._abandon(given)
                    raise
                if isinstance(outcome, Receipt):
                    return outcome
                request, began = partial(_given, outcome), short.began
            receipt: Receipt = await self._run(request, began)
            return receipt

    async def carry(self, transfer: Transfer) -> Receipt | None:
        """Carry a strategy's transfer (`aiops.client.strategies`); None for a mere fetch."""
        return await self._do(self._calls.carry(transfer))

    async def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table; parameters, result and errors as `Client.fetch_rows`'s."""
        return await self._do(self._calls.fetch_rows(name, ids, out))

    async def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        version: int | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> Receipt:
        """Push gradients of rows of a table; all else as `Client.push_rows`.

        Do not change ids and gradients before it returns, as with `push`.
        """
        return await self._do(self._calls.push_rows(name, ids, grads, version, lr_factor))

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
        call = self._calls.exchange_rows(name, ids, grads, next_ids, out, version)
        return await self._do(call)

    async def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set (`aiops.data` does); return the answer.

        Raises
        ------
        NotReady
            When no worker has defined the model yet.
        BadPush, Refused
            When the data set is another one, or this client may not have a task.
        """
        return await self._do(self._calls.take_task(asked))

    async def stats(self) -> dict[str, Any]:
        """Return the server's statistics: a dict of JSON's types."""
        return await self._do(self._calls.stats())

    def log(self, **values: Any) -> None:
        """Log numbers about the training, such as ``loss=0.3``; all else as `Client.log`.

        It is no coroutine, and does not wait. Any thread may call it.
        """
        self.note_log(values)
        loop = self._loop
        if loop is None:  # the first connection begins with it
            return
        if asyncio._get_running_loop() is loop:
            self.send_log()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.send_log)

    def send_log(self) -> None:
        """Send what was logged, when it is time, or have that done then."""
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_timer = None
        loop, book, connection = asyncio.get_running_loop(), self._session.book, self._connection
        if connection is None or self._closed:  # the next connection begins with it
            return
        self._session.log(loop.time())
        connection.flush()
        wait = book.wait(loop.time())
        if wait is not None:
            self._log_timer = loop.call_later(max(wait, _LOG_AGAIN), self.send_log)

    async def ping(self) -> float:
        """Return the seconds that one round trip to the server took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._do(self._calls.ping())
        return loop.time() - began

    async def close(self) -> None:
        """Leave the server and close; may be called twice. In a fork it does nothing."""
        if self._forked:
            return
        self._closed = True
        if self._tracing is not None:
            self._tracing.end()
        connection, keeper = self._connection, self._keeper
        self._connection = self._keeper = None
        for timer in (self._repetition, self._log_timer):
            if timer is not None:
                timer.cancel()
        self._repetition = self._log_timer = None
        if connection is not None:
            connection.hand_over()
        try:
            if keeper is not None:
                keeper.cancel()
                await asyncio.wait([keeper])
            if connection is not None:
                await connection.leave()
        finally:
            if connection is not None:
                connection.end(ConnectionLost("closed"))
            self._session.lost()
            self._session.pending.fail(
                ConnectionLost("this client was closed before the answer came")
            )
            if self._tracing is not None:
                await self._tracing.wait_closed(self._last_spans)

    # ------------------------------------------------------------ inside

    async def _do(self, call: Call[T]) -> T:
        """Carry out a call; return its result."""
        await self.connect()
        return await drive_awaiting(call, self._ask)

    async def _ask(self, order: Ask) -> Any:
        if not order.pushes:
            return await self._run(order.make)
        async with self._window:
            return await self._run(order.make)

    async def _run(self, ask: Callable[[], Request], began: float | None = None) -> Any:
        """Make a request, and wait for the answer until the deadline.

        ``began``: the loop's time at which the request was sent, if it was handed over.
        """
        await self.connect()
        loop = asyncio.get_running_loop()
        answered = loop.create_future()
        now = loop.time()
        self._attempts.until = max(self._attempts.until, now + self.timeout)
        if self._connection is not None and began is None:
            self._connection.hand_over()
        request = ask()
        if request.done:
            return request.value()

        def on_done() -> None:
            if not answered.done():
                answered.set_result(None)

        request.on_done = on_done
        if self._connection is not None:
            self._connection.flush()
        allowed = self._patience_for(request)
        try:
            async with asyncio.timeout_at((now if began is None else began) + allowed):
                await answered
        except TimeoutError:
            late = overdue(self._session.server, request.what, f"in {allowed:g} s")
            why = request.refusal or self._attempts.said or late
            raise given_up(request, why) from None
        finally:
            if not request.done:
                self._abandon(request)
        return request.value()

    def _abandon(self, request: Request) -> None:
        """Abandon a request; the caller may change its arrays from now on.

        If its gradients have not all been sent, the rest would be the values that the caller writes
        there next; if its answer is being received, the rest would be written into arrays that the
        caller uses. The connection is then ended, and the other requests are sent on a new one.
        """
        coming = self._session.abandon(request)
        connection = self._connection
        if connection is not None and (coming or (request.payloads and connection.unsent)):
            connection.end(ConnectionLost("a request was given up in mid-message"))

    def _repeat(self, refusal: Unavailable) -> None:
        """Have requests asked again, after a pause, that the server could not take.

        If there are other servers, the connection is ended, and the next one is tried.
        """
        connection, loop = self._connection, asyncio.get_running_loop()
        self._attempts.said = refusal
        if self._attempts.several and connection is not None:
            loop.call_soon(connection.end, refusal)  # not in mid-message
        elif self._repetition is None:
            try:
                pause = self._repetitions.pause(loop.time(), refusal, self.timeout)
            except Unavailable as final:
                self._session.pending.reject_refused(final)
            else:
                self._repetition = loop.call_later(pause, self._ask_refused)

    def _ask_refused(self) -> None:
        self._repetition = None
        if self._session.ready:
            self._attempts.said = None
        self._session.ask_refused()
        if self._connection is not None:
            self._connection.flush()

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """Keep a connection open: connect, and connect again with back-off when it is lost.

        ``ready`` is resolved by the first welcome, or by the error that ends the attempts.
        """
        loop = asyncio.get_running_loop()
        attempts = self._attempts
        try:
            while True:
                if self._forked:  # on a copy of the parent's event loop
                    raise self._unusable()
                error: AiopsError | OSError
                try:
                    async with asyncio.timeout_at(attempts.until):
                        connection = await self._connect()
                except (ConnectionLost, Unavailable, OSError) as lost:  # TimeoutError is an OSError
                    error = lost
                else:
                    if not ready.done():
                        ready.set_result(None)
                    attempts.made(loop.time(), self._session.answered)
                    self.send_log()
                    error = await connection.ended
                    self._connection = None
                    self._session.lost()
                    if not isinstance(error, ConnectionLost | Unavailable):
                        raise error
                    now = loop.time()
                    until, before = now + self.timeout, attempts.until
                    attempts.lost(now, self._session.answered, until, error, before)
                await asyncio.sleep(attempts.pause(loop.time(), error))
        except AiopsError as final:
            self._keeper = None
            if not ready.done():
                ready.set_exception(final)
                ready.exception()  # retrieved, so that asyncio does not log it
            self._session.pending.fail(final)

    async def _connect(self) -> AsyncConnection:
        """Open one connection, wait for the welcome, and return it."""
        attempts, session = self._attempts, self._session
        session.towards(attempts.server, self._dialler.present_address(attempts.server))
        transport, connection = await self._dialler.connect_to_server(
            attempts.server, attempts.until, attempts.patience
        )
        self._connection = connection
        if connection.short is not None:
            connection.short.beat = min(BEAT, self.timeout / 4)
        try:
            while not session.ready:
                connection.progress.clear()
                if connection.ended.done():
                    raise connection.ended.result()
                for channel in session.shards.channels[len(connection.channels) :]:
                    await self._dialler.connect_to_shard(channel, connection, attempts.until)
                try:
                    async with asyncio.timeout(attempts.patience):
                        await connection.progress.wait()
                except TimeoutError:
                    raise overdue(session.server, session.waiting_for, "in time") from None
        except BaseException:
            self._connection = None
            connection.end(ConnectionLost("it is not complete"))
            transport.abort()
            session.lost()
            raise
        return connection


def _given(request: Request) -> Request:
    """Return a request that is under way already."""
    return request
