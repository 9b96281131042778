"""A slow link between workers and their server: a TCP proxy with a stated rate and delay.

::

    with SlowLink("aiops://127.0.0.1:7171", rate="20Mbit/s", delay=0.005) as link:
        ...workers connect to link.url...

The link is one line each way, which all connections share in turns, as the uplink of one server
machine; with ``each`` every connection has its own. Bytes are TCP's payload, what sockets carry.
Little is kept on the way (a portion per connection, and what travels), so a sender of more than
the line carries is made to wait, as by a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Literal, TypeAlias

from aiops.bandwidth.units import parse_rate
from aiops.common import urls
from aiops.common.closing import Closing
from aiops.errors import UsageError

Direction: TypeAlias = Literal["up", "down"]
"""Up: from the workers to the server."""

DEPTH = 0.04
"""Seconds of its rate that a line which was idle may carry at once."""

_PORTIONS = 4  # in a line's depth: connections take turns after each
_QUEUED = 0.05  # seconds of the rate that may wait for a peer that does not read
_SOCKET = (4 << 10, 256 << 10)  # bytes of a socket's buffer, each way: at least and at most
_MOST_AT_ONCE = 256 << 10
_TICK = 1e-5  # seconds: the shortest wait, since a clock may not show a shorter one
_LAST = 1.0  # seconds that the thread has to end


class LinkBudget:
    """The token bucket of one direction of a link; the time is handed in.

    In any window of t seconds it carries at most ``rate · (t + DEPTH)`` bytes, however late its
    user wakes up; a user that never lets it idle for longer than `DEPTH` gets all of ``rate · t``.

    Parameters
    ----------
    rate
        Bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.depth = max(rate * DEPTH, _PORTIONS)
        self.portion = min(int(self.depth) // _PORTIONS, _MOST_AT_ONCE)
        self._tokens = self.depth
        self._then: float | None = None

    def take(self, now: float, nbytes: int) -> float:
        """Take ``nbytes`` (at most `depth`) and return 0; or the seconds to wait for them."""
        then = now if self._then is None else self._then
        self._tokens = min(self.depth, self._tokens + max(0.0, now - then) * self.rate)
        self._then = max(now, then)
        if self._tokens >= nbytes:
            self._tokens -= nbytes
            return 0.0
        return max((nbytes - self._tokens) / self.rate, _TICK)


class SlowLink(Closing):
    """The link, on a thread of its own from when it is made until its ``with`` block ends.

    Parameters
    ----------
    server
        ``aiops://host:port``.
    rate
        Bytes per second each way, or text such as ``"20Mbit/s"``
        (`aiops.bandwidth.units.parse_rate`).
    up, down
        The same for one way; default ``rate``.
    delay
        Seconds that a byte travels, each way; default 0.
    each
        Whether every connection has such a link of its own; default: they share one.
    watch
        Is told, on the link's thread, of every portion as it enters the line: which way, when
        (seconds of a monotonic clock), and its bytes.

    Attributes
    ----------
    url
        Where workers connect.
    carried
        Bytes so far, by direction.

    Raises
    ------
    UsageError
        When a rate or the delay cannot be.
    """

    def __init__(
        self,
        server: str,
        *,
        rate: float | str,
        up: float | str | None = None,
        down: float | str | None = None,
        delay: float = 0.0,
        each: bool = False,
        watch: Callable[[Direction, float, int], None] = lambda way, seconds, nbytes: None,
    ) -> None:
        rates: dict[Direction, float] = {
            "up": _bytes_per_second("up", rate if up is None else up),
            "down": _bytes_per_second("down", rate if down is None else down),
        }
        if not 0 <= delay <= 10:
            raise UsageError(f"a delay of {delay:g} s cannot be: give 0 to 10 seconds")
        self.carried: dict[Direction, int] = {"up": 0, "down": 0}

        def count(way: Direction, seconds: float, nbytes: int) -> None:
            self.carried[way] += nbytes
            watch(way, seconds, nbytes)

        address, listener = urls.parse(server), _listener(rates)
        self.url = urls.write(*listener.getsockname()[:2])
        started: Future[_Proxy] = Future()

        async def serve() -> None:
            proxy = _Proxy(address, rates, delay, each, count)
            started.set_result(proxy)
            await proxy.serve(listener)

        self._thread = Thread(target=lambda: asyncio.run(serve()), name="aiops-link", daemon=True)
        self._thread.start()
        self._proxy = started.result()

    @property
    def connections(self) -> int:
        """Connections so far."""
        return self._proxy.connections

    def close(self) -> None:
        """End the link, and all connections over it."""
        self._proxy.end_soon()
        self._thread.join(_LAST)


class _Proxy:
    """The part of a link that its thread runs; made in its event loop."""

    def __init__(
        self,
        server: tuple[str, int],
        rates: Mapping[Direction, float],
        delay: float,
        each: bool,
        count: Callable[[Direction, float, int], None],
    ) -> None:
        self._server, self._rates, self._delay, self._count = server, rates, delay, count
        self._shared = None if each else self._budgets()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._open: dict[asyncio.Task[None], socket.socket] = {}
        self.connections = 0

    def _budgets(self) -> dict[Direction, _SharedBudget]:
        return {way: _SharedBudget(LinkBudget(rate)) for way, rate in self._rates.items()}

    def end_soon(self) -> None:
        """Have `serve` return; may be called on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._ended.set)

    async def serve(self, listener: socket.socket) -> None:
        """Carry all connections until `end_soon` is called."""
        self._loop.add_reader(listener, self._accept, listener)
        try:
            await self._ended.wait()
        finally:
            self._loop.remove_reader(listener)
            listener.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        """Take in a connection. (`sock_accept` would lose one when it is cancelled.)"""
        try:
            worker, _address = listener.accept()
        except OSError:  # it has gone away already
            return
        self.connections += 1
        task = self._loop.create_task(self._connect(worker))
        self._open[task] = worker
        task.add_done_callback(self._connection_ended)

    def _connection_ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task).close()
        if not task.cancelled():
            task.result()  # anything but a network's error is a bug: raise it

    async def _connect(self, worker: socket.socket) -> None:
        """Carry one connection until both its sides have ended."""
        with worker, socket.socket() as server:
            for sock in (worker, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _limit_buffers(server, self._rates["down"], self._rates["up"])
            with contextlib.suppress(OSError):  # the other side learns it as these sockets close
                await self._loop.sock_connect(server, self._server)
                budgets = self._shared or self._budgets()
                try:
                    async with asyncio.TaskGroup() as ways:
                        ways.create_task(self._carry("up", worker, server, budgets["up"]))
                        ways.create_task(self._carry("down", server, worker, budgets["down"]))
                except* OSError:
                    pass

    async def _carry(
        self, way: Direction, source: socket.socket, sink: socket.socket, budget: _SharedBudget
    ) -> None:
        """Pass one direction's bytes on until it ends."""
        room = 1 + int((self._delay + _QUEUED) * budget.link.rate / budget.link.portion)
        travelling: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(max(room, 16))
        async with asyncio.TaskGroup() as both:
            both.create_task(self._deliver(travelling, sink))
            while data := await self._loop.sock_recv(source, budget.link.portion):
                now = await budget.turn(len(data))
                self._count(way, now, len(data))
                await travelling.put((now + self._delay, data))
            await travelling.put((0.0, b""))

    async def _deliver(
        self, travelling: asyncio.Queue[tuple[float, bytes]], sink: socket.socket
    ) -> None:
        while (portion := await travelling.get())[1]:
            due, data = portion
            if (left := due - self._loop.time()) > 0:
                await asyncio.sleep(left)
            await self._loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)


class _SharedBudget:
    """The budget of one direction, and the queue of the connections that share it."""

    def __init__(self, link: LinkBudget) -> None:
        self.link = link
        self._turn = asyncio.Lock()  # first come, first served

    async def turn(self, nbytes: int) -> float:
        """Wait until ``nbytes`` may go; return the time."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            while True:
                now = clock()
                wait = self.link.take(now, nbytes)
                if not wait:
                    return now
                await asyncio.sleep(wait)


def _bytes_per_second(way: Direction, rate: float | str) -> float:
    return float(parse_rate(f"a link's rate {way}:", str(rate)))


def _listener(rates: Mapping[Direction, float]) -> socket.socket:
    """Return a socket that listens; the connections that it accepts inherit its buffers' sizes."""
    listener = socket.socket()
    try:
        _limit_buffers(listener, rates["up"], rates["down"])
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(f"a link cannot listen on 127.0.0.1: {error.strerror}") from None
    return listener


def _limit_buffers(sock: socket.socket, receives: float, sends: float) -> None:
    """Give a socket buffers in keeping with its rates, so that nothing piles up in them."""
    for option, rate in ((socket.SO_RCVBUF, receives), (socket.SO_SNDBUF, sends)):
        size = min(max(int(rate * _QUEUED) // 2, _SOCKET[0]), _SOCKET[1])
        sock.setsockopt(socket.SOL_SOCKET, option, size)
