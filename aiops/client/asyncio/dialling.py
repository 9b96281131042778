"""The connecting of an async client, with a deadline of the event loop's clock."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from aiops.client.asyncio.connection import AsyncConnection
from aiops.client.backoff import reason
from aiops.client.session import Session
from aiops.client.shard_channel import ShardChannel
from aiops.errors import ConnectionLost
from aiops.net.dns import addresses, first_reached
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.unix_socket import welcomed
from aiops.wire.shared_payloads import SharedPayloads


class AsyncDialler:
    """Connects to a server and to the other shards of its model.

    Deadlines (``until``) are times of the event loop.

    Parameters
    ----------
    session
        The session whose bytes the connections carry.
    host, port
        The server's address.
    """

    def __init__(self, session: Session, host: str, port: int) -> None:
        self._session, self._host, self._port = session, host, port
        self._env = CURRENT_ENVIRONMENT.get()

    async def connect_to_server(self, until: float) -> tuple[asyncio.Transport, AsyncConnection]:
        """Connect to the first of the server's addresses that answers."""
        left = until - asyncio.get_running_loop().time()
        hosts = self._env.known_addresses(self._host) or await addresses(self._host, left)
        return await first_reached(hosts, until, self._reach)

    async def _reach(self, host: str) -> tuple[asyncio.Transport, AsyncConnection]:
        loop = asyncio.get_running_loop()
        near = self._env.connect_unix(host, self._port)
        if near is None:
            return await self._env.dial(lambda: AsyncConnection(self._session), host, self._port)
        side = None
        try:
            await _readable(near)
            side = welcomed(near)
            shared = SharedPayloads(partial(side.attach, private=False), side.pass_on)
            return await loop.create_unix_connection(
                lambda: AsyncConnection(self._session, shared, side, host), sock=near
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
            made = partial(AsyncConnection(channel).following, lead)
            await self._env.dial(made, host, channel.port)

        left = until - asyncio.get_running_loop().time()
        try:
            hosts = self._env.known_addresses(channel.host) or await addresses(channel.host, left)
            async with asyncio.timeout_at(until):
                await first_reached(hosts, until, reach)
        except OSError as error:
            raise ConnectionLost(f"{channel.server} cannot be reached: {reason(error)}") from error


async def _readable(sock: socket.socket) -> None:
    """Wait until there is something to be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
