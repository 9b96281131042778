"""A listening port of a simulated network: asyncio's ``Server`` over a host of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from aiops.sim.virtual.host import Host


class VirtualListener(asyncio.AbstractServer):
    """Accepts connections on a port of a host.

    Parameters
    ----------
    loop
        The event loop.
    host, port
        The port that connections come to.
    factory
        Makes the protocol of each connection.
    name
        The address that `sockets` report.
    closed
        Called with the listener when it closes.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: Host,
        port: int,
        factory: Callable[[], asyncio.BaseProtocol],
        name: str,
        closed: Callable[[VirtualListener], None],
    ) -> None:
        self.host, self.port, self.factory = host, port, factory
        self.context = copy_context()  # protocols run in the context that listens, not the peer's
        self.serving = True
        self.sockets = (_ListeningSocket(name, port),)
        self._loop, self._closed = loop, closed

    def close(self) -> None:
        """Accept no more connections; those that were accepted stay open."""
        self.serving = False
        self._closed(self)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self._loop

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
            await self._loop.create_future()
        finally:
            self.close()

    async def wait_closed(self) -> None:
        """Return at once: closing takes no time."""


class _ListeningSocket:
    """The few methods of a listening socket that servers use."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name, port

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def fileno(self) -> int:
        """Return the number of no descriptor."""
        return -1

    def setsockopt(self, *_option: Any) -> None:
        """Ignore the option."""

    def getsockopt(self, *_option: Any) -> bytes:
        """Return an empty value for every option."""
        return b""
