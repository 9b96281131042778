"""A port that is closed leaves no connection that was accepted without an owner."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from aiops.serving.port import close_listener
from tests.rows import each_row


class Ends(asyncio.Protocol):
    """Ends each connection at once, as the owner of a server that is over does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


@each_row("turns", range(5))
def test_a_connection_that_is_accepted_while_the_port_closes_ends(turns: int) -> None:
    """In one of these turns of the loop it is accepted, and its transport is not made yet."""

    async def closed() -> None:
        listener = await asyncio.get_running_loop().create_server(Ends, "127.0.0.1", 0)
        with socket.create_connection(listener.sockets[0].getsockname()[:2]) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await close_listener(listener)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            client.settimeout(1)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""

    asyncio.run(closed())
