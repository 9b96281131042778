"""Stand in the simulated network between servers and those that connect to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import msgpack

from aiops.lab.torture.frame_templates import FrameTemplate
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.network import Network


class MessageLine:
    """Passes connections on to servers, and all that is said on them."""

    def __init__(self) -> None:
        self._open = dict[int, PassedConnection]()
        self._connections = 0
        self._tasks = set[asyncio.Task[None]]()

    def before(self, name: str, host: str, port: int) -> str:
        """Return the address (host:port) of a place before a server, which is called ``name``."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert isinstance(loop.network, Network)
        return f"localhost:{loop.network.listen(lambda: self._accept(name, host, port)).port}"

    def said(self, connection: PassedConnection, data: bytes) -> None:
        """Pass on what a client says."""
        connection.to_server(data)

    def answered(self, connection: PassedConnection, data: bytes) -> None:
        """Pass on what a server answers."""
        connection.to_client(data)

    def cut(self) -> None:
        """End all connections."""
        for connection in [*self._open.values()]:
            connection.end()

    def _accept(self, name: str, host: str, port: int) -> asyncio.Protocol:
        self._connections += 1
        connection = PassedConnection(self, name, self._connections)
        self._open[self._connections] = connection

        async def dial() -> None:
            try:
                await CURRENT_ENVIRONMENT.get().dial(lambda: connection.far, host, port)
            except OSError:  # the server does not run
                connection.end()

        task = asyncio.get_running_loop().create_task(dial())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return connection.near

    def ended(self, connection: PassedConnection) -> None:
        """Forget a connection."""
        self._open.pop(connection.number, None)


class PassedConnection:
    """One connection that is passed on.

    Parameters
    ----------
    line
        Is given what comes on it.
    door, number
        The name of the server, and the connection's own number.

    Attributes
    ----------
    near, far
        Its ends: at the client, and at the server.
    """

    def __init__(self, line: MessageLine, door: str, number: int) -> None:
        self.door, self.number, self._line, self._over = door, number, line, False
        self.near = _Side(self, lambda data: line.said(self, data))
        self.far = _Side(self, lambda data: line.answered(self, data))

    def to_server(self, data: bytes) -> None:
        """Send the server bytes."""
        self.far.write(data)

    def to_client(self, data: bytes) -> None:
        """Send the client bytes."""
        self.near.write(data)

    def end(self) -> None:
        """End it on both sides."""
        if not self._over:
            self._over = True
            self._line.ended(self)
            self.near.close()
            self.far.close()


class _Side(asyncio.Protocol):
    """One end of a connection that is passed on."""

    def __init__(self, connection: PassedConnection, came: Callable[[bytes], None]) -> None:
        self._connection, self._came = connection, came
        self._transport: asyncio.Transport | None = None
        self._early, self._over = bytearray(), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what came before this end was there."""
        self._transport = transport  # type: ignore[assignment]
        if self._early:
            self.write(bytes(self._early))
        if self._over:
            self.close()

    def write(self, data: bytes) -> None:
        """Send bytes, as soon as this end is there."""
        if self._transport is None:
            self._early += data
        elif not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End it when all is sent."""
        self._over = True
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Hand bytes over."""
        self._came(data)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other end, too."""
        self._connection.end()


class CutFrames:
    """Cuts the bytes of one direction into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[tuple[bytes, FrameTemplate]]:
        """Take bytes; yield the messages that are whole now, as they came and as templates."""
        self._data += data
        while len(self._data) >= 5:
            end = 5 + int.from_bytes(self._data[1:5], "big")
            if end > len(self._data):
                return
            header = msgpack.unpackb(bytes(self._data[5:end]))
            payloads, begin = list[bytes](), end
            for part in header.get("parts", ()):
                begin += 5
                payloads.append(bytes(self._data[begin : begin + part[3]]))
                begin += part[3]
            if begin > len(self._data):
                return
            raw = bytes(self._data[:begin])
            del self._data[:begin]
            yield raw, FrameTemplate.of((header, payloads))
