"""Sockets over a simulated network, for programs that use them through the event loop.

They support ``loop.sock_accept``, ``sock_connect``, ``sock_recv_into`` and ``sock_sendall``. A
socket with 1 MiB of unread bytes is sent no more until it is read, as with TCP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from aiops.sim.virtual.listener import VirtualListener
from aiops.sim.virtual.network import Network

_ROOM = 1 << 20  # unread bytes that a socket keeps


class MemorySocket(asyncio.Protocol):
    """A stream socket.

    Parameters
    ----------
    network
        The network that its connections cross.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._listener: VirtualListener | None = None
        self._transport: asyncio.Transport | None = None
        self._accepted: deque[MemorySocket] = deque()
        self._came: deque[memoryview] = deque()
        self._held = 0  # unread bytes
        self._eof = self._full = self._closed = False
        self._error: Exception | None = None
        self._stirred = asyncio.Event()

    # ------------------------------------------------------------ a socket's methods

    def listen(self, host: str) -> None:
        """Listen on the current host, at a free port."""
        self._listener = self._network.listen(lambda: _Accepted(self._network, self), host)

    def getsockname(self) -> tuple[str, int]:
        """Return the name and the port at which it listens."""
        assert self._listener is not None, "it listens"
        return self._listener.sockets[0].getsockname()

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def setsockopt(self, *_option: Any) -> None:
        """Ignore the option."""

    def close(self) -> None:
        """Close it; bytes that were sent still arrive."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._transport is not None:
            self._transport.close()
        for one in self._accepted:
            one.close()
        self._stirred.set()

    # ------------------------------------------------------------ the event loop's side

    async def accept(self) -> tuple[MemorySocket, tuple[str, int]]:
        """Wait for a connection; return its socket and the peer's address."""
        while not self._accepted:
            await self._stir()
        found = self._accepted.popleft()
        assert found._transport is not None
        peer: tuple[str, int] = found._transport.get_extra_info("peername")
        return found, peer

    async def connect(self, address: tuple[str, int]) -> None:
        """Connect."""
        await self._network.connect(lambda: self, *address)

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes; return how many were written to the buffer, 0 when no more will come."""
        while not self._came:
            if self._error is not None:
                raise self._error
            if self._eof:
                return 0
            await self._stir()
        view = self._came.popleft()
        count = min(len(view), len(buffer))
        buffer[:count] = view[:count]
        if count < len(view):
            self._came.appendleft(view[count:])
        self._held -= count
        if self._transport is not None and self._held < _ROOM:
            self._transport.resume_reading()
        return count

    async def send_all(self, data: Any) -> None:
        """Send bytes; the caller may change them afterwards."""
        if self._transport is None or self._transport.is_closing():
            raise self._error or BrokenPipeError(32, "Broken pipe")
        self._transport.write(bytes(data))
        while self._full:
            await self._stir()
        if self._error is not None:
            raise self._error

    async def _stir(self) -> None:
        """Wait for the next event of the connection."""
        if self._closed:
            raise OSError(9, "Bad file descriptor")
        self._stirred.clear()
        await self._stirred.wait()

    # ------------------------------------------------------------ the protocol's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Keep bytes until they are read."""
        self._came.append(memoryview(data))
        self._held += len(data)
        if self._held >= _ROOM and self._transport is not None:
            self._transport.pause_reading()
        self._stirred.set()

    def eof_received(self) -> bool:
        """Note that no more will come; the connection stays open for sending."""
        self._eof = True
        self._stirred.set()
        return True

    def pause_writing(self) -> None:
        """Let senders wait."""
        self._full = True

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._full = False
        self._stirred.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is over."""
        self._error, self._eof, self._full = error, True, False
        self._stirred.set()

    def taken(self, one: MemorySocket) -> None:
        """Queue a connection that is to be accepted."""
        self._accepted.append(one)
        self._stirred.set()


class _Accepted(MemorySocket):
    """The near end of a connection that the peer made."""

    def __init__(self, network: Network, listening: MemorySocket) -> None:
        super().__init__(network)
        self._listening = listening

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listening.taken(self)


def listening_socket(network: Network, host: str) -> MemorySocket:
    """Return a socket that listens on the current host."""
    found = MemorySocket(network)
    found.listen(host)
    return found
