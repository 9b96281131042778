"""A socket that notes when it sent and received last, for traces."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from aiops.net.tls_socket import StreamSocket


class SocketTimes:
    """The times of a connection's last calls.

    Parameters
    ----------
    now
        The clock of traces: nanoseconds since 1970.

    Attributes
    ----------
    now
        As above.
    sent
        The end of the last call that sent something.
    received
        The end of the first call thereafter that received something; 0: there was none.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.sent = self.received = 0


def timed(sock: StreamSocket, times: SocketTimes) -> StreamSocket:
    """Return a socket that notes its times, if it is a plain one; else itself."""
    return TimedSocket(sock, times) if isinstance(sock, socket.socket) else sock


def plain(sock: StreamSocket | None) -> socket.socket | None:
    """Return the plain socket that this is, or that it times; None: it is of another kind."""
    if isinstance(sock, TimedSocket):
        return sock.plain
    return sock if isinstance(sock, socket.socket) else None


class TimedSocket:
    """A plain socket, with `SocketTimes`; the calls are those of `StreamSocket`.

    Attributes
    ----------
    plain
        The socket, whose own calls are not timed.
    """

    def __init__(self, sock: socket.socket, times: SocketTimes) -> None:
        self.plain = sock
        self._times, self._now = times, times.now

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, /) -> int:
        """Send, and note the time."""
        sent = self.plain.sendmsg(buffers, ancdata, flags)
        self._times.sent, self._times.received = self._now(), 0
        return sent

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive, and note the time if nothing has come since something was sent."""
        count = self.plain.recv_into(buffer, nbytes, flags)
        if not self._times.received:
            self._times.received = self._now()
        return count

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send all."""
        self.plain.sendall(data, flags)

    def settimeout(self, value: float | None, /) -> None:
        """Set the time-out."""
        self.plain.settimeout(value)

    def setsockopt(self, level: int, optname: int, value: Any, /) -> None:
        """Set an option."""
        self.plain.setsockopt(level, optname, value)

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return an option."""
        return self.plain.getsockopt(level, optname, buflen)

    @property
    def family(self) -> int:
        """The address family."""
        return self.plain.family

    def shutdown(self, how: int, /) -> None:
        """End the connection's directions."""
        self.plain.shutdown(how)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.plain.fileno()

    def close(self) -> None:
        """Close the descriptor."""
        self.plain.close()
