"""A connection of a server in this process, which is handed bytes without a network."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiops.wire.checked_connection import PREAMBLE, xxh3


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


class CheckedFedConnection(FedConnection):
    """A connection on which each item that is handed over has a right checksum behind it.

    So what a hostile peer says with checksums comes as far as without. What is no whole message
    has none.

    Parameters
    ----------
    protocol
        The server's.
    """

    CHECK = 9
    """Bytes of a checksum."""

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        self._items = 0
        super().__init__(protocol)
        super().feed(PREAMBLE)

    def feed(self, data: bytes) -> None:
        """Hand a message to the server, with checksums."""
        end = 5 + int.from_bytes(data[1:5], "big")
        if data[:1] != b"\xce" or end > len(data):
            super().feed(data)
            return
        chunks = [self._sealed(data[:5]), self._sealed(data[5:end])]
        while data[end : end + 1] == b"\xc6":
            begin = end + 5
            chunks.append(data[end:begin])
            end = begin + int.from_bytes(data[end + 1 : begin], "big")
            chunks.append(self._sealed(data[begin:end]))
        super().feed(b"".join((*chunks, data[end:])))

    def _sealed(self, item: bytes) -> bytes:
        found = xxh3(self._items)
        self._items += 1
        found.update(item)
        return item + b"\xcf" + bytes(found.digest())
