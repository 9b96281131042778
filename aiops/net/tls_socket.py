"""A blocking TLS connection with the face of a socket, as far as the blocking client uses one.

`ssl.SSLSocket` has no ``sendmsg``, ignores the kernel's time-outs (SO_RCVTIMEO) and the flags of a
call, all of which a client's deadlines rest on. So the bytes go through `ssl.MemoryBIO`, and the
socket below stays as it is: a call that waits ends after a beat with `BlockingIOError`, as a plain
socket's does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiops.net.tls import TlsTarget, ended_early, explained

_PIECE = 256 << 10  # bytes that are encrypted before they are sent
_RECEIVE = 256 << 10  # bytes that one call receives
_RECORD = 16 << 10  # bytes in one record of TLS, at most
_GLANCE: int = getattr(socket, "MSG_DONTWAIT", 0)
_WHOLE: int = getattr(socket, "MSG_WAITALL", 0)


class StreamSocket(Protocol):
    """The calls of a socket that a blocking client makes."""

    def sendmsg(self, buffers: Any, ancdata: Any = ..., flags: int = ..., /) -> int: ...
    def recv_into(self, buffer: Any, nbytes: int = ..., flags: int = ...) -> int: ...
    def sendall(self, data: Any, flags: int = ..., /) -> None: ...
    def settimeout(self, value: float | None, /) -> None: ...
    def setsockopt(self, level: int, optname: int, value: Any, /) -> None: ...
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...
    @property
    def family(self) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class TlsSocket:
    """One connection.

    Parameters
    ----------
    sock
        Connected, and closed with it.
    target
        The server that it must be.
    peer
        The server, for error texts.
    """

    def __init__(self, sock: socket.socket, target: TlsTarget, peer: str) -> None:
        self._sock, self._peer = sock, peer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = target.context.wrap_bio(self._in, self._out, server_hostname=target.host)
        self._room = memoryview(bytearray(_RECEIVE))
        self._unsent = memoryview(b"")  # encrypted
        self._sealed = 0  # bytes of the caller's that are in it, and have not been reported as sent
        self._starved = True  # what is in `_in` is no whole record

    def handshake(self, left: Callable[[], float]) -> None:
        """Go through the handshake.

        ``left`` returns the seconds that are left, or raises.

        Raises
        ------
        Untrusted, ConnectionLost
            When the server cannot be verified, or the connection ends.
        TimeoutError
            When it takes longer.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):  # the alert, so that the server's log says why
                    self._sock.sendall(self._out.read())
                raise explained(self._peer, error) from None
            self._sock.settimeout(left())
            self._sock.sendall(self._out.read())
            if self._tls.version() is not None and not self._waits_for_server():
                return
            count = self._sock.recv_into(self._room)
            if not count:
                raise ended_early(self._peer)
            self._in.write(self._room[:count])

    def _waits_for_server(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return True
        return False

    # ------------------------------------------------------------ sending

    def sendmsg(self, buffers: Sequence[Any], ancdata: Any = (), flags: int = 0, /) -> int:
        """Send these buffers; return how many of their bytes have gone out.

        What was not sent must be sent next, as it was: some of it may be encrypted already.
        """
        if self._sealed:
            self._flush(flags)
            sealed, self._sealed = self._sealed, 0
            return sealed
        sent = 0
        for piece in _pieces(buffers):
            for start in range(0, len(piece), _RECORD):
                self._write(piece[start : start + _RECORD])
            self._sealed = len(piece)
            try:
                self._flush(flags)
            except BlockingIOError:
                if sent:
                    return sent
                raise
            self._sealed = 0
            sent += len(piece)
        return sent

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send all of it."""
        self._write(memoryview(data))
        self._flush(flags)

    def _write(self, view: memoryview) -> None:
        try:
            while view:
                view = view[self._tls.write(view) :]
        except ssl.SSLError as error:
            raise explained(self._peer, error) from None

    def _flush(self, flags: int) -> None:
        """Send what is encrypted."""
        while True:
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent, flags) :]
            if not self._out.pending:
                return
            self._unsent = memoryview(self._out.read())

    # ------------------------------------------------------------ receiving

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive, as a socket does; 0: the server has closed the connection."""
        view, count = memoryview(buffer), 0
        while True:
            ended = False
            try:
                while count < len(view) and not ended:
                    several = self._tls.read(len(view) - count, view[count:])
                    count += int(several)
                    ended = not several
            except ssl.SSLWantReadError:
                self._starved = True
            except ssl.SSLZeroReturnError:
                ended = True
            except ssl.SSLError as error:
                raise explained(self._peer, error) from None
            if ended or count == len(view) or (count and not flags & _WHOLE):
                return count
            try:
                came = self._sock.recv_into(self._room, 0, flags & _GLANCE)
            except BlockingIOError:
                if count:
                    return count
                raise
            if not came:
                return count
            self._in.write(self._room[:came])
            self._starved = False

    @property
    def pending(self) -> bool:
        """True if something that has come can be read without the socket."""
        return not self._starved and (self._in.pending > 0 or self._tls.pending() > 0)

    # ------------------------------------------------------------ the socket below

    def settimeout(self, value: float | None, /) -> None:
        """Set the time-out of the socket."""
        self._sock.settimeout(value)

    def setsockopt(self, level: int, optname: int, value: Any, /) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, optname, value)

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return an option of the socket."""
        return self._sock.getsockopt(level, optname, buflen)

    @property
    def family(self) -> int:
        """The socket's address family."""
        return self._sock.family

    def shutdown(self, how: int, /) -> None:
        """End the connection's directions; a call in another thread returns."""
        self._sock.shutdown(how)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the descriptor, and say nothing to the server: it may be a fork's."""
        self._sock.close()


class _TlsPoll:
    """`select.poll` of one `TlsSocket`, which may have been read ahead of."""

    def __init__(self, sock: TlsSocket) -> None:
        self._sock, self._poll = sock, select.poll()
        self._poll.register(sock, select.POLLIN)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        """Return at once if something can be read, else when it can or the time is up."""
        if self._sock.pending:
            return [(self._sock.fileno(), select.POLLIN)]
        return self._poll.poll(milliseconds)


def read_poll(sock: StreamSocket) -> Any:
    """Return what polls a socket for something to read; None where a system has no such call."""
    if not hasattr(select, "poll"):
        return None
    if isinstance(sock, TlsSocket):
        return _TlsPoll(sock)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return poll


def read_ahead(sock: StreamSocket) -> bool:
    """Return True if bytes of a socket can be read that polling it does not show."""
    return isinstance(sock, TlsSocket) and sock.pending


def _pieces(buffers: Sequence[Any]) -> list[memoryview]:
    """Return the bytes of these buffers in pieces; small ones together."""
    views = [memoryview(each).cast("B") for each in buffers if len(each)]
    if len(views) > 1 and sum(map(len, views)) <= _RECORD:
        return [memoryview(b"".join(views))]
    return [view[at : at + _PIECE] for view in views for at in range(0, len(view), _PIECE)]
