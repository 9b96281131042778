"""Notice that the network to a peer is cut: nothing has been heard of its machine for a while.

TCP tells, on Linux: the peer's machine acknowledges what is sent to it, and answers the probes that
`aiops.net.socket_options.tune` asks for, whatever its processes do. Elsewhere nothing is known, and
a dead peer is noticed by its missing answers to pings, and by TCP's own time-outs.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from aiops.errors import ConnectionLost

_INFO = getattr(socket, "TCP_INFO", None)
_FIELDS = struct.Struct("=3xB20xI24xII")
"""Of ``struct tcp_info``: unanswered probes, packets under way, and the milliseconds since the last
data and the last acknowledgement."""

_SOON = 0.05  # seconds between two looks, at least


class HasOptions(Protocol):
    """A socket, or an event loop's stand-in for one."""

    @property
    def family(self) -> int:
        """Its address family."""

    def fileno(self) -> int:
        """Return its descriptor; below 0: it is closed."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return an option."""


def unheard(sock: HasOptions) -> float:
    """Return the seconds since the peer's machine was last heard of.

    0 where that is unknown, and where it has nothing to answer at present.
    """
    if _INFO is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _INFO, _FIELDS.size)
        probes, packets, data, acknowledgement = _FIELDS.unpack(info)
    except (OSError, struct.error):  # it is closed; or the system's structure is another one
        return 0.0
    # A peer that does not read is probed at longer and longer intervals by older kernels.
    return float(min(data, acknowledgement)) / 1e3 if probes or packets else 0.0


def cut_off(peer: str, seconds: float) -> ConnectionLost:
    """Return the error of a connection whose peer's machine is unheard."""
    return ConnectionLost(
        f"nothing has been heard of {peer}'s machine for {seconds:.1f} s: the network between seems"
        " to be cut"
    )


class PathWatch:
    """Looks from time to time whether a transport's peer is still heard of.

    Parameters
    ----------
    transport
        Connected.
    limit
        Returns the seconds after which it is not.
    gone
        Called once, with the seconds, when it is not; it ends the connection.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        limit: Callable[[], float],
        gone: Callable[[float], None],
    ) -> None:
        self._limit, self._gone = limit, gone
        self._sock: Any = transport.get_extra_info("socket")
        sock = self._sock
        # A transport in virtual time has no socket; it tells itself.
        self._tell: Callable[[], float] | None = transport.get_extra_info("unheard")
        if sock is not None:
            self._tell = lambda: unheard(sock)
        self._timer: asyncio.TimerHandle | None = None
        near = sock is not None and sock.family not in (socket.AF_INET, socket.AF_INET6)
        if self._tell is not None and not near:
            self._look_in(limit())

    def _look_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(seconds, _SOON), self._look)

    def _look(self) -> None:
        if self._sock is not None and self._sock.fileno() < 0:
            # A loop may close a connection, and tell its protocol nothing. uvloop's stand-in would
            # raise an error that is none of the system's.
            self._timer = None
            return
        silence, limit = self._tell() if self._tell is not None else 0.0, self._limit()
        if silence < limit:
            self._look_in(min(limit - silence, limit / 8))
        else:
            self._timer = None
            self._gone(silence)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
