"""Set the options of every socket of aiops, on both sides."""

from __future__ import annotations

import array
import contextlib
import select
import socket
import sys
from typing import Protocol

from aiops.common.failure_waits import FailureWaits
from aiops.common.urls import is_loopback

SEND_BUFFER = 1 << 20
"""SO_SNDBUF in bytes. Measured on loopback at 64 MiB: 256 KiB 3.1 GB/s, 1 MiB 3.9, 4 MiB 3.0."""

_MOST_PROBES, _LONGEST_PAUSE, _LONGEST = 127, 32767, (1 << 31) - 1  # what the kernel takes

_SHARE, _NARROWEST = 32, 4096
"""A paced socket's buffers: a 32nd of a second's budget (doubled by Linux), at least 4 KiB."""

_WAITS = FailureWaits()
_TCP_RTO_MAX_MS = 44  # Linux 6.15; `socket` does not have it


def tune(sock: socket.socket, waits: FailureWaits = _WAITS) -> None:
    """Send small messages at once, large ones fast, and have a peer's machine give signs of life.

    A silent one is probed, each second by default, and lost packets are repeated as often, so that
    a healed network is noticed at once. `aiops.net.path_watch` ends a connection without signs of
    life; where the system does not tell, TCP does so after the time that a silent process is given.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", min(_LONGEST_PAUSE, waits.probe)),
        ("TCP_KEEPINTVL", min(_LONGEST_PAUSE, waits.probe)),
        ("TCP_KEEPCNT", min(_MOST_PROBES, max(1, int(waits.unanswered // waits.probe)))),
        ("TCP_USER_TIMEOUT", min(_LONGEST, int(1000 * waits.unanswered))),
    ):
        option = getattr(socket, name, None)  # Linux has all, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an older kernel, or more than its longest
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000 * waits.probe)


def unpace(sock: socket.socket, host: str) -> None:
    """Replace BBR by Reno for connections that do not leave the machine.

    BBR, some systems' default, estimates a bandwidth and sends by timers at that rate, and a
    loopback has neither a bottleneck nor losses: measured there, Reno, which every process may
    choose, makes 1.6 times as many 1 MiB exchanges. On other links the system's choice stays.

    Call it before a socket is connected, or listens (accepted sockets inherit the option): a kernel
    that has begun to pace a connection goes on doing so, if less.

    Parameters
    ----------
    sock
        The socket.
    host
        The address that it will be connected to, or listens on.
    """
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None or not is_loopback(host):  # not Linux, or it may leave the machine
        return
    with contextlib.suppress(OSError):  # the kernel has no Reno
        if sock.getsockopt(socket.IPPROTO_TCP, option, 16).startswith(b"bbr"):
            sock.setsockopt(socket.IPPROTO_TCP, option, b"reno")


class HasFileno(Protocol):
    """A socket, or an event loop's stand-in for one."""

    def fileno(self) -> int:
        """Return its file descriptor, -1 when it is closed."""


def unacknowledged(sock: HasFileno) -> int:
    """Return the sent bytes that the other side has not acknowledged (0 where unknown).

    The event loop cannot see a slow reader while the socket's send buffer takes its bytes.
    """
    return _count(sock, "TIOCOUTQ") or 0


def readable(sock: HasFileno) -> int | None:
    """Return the number of received bytes that wait in a socket, None where it is unknown."""
    return _count(sock, "FIONREAD")


def has_hung_up(sock: HasFileno) -> bool:
    """Return whether the other side has ended its direction; False where that is unknown."""
    if not hasattr(select, "POLLRDHUP"):  # not Linux
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _count(sock: HasFileno, request: str) -> int | None:
    try:
        import fcntl
        import termios

        count = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), getattr(termios, request), count)
    except (ImportError, AttributeError, OSError, ValueError):  # not Linux, or closed
        return None
    return count[0]


def narrow(sock: socket.socket, rate: int) -> None:
    """Give a socket buffers that are small relative to ``rate`` (bytes per second).

    Bytes that are not read then stay with the peer, so that the network is throttled too, and not
    only the reading. Linux doubles the sizes; accepted sockets inherit them from the listening one.
    """
    size = max(_NARROWEST, min(SEND_BUFFER, rate // _SHARE))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, size)
