"""Sockets over a simulated network, for programs that use them through the event loop.

They support ``loop.sock_accept``, ``sock_connect``, ``sock_recv_into`` and ``sock_sendall``. A
socket with 1 MiB of unread bytes is sent no more until it is read, as with TCP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiops.sim.virtual.network import Network

_HALF_FULL = 512 * 1024  # unread bytes: at twice as many a socket takes no more


class MemorySocket:
    """A stream socket.

    Parameters
    ----------
    network
        The network that its connection crosses.
    on_connected
        Called with the socket when it is connected.
    """

    def __init__(
        self, network: Network, on_connected: Callable[[MemorySocket], None] | None = None
    ) -> None:
        self._network, self._on_connected = network, on_connected
        self._reader = asyncio.StreamReader(_HALF_FULL)
        self._writer: asyncio.StreamWriter | None = None

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def setsockopt(self, *_option: Any) -> None:
        """Ignore the option."""

    def close(self) -> None:
        """Close it; bytes that were sent still arrive."""
        if self._writer is not None:
            self._writer.close()

    # ------------------------------------------------------------ the event loop's side

    async def connect(self, address: tuple[str, int]) -> None:
        """Connect."""
        await self._network.connect(self.protocol, *address)

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes; return how many were written to the buffer, 0 when no more will come."""
        data = await self._reader.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    async def send_all(self, data: Any) -> None:
        """Send bytes; the caller may change them afterwards."""
        if self._writer is None or self._writer.is_closing():
            raise self._reader.exception() or BrokenPipeError(32, "Broken pipe")
        self._writer.write(bytes(data))
        await self._writer.drain()

    # ------------------------------------------------------------ the network's side

    def protocol(self) -> asyncio.StreamReaderProtocol:
        """Return the protocol of its connection."""
        return asyncio.StreamReaderProtocol(self._reader, self._connected)

    def _connected(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        if self._on_connected is not None:
            self._on_connected(self)

    @property
    def peer(self) -> tuple[str, int]:
        """The name and port of the other end."""
        if self._writer is None:
            raise OSError(107, "Transport endpoint is not connected")
        found: tuple[str, int] = self._writer.get_extra_info("peername")
        return found


class ListeningSocket:
    """A socket that listens on the current host, at a free port.

    Parameters
    ----------
    network
        The network of that host.
    host
        The address that `getsockname` returns.
    """

    def __init__(self, network: Network, host: str) -> None:
        self._accepted: asyncio.Queue[MemorySocket] = asyncio.Queue()
        self._listener = network.listen(
            lambda: MemorySocket(network, self._accepted.put_nowait).protocol(), host
        )

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def getsockname(self) -> tuple[str, int]:
        """Return the name and the port at which it listens."""
        return self._listener.sockets[0].getsockname()

    def close(self) -> None:
        """Accept no more connections, and close those that were not accepted."""
        self._listener.close()
        while not self._accepted.empty():
            self._accepted.get_nowait().close()

    async def accept(self) -> tuple[MemorySocket, tuple[str, int]]:
        """Wait for a connection; return its socket and the peer's address."""
        found = await self._accepted.get()
        return found, found.peer
