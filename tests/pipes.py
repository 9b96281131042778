"""The server's side of a connection whose other end is in a test's hands: no socket, no thread."""

from __future__ import annotations

import asyncio
from typing import Any

from aiops.serving.server import Server
from aiops.wire import messages
from tests.peers import frame


class Pipe(asyncio.Transport):
    """A transport whose other end is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.protocol is None

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self.protocol is not None:
            asyncio.get_running_loop().call_soon(self.lost)

    def lost(self) -> None:
        """Tell the protocol that the connection is gone, once."""
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connection_lost(None)


class Piped:
    """A connection to a server that runs on this event loop, and its greeting."""

    def __init__(
        self, server: Server, client: str = "c" * 32, epoch: int = 1, role: str = "worker"
    ) -> None:
        self.protocol: Any = server.connections.accept()
        self.pipe = Pipe()
        self.pipe.protocol = self.protocol
        self.protocol.connection_made(self.pipe)
        self.feed(
            frame(
                messages.Hello(
                    0, messages.PROTOCOL, client, epoch, "w", role, False, b"n" * 16, "test"
                )
            )
        )

    @property
    def written(self) -> bytes:
        """All that the server has said."""
        return b"".join(self.pipe.written)

    def feed(self, data: bytes, most: int | None = None) -> None:
        """Have bytes arrive, as many at a time as there is room for, and at most ``most``."""
        while data and self.pipe.protocol is not None:
            room = self.protocol.get_buffer(-1)
            count = min(len(room), len(data), most or len(data))
            room[:count] = data[:count]
            self.protocol.buffer_updated(count)
            data = data[count:]
