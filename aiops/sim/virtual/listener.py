"""Who accepts connections on a port of a simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiops.sim.virtual.host import Host
    from aiops.sim.virtual.network import Network


class Listener(asyncio.AbstractServer):
    """Who accepts connections on a port; asyncio's ``Server``."""

    def __init__(
        self,
        network: Network,
        host: Host,
        factory: Callable[[], asyncio.BaseProtocol],
        name: str,
        port: int,
    ) -> None:
        self.network, self.host, self.factory, self.port = network, host, factory, port
        self.context = copy_context()  # that of whoever listens: it serves there
        self.serving = True
        self.sockets = (_Address(name, port),)

    def close(self) -> None:
        """Accept no more; the connections there are go on."""
        self.serving = False
        self.network.forget(self)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self.network.loop

    def is_serving(self) -> bool:
        """Return whether connections are accepted."""
        return self.serving

    async def start_serving(self) -> None:
        """Accept connections from now on."""
        self.serving = True

    async def serve_forever(self) -> None:
        """Accept connections until this is cancelled."""
        self.serving = True
        try:
            await self.network.loop.create_future()
        finally:
            self.close()

    async def wait_closed(self) -> None:
        """Return: it closes at once."""


class _Address:
    """What a listening socket says of itself."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name, port

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def setsockopt(self, *_option: Any) -> None:
        """Have no options."""

    def getsockopt(self, *_option: Any) -> bytes:
        """Know of none."""
        return b""
