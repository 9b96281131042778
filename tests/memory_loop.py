"""A server in memory (`tests.memory`) for async clients: a transport without sockets, virtual time.

`Awaited` gives an async client the blocking face, so that one test can drive both.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiops.client import AsyncClient, AsyncWorker, Params
from aiops.client.asyncio.connection import AsyncConnection
from aiops.client.request_kinds import Receipt
from aiops.model.layout import Array
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.sim.virtual.loop import VirtualLoop
from tests.memory import URL, MemoryServer, MemorySocket

_SLOW = 2.0  # virtual seconds in which nothing moves: longer than a client's beat


class MemoryTransport(asyncio.Transport):
    """The transport of an async client's connection to a `MemoryServer`."""

    def __init__(self, sock: MemorySocket, protocol: AsyncConnection, loop: VirtualLoop) -> None:
        super().__init__()
        self._sock, self._protocol, self._loop = sock, protocol, loop
        self._closing = self._paused = False
        sock.notify = self._look_soon
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        """Have the server hear it at once, unless the connection is cut."""
        view = memoryview(data)
        while view and not self._closing:
            try:
                view = view[self._sock.sendmsg([view]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._end(error)

    def _look_soon(self) -> None:
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Deliver what one read brings, and look again."""
        if self._closing or self._paused or not self._sock.readable:
            return
        try:
            count = self._sock.recv_into(self._protocol.get_buffer(-1))
        except BlockingIOError:
            self._loop.call_later(_SLOW, self._look)
            return
        if not count:
            self._end(None)
            return
        self._protocol.buffer_updated(count)
        self._look_soon()

    def _end(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            self._sock.lose()
            self._loop.call_soon(self._protocol.connection_lost, error)

    def close(self) -> None:
        """End it."""
        self._end(None)

    def abort(self) -> None:
        """End it."""
        self._end(None)

    def is_closing(self) -> bool:
        """Return whether it has ended."""
        return self._closing

    def pause_reading(self) -> None:
        """Deliver nothing."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver again."""
        self._paused = False
        self._look_soon()

    def get_write_buffer_size(self) -> int:
        """Return 0: all is heard at once."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Take note of nothing."""


class Awaited:
    """An async client or worker of a `MemoryServer`, on a loop of its own, with blocking calls.

    Parameters
    ----------
    server
        The server.
    model
        With a model an `AsyncWorker` is made, and `exchange` is its `step`.
    connected
        Is called with each new connection.
    """

    def __init__(
        self,
        server: MemoryServer,
        model: Mapping[str, Array] | None,
        connected: Callable[[AsyncConnection], None],
    ) -> None:
        self._server, self._connected = server, connected
        self._loop = VirtualLoop()
        self.worker: AsyncWorker | None = None
        if model is None:
            self.client = server.call(self._within, AsyncClient, URL, role="worker")
            self.run(self.client.connect())
        else:
            self.worker = server.call(self._within, AsyncWorker, URL, model)
            assert self.worker is not None
            self.run(self.worker.connect())
            self.client = self.worker._client

    def _within(self, make: Callable[..., Any], *given: Any, **named: Any) -> Any:
        env = CURRENT_ENVIRONMENT.get()
        CURRENT_ENVIRONMENT.set(dataclasses.replace(env, dial=self._dial))
        return make(*given, **named)

    async def _dial(self, factory: Callable[[], Any], _host: str, _port: int) -> Any:
        connection = factory()
        self._connected(connection)
        return MemoryTransport(MemorySocket(self._server), connection, self._loop), connection

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop until it is done."""
        return self._loop.run_until_complete(coroutine)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *given, **named: self.run(found(*given, **named))

    def exchange(
        self, params: Params, gradients: Mapping[str, Array], into: Params | None = None
    ) -> Receipt:
        """Exchange, or take a step."""
        worker = self.worker
        if worker is None or into is not None:
            return self.run(self.client.exchange(params, gradients, into))  # type: ignore[no-any-return]
        return self.run(worker.step(gradients))  # type: ignore[no-any-return]

    def attend(self) -> None:
        """Let pass what is under way."""
        self.run(asyncio.sleep(2 * _SLOW))

    def close(self) -> None:
        """Leave, and end the loop."""
        self.run((self.worker or self.client).close())
        self._loop.close()
