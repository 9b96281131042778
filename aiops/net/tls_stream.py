"""An awaited TLS connection over a socket that an event loop moves the bytes of.

`asyncio` has TLS for transports only. Workers of a ring use the loop's calls for sockets, which
receive a chunk straight into its place, so here the bytes go through `ssl.MemoryBIO`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

_PIECE = 256 << 10  # bytes that are encrypted before they are sent
_RECEIVE = 256 << 10  # encrypted bytes that one call receives


class TlsStream:
    """One connection.

    Parameters
    ----------
    sock
        Connected and non-blocking; it stays the caller's to close.
    context
        Verifies the other side, and has this side's certificate.
    server_side
        Whether this side answers the handshake.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_side)
        self._room = memoryview(bytearray(_RECEIVE))

    async def handshake(self) -> None:
        """Go through the handshake.

        Raises
        ------
        OSError
            When the other side is not accepted (`ssl.SSLError`), or the connection ends.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the alert, so that the other side knows why
                    await self._flush()
                raise
            else:
                await self._flush()
                return
            await self._flush()
            if not await self._more():
                raise ConnectionError("it closed the connection in the TLS handshake")

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes; return how many were put into the buffer, 0 at the end.

        Raises
        ------
        OSError
            As `handshake`: a certificate may be refused by the first bytes after it.
        """
        while True:
            try:
                count: Any = self._tls.read(len(buffer), buffer)  # not bytes, with a buffer
                return int(count)
            except ssl.SSLWantReadError:
                if not await self._more():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    async def send_all(self, data: memoryview | bytes) -> None:
        """Send all of these bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            self._tls.write(view[start : start + _PIECE])
            await self._flush()

    async def _flush(self) -> None:
        encrypted = self._out.read()
        if encrypted:
            await asyncio.get_running_loop().sock_sendall(self._sock, encrypted)

    async def _more(self) -> bool:
        """Receive encrypted bytes; return False at the end."""
        count = await asyncio.get_running_loop().sock_recv_into(self._sock, self._room)
        self._in.write(self._room[:count])
        return count > 0
