"""A connection of a server in this process, which is handed bytes without a network."""

from __future__ import annotations

import asyncio
from typing import Any, cast


class FedConnection:
    """One connection of a server, as its transport sees it; what the server says is kept.

    Parameters
    ----------
    protocol
        The server's.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        self._protocol = protocol
        self.said: list[bytes | memoryview] = []
        self.over = self.paused = False
        protocol.connection_made(self)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """Hand bytes to the server, until it ends the connection or reads no further."""
        protocol, view = self._protocol, memoryview(data)
        while view and not self.over and not self.paused:
            room = cast(memoryview, protocol.get_buffer(-1))
            count = min(len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            protocol.buffer_updated(count)

    def lose(self) -> bytes:
        """End it; return what the server said."""
        self.over = True
        self._protocol.connection_lost(None)
        return b"".join(self.said)

    # ------------------------------------------------------------ what the server calls

    def write(self, data: bytes | memoryview) -> None:
        """Keep what the server says."""
        self.said.append(data)

    def abort(self) -> None:
        """End it."""
        self.over = True

    close = abort

    def is_closing(self) -> bool:
        """Return whether it has been ended."""
        return self.over

    def pause_reading(self) -> None:
        """Read nothing more."""
        self.paused = True

    def resume_reading(self) -> None:
        """Read on."""
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the default: there is no socket."""
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: all is kept at once."""

    def get_write_buffer_size(self) -> int:
        """Return 0."""
        return 0
