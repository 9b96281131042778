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
from collections.abc import Awaitable, Callable, Sequence

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
        plain: bytes,
        patience: float,
    ) -> None:
        self.sockets = tuple(sockets)
        self._tls, self._accept, self._plain, self._patience = tls, accept, plain, patience
        # The oldest first, each with its peer, and its socket until the event loop has that.
        self._handshakes: dict[asyncio.Task[None], str] = {}
        self._ours: dict[str, socket.socket] = {}

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
            try:
                connected, address = sock.accept()
            except OSError:  # there are no more; or no descriptors, and the loop tries again
                return
            connected.setblocking(False)
            if len(self._handshakes) >= HANDSHAKES:
                oldest, name = next(iter(self._handshakes.items()))
                _log.warning("dropping %s: %d TLS handshakes are under way", name, HANDSHAKES)
                oldest.cancel()
                self._over(oldest)
            name = f"{address[0]}:{address[1]}"
            self._ours[name] = connected
            beginning = asyncio.get_running_loop().create_task(self._begin(connected, name))
            self._handshakes[beginning] = name
            beginning.add_done_callback(self._over)

    def _over(self, beginning: asyncio.Task[None]) -> None:
        sock = self._ours.pop(self._handshakes.pop(beginning, ""), None)
        if sock is not None:
            sock.close()

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
