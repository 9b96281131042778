"""The port that a server listens on: bound first, taken for good late, then listened on."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from aiops.errors import UsageError
from aiops.net.socket_options import narrow, unpace

_BACKLOG = 1024


class Port:
    """A host's port of one server.

    Parameters
    ----------
    host, port
        The address to bind to; port 0: a free one.
    accept
        Makes the protocol of a connection.
    """

    def __init__(self, host: str, port: int, accept: Callable[[], asyncio.BaseProtocol]) -> None:
        self._host, self._port, self._accept = host, port, accept

    async def bind(
        self, loop: asyncio.AbstractEventLoop, bound: socket.socket | None, rate: int | None
    ) -> asyncio.Server:
        """Return what has the port, and does not listen yet: clients would wait in vain.

        Parameters
        ----------
        loop
            The running event loop.
        bound
            A socket that is bound already; None: one is made.
        rate
            Bytes a second for which receive buffers are made small; None: they are left alone.

        Raises
        ------
        UsageError
            When the address cannot be had.
        """
        given: dict[str, Any] = {"host": self._host, "port": self._port}
        if bound is not None:
            given = {"sock": bound}
        try:
            listener = await loop.create_server(
                self._accept, **given, backlog=_BACKLOG, start_serving=False
            )
        except OSError as error:
            raise self._fault(error) from None
        for sock in listener.sockets:
            unpace(sock, sock.getsockname()[0])
            if rate is not None:  # a window is announced before a peer is accepted
                narrow(sock, rate)
        return listener

    def claim(self, listener: asyncio.Server) -> None:
        """Take the port for good: as long as no socket listens, another process may bind to it too.

        The system holds connections until `listen` accepts them. So this is called when that is
        near: just before the generation begins, by which a server fences those before it.
        """
        try:
            for sock in listener.sockets:
                if sock.fileno() >= 0:  # a simulated one has none
                    with socket.socket(fileno=os.dup(sock.fileno())) as same:
                        same.listen(_BACKLOG)
        except OSError as error:
            raise self._fault(error) from None

    async def listen(self, listener: asyncio.Server) -> None:
        """Accept connections from here on."""
        try:
            before = [sock.fileno() for sock in listener.sockets]
            await listener.start_serving()
            if [sock and sock.fileno() for sock in listener.sockets] != before:
                # uvloop raises nothing: it closes those that could not listen.
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        except OSError as error:
            raise self._fault(error) from None

    def _fault(self, error: OSError) -> UsageError:
        where = f"{self._host}:{self._port}"
        return UsageError(f"cannot listen on {where}: {error.strerror or error}")
