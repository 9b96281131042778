"""The port that a server listens on: bound first, taken for good late, then listened on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import Any, TypeAlias

from aiops.errors import Unauthorised, UsageError
from aiops.net.socket_options import narrow, unpace
from aiops.net.tls import TlsServer
from aiops.net.tls_listener import TlsListener
from aiops.serving.acceptor import Acceptor
from aiops.serving.config import Config
from aiops.wire.connection import Connection
from aiops.wire.messages import Error

_log = logging.getLogger("aiops.server")

_BACKLOG = 1024

Listener: TypeAlias = asyncio.Server | TlsListener


class Port:
    """A host's port of one server.

    Parameters
    ----------
    host, port
        The address to bind to; port 0: a free one.
    connections
        Accepts them.
    tls
        The certificates; None: plain TCP.
    patience
        Seconds that a handshake of TLS may take.
    """

    def __init__(
        self,
        host: str,
        port: int,
        connections: Acceptor,
        tls: TlsServer | None = None,
        patience: float = 10.0,
    ) -> None:
        self._host, self._port, self._connections = host, port, connections
        self._tls, self._patience = tls, patience

    async def bind(
        self, loop: asyncio.AbstractEventLoop, bound: socket.socket | None, rate: int | None
    ) -> Listener:
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
                self._connections.accept, **given, backlog=_BACKLOG, start_serving=False
            )
        except OSError as error:
            raise self._fault(error) from None
        for sock in listener.sockets:
            unpace(sock, sock.getsockname()[0])
            if rate is not None:  # a window is announced before a peer is accepted
                narrow(sock, rate)
        if self._tls is None:
            return listener
        sockets = [socket.socket(fileno=os.dup(sock.fileno())) for sock in listener.sockets]
        listener.close()
        begin, most = self._connections.accept_tls, self._connections.most_handshakes
        return TlsListener(sockets, self._tls, begin, most, _told(), self._patience)

    def claim(self, listener: Listener) -> None:
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

    async def listen(self, listener: Listener) -> None:
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


async def close_listener(listener: Listener) -> None:
    """Listen no more, once the connections that were accepted are made.

    asyncio makes the transport of a connection that it has accepted in the next turn of the loop.
    If its server is closed then, that fails, and the connection stays open without an owner: its
    peer waits in vain.
    """
    loop = asyncio.get_running_loop()
    for sock in listener.sockets:
        if sock.fileno() >= 0:  # a simulated one has none
            loop.remove_reader(sock.fileno())  # accept no more
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    listener.close()


def _told() -> bytes:
    """Return the message that a client of the plain wire is sent."""
    text = "this server speaks TLS at this port: connect to aiops+tls://..."
    return b"".join(Connection("server").send(Error(0, Unauthorised.code, text, {}, True)))


def certificates(config: Config) -> TlsServer | None:
    """Return the certificates of a server with these settings; None: it speaks plain TCP.

    Raises
    ------
    UsageError
        When a file cannot be used.
    """
    if config.tls_cert is None:
        return None
    return TlsServer(config.tls_cert, config.tls_key, config.tls_ca)


def reload_certificates(tls: TlsServer | None) -> None:
    """Read certificates again; log whether they are used from here on."""
    if tls is None:
        return
    try:
        tls.reload()
    except UsageError as error:
        _log.error("the certificates stay as they were: %s", error)
    else:
        _log.info("certificates read again: connections made from here on use them")
