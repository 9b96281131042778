"""A socket that notes when it sent and received last, for traces."""

from __future__ import annotations

import socket
import time
from typing import Any

from aiops.net.tls_socket import StreamSocket


class SocketTimes:
    """The times of a connection's last calls, in nanoseconds since 1970.

    Attributes
    ----------
    sent
        The end of the last call that sent something.
    came
        The end of the first call thereafter that received something; 0: there was none.
    """

    def __init__(self) -> None:
        self.sent = self.came = 0


def timed(sock: StreamSocket, times: SocketTimes) -> StreamSocket:
    """Return a socket that notes its times, if it is a plain one; else itself."""
    return TimedSocket(sock, times) if isinstance(sock, socket.socket) else sock


def untimed(sock: StreamSocket | None) -> StreamSocket | None:
    """Return the plain socket of one that notes its times; else itself."""
    return sock.plain if isinstance(sock, TimedSocket) else sock


class TimedSocket:
    """A plain socket, with `SocketTimes`; the calls are those of `StreamSocket`."""

    def __init__(self, sock: socket.socket, times: SocketTimes) -> None:
        self.plain, self._times = sock, times

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, /) -> int:
        """Send, and note the time."""
        sent = self.plain.sendmsg(buffers, ancdata, flags)
        self._times.sent, self._times.came = time.time_ns(), 0
        return sent

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive, and note the time if nothing has come since something was sent."""
        came = self.plain.recv_into(buffer, nbytes, flags)
        if not self._times.came:
            self._times.came = time.time_ns()
        return came

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
