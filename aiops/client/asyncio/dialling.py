"""The connecting of an async client, with a deadline of the event loop's clock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from aiops.client.asyncio.connection import AsyncConnection
from aiops.client.backoff import ATTEMPT, LONGEST_WELCOME, overdue, reason
from aiops.client.session import Session
from aiops.client.shard_channel import ShardChannel
from aiops.common.urls import ServerAddress
from aiops.errors import ConnectionLost, Untrusted
from aiops.net import moved_servers
from aiops.net.dns import addresses, first_reached
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsClient
from aiops.net.transport import until_readable
from aiops.net.unix_socket import welcomed
from aiops.wire.shared_payloads import SharedPayloads


class AsyncDialler:
    """Connects to a server and to the other shards of its model.

    Deadlines (``until``) are times of the event loop. Each address of a host is given at most
    `ATTEMPT` seconds.

    Parameters
    ----------
    session
        The session whose bytes the connections carry.
    tls
        Connects to servers by TLS; None: they speak plain TCP.
    """

    def __init__(self, session: Session, tls: TlsClient | None = None) -> None:
        self._session, self._tls = session, tls
        self._env = CURRENT_ENVIRONMENT.get()

    def present_address(self, server: ServerAddress) -> tuple[str, int]:
        """Return the host and the port at which a server is now."""
        return self._env.present_address(server.host, server.port)

    async def connect_to_server(
        self, server: ServerAddress, until: float, patience: float
    ) -> tuple[asyncio.Transport, AsyncConnection]:
        """Connect to the first of a server's addresses that answers.

        ``patience``: seconds that a server on this machine may take to accept the connection.

        Raises
        ------
        OSError, DeadlineExceeded
            When it cannot be reached.
        """
        name, port = self.present_address(server)

        async def reach(host: str) -> tuple[asyncio.Transport, AsyncConnection]:
            made = partial(AsyncConnection, self._session)
            return await self._reach(made, (host, port), server.host, server.url, patience)

        left = min(until - asyncio.get_running_loop().time(), ATTEMPT)
        hosts = self._env.known_addresses(name) or await addresses(name, left)
        transport, connection = await first_reached(hosts, until, reach)
        moved_servers.watch(connection, (server.host, server.port), (name, port))
        return transport, connection

    async def _reach(
        self,
        make: Callable[..., AsyncConnection],
        where: tuple[str, int],
        host: str,
        name: str,
        patience: float,
    ) -> tuple[asyncio.Transport, AsyncConnection]:
        """Connect within this machine if the server is on it and shares memory, else by TCP."""
        checked = self._session.wire.checked
        near = None if checked else self._env.connect_unix(*where)
        if near is not None:
            begun = await self._begin_near(make, near, where[0], name, patience)
            if begun is not None:
                return begun
        return await self._dial(make, where, host, name, patience)

    async def _dial(
        self,
        make: Callable[[], AsyncConnection],
        where: tuple[str, int],
        host: str,
        name: str,
        patience: float,
    ) -> tuple[asyncio.Transport, AsyncConnection]:
        """Connect to an address; by TLS, to the server ``host``, which has ``patience`` more."""
        if self._tls is None:
            async with asyncio.timeout(ATTEMPT):
                return await self._env.dial(make, *where)
        try:
            async with asyncio.timeout(ATTEMPT + patience):
                return await self._env.dial(make, *where, self._tls.target(host))
        except TimeoutError:
            raise overdue(name, "its part of the TLS handshake", "in time") from None

    async def _begin_near(
        self,
        make: Callable[..., AsyncConnection],
        near: socket.socket,
        host: str,
        name: str,
        patience: float,
    ) -> tuple[asyncio.Transport, AsyncConnection] | None:
        loop = asyncio.get_running_loop()
        side = None
        try:
            try:
                async with asyncio.timeout(patience):
                    await until_readable(near)
            except TimeoutError:
                raise overdue(name, "its welcome", "in time") from None
            side = welcomed(near)
            if side is None:
                near.close()
                return None
            shared = SharedPayloads(partial(side.attach, private=False), side.pass_on)
            return await loop.create_unix_connection(
                lambda: make(shared, side, host, near), sock=near
            )
        except BaseException:
            near.close()
            if side is not None:
                side.close()
            raise

    async def connect_to_shard(
        self, channel: ShardChannel, lead: AsyncConnection, until: float
    ) -> None:
        """Connect to another shard of the model; the connection ends together with the lead's.

        Raises
        ------
        ConnectionLost
            When it cannot be reached.
        """

        async def reach(host: str) -> None:
            def made(*within: Any) -> AsyncConnection:
                return AsyncConnection(channel, *within).following(lead)

            patience = ATTEMPT if self._tls is None else LONGEST_WELCOME
            given = channel.host, channel.server, patience
            await self._reach(made, (host, channel.port), *given)

        left = min(until - asyncio.get_running_loop().time(), ATTEMPT)
        try:
            hosts = self._env.known_addresses(channel.host) or await addresses(channel.host, left)
            async with asyncio.timeout_at(until):
                await first_reached(hosts, until, reach)
        except Untrusted:
            raise
        except OSError as error:
            raise ConnectionLost(f"{channel.server} cannot be reached: {reason(error)}") from error
