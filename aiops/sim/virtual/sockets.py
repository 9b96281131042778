"""Sockets over a simulated network, for programs that read and write theirs by the event loop.

They do what such a program asks of its own: ``loop.sock_accept``, ``sock_connect``,
``sock_recv_into`` and ``sock_sendall``. Whoever reads slowly is sent no more, as with TCP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from aiops.sim.virtual.listener import Listener
    from aiops.sim.virtual.network import Network

_ROOM = 1 << 20  # bytes that a socket takes in before they are read


class MemorySocket(asyncio.Protocol):
    """A stream socket.

    Parameters
    ----------
    network
        What its connections cross.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._listener: Listener | None = None
        self._transport: asyncio.Transport | None = None
        self._accepted: deque[MemorySocket] = deque()
        self._came: deque[memoryview] = deque()
        self._held = 0  # bytes that have come and are not read
        self._eof = self._full = self._closed = False
        self._error: Exception | None = None
        self._stirred = asyncio.Event()

    # ------------------------------------------------------------ what a socket does

    def listen(self, host: str) -> None:
        """Listen on the host that one is on, at a free port."""
        self._listener = self._network.listen(lambda: _Accepted(self._network, self), host)

    def getsockname(self) -> tuple[str, int]:
        """Return where it listens."""
        assert self._listener is not None, "it listens"
        return self._listener.sockets[0].getsockname()

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def setsockopt(self, *_option: Any) -> None:
        """Have no options."""

    def close(self) -> None:
        """Close it; what was sent still arrives."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._transport is not None:
            self._transport.close()
        for one in self._accepted:
            one.close()
        self._stirred.set()

    # ------------------------------------------------------------ what the event loop does with it

    async def accept(self) -> tuple[MemorySocket, tuple[str, int]]:
        """Wait for somebody to connect."""
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
        """Wait for bytes; return how many there are now, 0 when no more will come."""
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
        """Send bytes, which may be changed afterwards."""
        if self._transport is None or self._transport.is_closing():
            raise self._error or BrokenPipeError(32, "Broken pipe")
        self._transport.write(bytes(data))
        while self._full:
            await self._stir()
        if self._error is not None:
            raise self._error

    async def _stir(self) -> None:
        """Wait for something to happen."""
        if self._closed:
            raise OSError(9, "Bad file descriptor")
        self._stirred.clear()
        await self._stirred.wait()

    # ------------------------------------------------------------ what happens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Keep what has come until it is read."""
        self._came.append(memoryview(data))
        self._held += len(data)
        if self._held >= _ROOM and self._transport is not None:
            self._transport.pause_reading()
        self._stirred.set()

    def eof_received(self) -> bool:
        """Hear that no more will come; what is sent still goes out."""
        self._eof = True
        self._stirred.set()
        return True

    def pause_writing(self) -> None:
        """Have senders wait."""
        self._full = True

    def resume_writing(self) -> None:
        """Have them go on."""
        self._full = False
        self._stirred.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Hear that it is over."""
        self._error, self._eof, self._full = error, True, False
        self._stirred.set()

    def taken(self, one: MemorySocket) -> None:
        """Have somebody wait to be accepted."""
        self._accepted.append(one)
        self._stirred.set()


class _Accepted(MemorySocket):
    """The near end of a connection that somebody else has made."""

    def __init__(self, network: Network, listening: MemorySocket) -> None:
        super().__init__(network)
        self._listening = listening

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listening.taken(self)


def listening(network: Network, host: str) -> MemorySocket:
    """Return a socket that listens on the host that one is on."""
    found = MemorySocket(network)
    found.listen(host)
    return found
