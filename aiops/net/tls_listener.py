"""Accept TLS connections: a bounded number of handshakes at a time, each with a deadline.

The connections are accepted here and not by `loop.create_server`, which would say nothing of a
handshake that fails, would not bound how many are under way, and would not tell a client of the
plain wire that this port speaks TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from aiops.net.socket_options import has_hung_up
from aiops.net.tls import CLOSE_PATIENCE, FIRST_BYTE, TlsServer, alert_of, refused
from aiops.net.transport import until_readable

_log = logging.getLogger("aiops.server")

HANDSHAKES = 256
"""Handshakes under way at a time; beyond them the oldest is ended."""

_AT_ONCE = 16  # connections accepted before the event loop does something else
_BACKLOG = 1024
_DISCARDED = 1 << 20  # bytes read from a client that was refused, at most


class TlsListener:
    """Listens on bound sockets, with the face of an `asyncio.Server` as far as a server uses it.

    Parameters
    ----------
    sockets
        Bound, and not listening yet.
    tls
        The certificates.
    accept
        Begins a connection, given its socket, the certificates and the seconds that the handshake
        may take; returns when that is through.
    most
        Returns the number of handshakes that may be under way at a time once a client has begun;
        None: there is no bound. Other clients wait for their turn.
    plain
        What a client that does not begin with TLS is sent before it is left.
    patience
        Seconds that a handshake may take.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        tls: TlsServer,
        accept: Callable[[socket.socket, ssl.SSLContext, float], Awaitable[None]],
        most: Callable[[], int | None],
        plain: bytes,
        patience: float,
    ) -> None:
        self.sockets = tuple(sockets)
        self._tls, self._accept, self._plain, self._patience = tls, accept, plain, patience
        self._turns = _Turns(most)
        # The oldest first, each with its peer, and its socket until the event loop has that.
        self._handshakes: dict[asyncio.Task[None], str] = {}
        self._ours: dict[str, socket.socket] = {}
        self._silent = set[str]()  # the peers that have not begun
        self._is_full = False  # others wait to be accepted

    async def start_serving(self) -> None:
        """Accept connections from here on."""
        loop = asyncio.get_running_loop()
        for sock in self.sockets:
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            loop.add_reader(sock, self._take, sock)

    def close(self) -> None:
        """Listen no more; the handshakes under way end."""
        loop = asyncio.get_running_loop()
        for sock in self.sockets:
            if sock.fileno() >= 0:
                loop.remove_reader(sock)
                sock.close()
        for handshake in list(self._handshakes):
            handshake.cancel()

    def _take(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if len(self._handshakes) >= HANDSHAKES and not self._dropped_one():
                self._is_full = True
                for each in self.sockets:
                    asyncio.get_running_loop().remove_reader(each)
                return
            try:
                connected, address = sock.accept()
            except OSError:  # there are no more; or no descriptors, and the loop tries again
                return
            connected.setblocking(False)
            name = f"{address[0]}:{address[1]}"
            self._ours[name] = connected
            beginning = asyncio.get_running_loop().create_task(self._begin(connected, name))
            self._handshakes[beginning] = name
            self._silent.add(name)
            beginning.add_done_callback(self._over)

    def _dropped_one(self) -> bool:
        """End the oldest handshake; where they take turns, of those that have not begun."""
        bounded = self._turns.bounded
        for oldest, name in self._handshakes.items():
            if not bounded or name in self._silent:
                _log.warning("dropping %s: %d TLS handshakes are under way", name, HANDSHAKES)
                oldest.cancel()
                self._over(oldest)
                return True
        return False

    def _over(self, beginning: asyncio.Task[None]) -> None:
        name = self._handshakes.pop(beginning, "")
        self._silent.discard(name)
        sock = self._ours.pop(name, None)
        if sock is not None:
            sock.close()
        if self._is_full:
            self._is_full = False
            for each in self.sockets:
                if each.fileno() >= 0:
                    asyncio.get_running_loop().add_reader(each, self._take, each)

    async def _begin(self, sock: socket.socket, name: str) -> None:
        """Go through one handshake; what goes wrong is logged, and ends the connection."""
        loop = asyncio.get_running_loop()
        with sock.dup() as kept:  # so that an alert is read before the connection is reset
            try:
                async with asyncio.timeout(self._patience):
                    first = await _first_byte(sock)
                    if first != FIRST_BYTE:
                        await self._refuse(loop, sock, name, first)
                        return
                self._silent.discard(name)
                async with self._turns, asyncio.timeout(self._patience):
                    if has_hung_up(sock):  # it has waited too long, and costs nothing now
                        return
                    self._ours.pop(name, None)  # the event loop closes it
                    await self._accept(sock, self._tls.context, self._patience)
            except TimeoutError:
                _log.warning("%s has not finished the TLS handshake in time", name)
            except OSError as error:
                _log.warning("no TLS with %s", refused(name, error))
                await _answer(loop, kept, alert_of(error))

    async def _refuse(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, name: str, first: int | None
    ) -> None:
        if first is not None:
            _log.warning("%s does not begin with TLS, which this port speaks", name)
            await _answer(loop, sock, self._plain)


class _Turns:
    """Admits a bounded number at a time, in order; used with ``async with``."""

    def __init__(self, most: Callable[[], int | None]) -> None:
        self._most, self._under_way = most, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def bounded(self) -> bool:
        """True if there is a bound."""
        return self._most() is not None

    async def __aenter__(self) -> None:
        most = self._most()
        if most is not None and self._under_way >= most:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was given just now
                    self._leave()
                raise
        else:
            self._under_way += 1

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Hand a turn on to the next that waits still."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._under_way -= 1


async def _first_byte(sock: socket.socket) -> int | None:
    """Return the first byte that comes, which is left to be read again; None: none came."""
    await until_readable(sock)
    first = sock.recv(1, socket.MSG_PEEK)
    return first[0] if first else None


async def _answer(loop: asyncio.AbstractEventLoop, sock: socket.socket, answer: bytes) -> None:
    """Send a last answer, and wait a moment until the other side has closed: a socket closed with
    bytes unread would reset the connection, and the answer would be lost.
    """
    with contextlib.suppress(OSError):
        async with asyncio.timeout(CLOSE_PATIENCE):
            await loop.sock_sendall(sock, answer)
            sock.shutdown(socket.SHUT_WR)
            read = 0
            while read < _DISCARDED and (more := await loop.sock_recv(sock, 1 << 16)):
                read += len(more)
