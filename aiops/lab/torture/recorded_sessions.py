"""Record what honest peers say to servers, message by message, to be said again with changes.

A `SessionRecorder` stands in the simulated network between servers and those that connect to them,
and keeps all that these say: workers, and a lead or a standby as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import msgpack

from aiops.lab.torture.frame_templates import FrameTemplate
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.network import Network


class RecordedFrame(NamedTuple):
    """One message that was said.

    Attributes
    ----------
    door
        The name of the server that it was said to.
    connection
        The number of its connection.
    frame
        The message.
    """

    door: str
    connection: int
    frame: FrameTemplate


class SessionRecorder:
    """Passes connections on to servers, and keeps what their clients say.

    Attributes
    ----------
    frames
        All messages so far, in the order in which they were whole.
    """

    def __init__(self) -> None:
        self.frames: list[RecordedFrame] = []
        self._connections = 0
        self._tasks = set[asyncio.Task[None]]()

    def before(self, name: str, host: str, port: int) -> str:
        """Return the address (host:port) of a place before a server, which is called ``name``."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert isinstance(loop.network, Network)
        return f"localhost:{loop.network.listen(lambda: self._side(name, host, port)).port}"

    def _side(self, name: str, host: str, port: int) -> asyncio.Protocol:
        self._connections += 1
        near, far = _Side(), _Side()
        near.kept, near.other, far.other = _Kept(self, name, self._connections), far, near

        async def dial() -> None:
            await CURRENT_ENVIRONMENT.get().dial(lambda: far, host, port)

        task = asyncio.get_running_loop().create_task(dial())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return near


class _Kept:
    """Cuts the bytes of one connection into messages."""

    def __init__(self, recorder: SessionRecorder, door: str, connection: int) -> None:
        self._recorder, self._of = recorder, (door, connection)
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Keep bytes."""
        self._data += data
        for frame in self._whole():
            self._recorder.frames.append(RecordedFrame(*self._of, frame))

    def _whole(self) -> Iterator[FrameTemplate]:
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
            del self._data[:begin]
            yield FrameTemplate.of((header, payloads))


class _Side(asyncio.Protocol):
    """One end of a connection that is passed on."""

    other: _Side
    kept: _Kept | None = None

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what came before this end was there."""
        self._transport = transport  # type: ignore[assignment]
        if self._early:
            self.write(bytes(self._early))

    def write(self, data: bytes) -> None:
        """Send bytes, as soon as this end is there."""
        if self._transport is None:
            self._early += data
        else:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Keep bytes, and pass them on."""
        if self.kept is not None:
            self.kept.add(data)
        self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other end, too."""
        other = self.other._transport
        if other is not None:
            other.close()
