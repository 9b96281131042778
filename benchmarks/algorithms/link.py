"""A slow line between a worker and its server: a TCP proxy with a stated rate and delay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiops.common import urls

_CHUNK = 32 * 1024
_AT_ONCE = 0.0003  # seconds within which bytes are read that are there already
_LAST = 1.0  # seconds that a connection has to end
_WHOLE = 0.5  # of the model's bytes: what goes up in smaller portions is no push


@dataclass(frozen=True)
class SlowLine:
    """The rate and the delay of a line.

    Attributes
    ----------
    rate
        Bytes per second, in each direction of each connection.
    delay
        Seconds that a byte travels.
    """

    rate: float
    delay: float


class Proxy:
    """Forwards connections over a slow line; use it as ``async with Proxy(url, line, nbytes)``.

    Attributes
    ----------
    merges
        Seconds from the first byte of a push to the last byte of its answer, of every push of
        about ``nbytes``.
    """

    def __init__(self, server: str, line: SlowLine, nbytes: int) -> None:
        self._server, self._line, self._nbytes = urls.parse(server), line, nbytes
        self.url = ""
        self.merges: list[float] = []
        self._connections: dict[asyncio.Task[None], asyncio.Future[Any]] = {}

    async def __aenter__(self) -> Proxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK)
        self.url = urls.write(*self._listener.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._listener.close()
        for pumps in self._connections.values():
            pumps.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_LAST)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection(*self._server, limit=_CHUNK)
        stopwatch = Stopwatch(_WHOLE * self._nbytes, self._line, self.merges)
        pumps = asyncio.gather(
            self._pump(reader, onward[1], stopwatch.up),
            self._pump(onward[0], writer, stopwatch.down),
        )
        connection = asyncio.current_task()
        assert connection is not None
        self._connections[connection] = pumps
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await pumps
        finally:
            stopwatch.close()
            del self._connections[connection]

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Callable[[int, float], None],
    ) -> None:
        """Pass bytes on: each keeps the line busy for 1/rate, and arrives a delay later."""
        travelling: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(travelling, writer, note))
        clock = asyncio.get_running_loop().time
        free = asked = clock()
        try:
            while data := await reader.read(_CHUNK):
                now = clock()
                # A portion that lay ready goes out when the line is free, though we woke up later.
                start = free if now - asked < _AT_ONCE else max(free, now)
                free = start + len(data) / self._line.rate
                travelling.put_nowait((free + self._line.delay, data))
                await asyncio.sleep(free - now)
                asked = clock()
            travelling.put_nowait((0.0, b""))
            await delivery
        finally:
            delivery.cancel()
            writer.close()

    async def _deliver(
        self,
        travelling: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        note: Callable[[int, float], None],
    ) -> None:
        now = asyncio.get_running_loop().time
        while (due := await travelling.get())[1]:
            await asyncio.sleep(due[0] - now())
            writer.write(due[1])
            note(len(due[1]), now())
            await writer.drain()


class Stopwatch:
    """Sees from the bytes of one connection how long its pushes take to be answered.

    Parameters
    ----------
    least
        Bytes up below which a portion is no push.
    line
        What the bytes travelled on before they were noted.
    merges
        Where the times go.
    """

    def __init__(self, least: float, line: SlowLine, merges: list[float]) -> None:
        self._least, self._line, self._merges = least, line, merges
        self._began = self._ended = 0.0
        self._went = 0

    def up(self, nbytes: int, now: float) -> None:
        """Note bytes that reach the server now; the first after an answer begin a push."""
        if self._ended or not self._went:
            self.close()
            # They set out when the line was free for them.
            self._began = now - self._line.delay - nbytes / self._line.rate
        self._went += nbytes

    def down(self, nbytes: int, now: float) -> None:
        """Note bytes that reach the worker now."""
        self._ended = now

    def close(self) -> None:
        """Count the push that has been answered."""
        if self._ended and self._went >= self._least:
            self._merges.append(self._ended - self._began)
        self._ended, self._went = 0.0, 0
