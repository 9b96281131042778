"""What a server or a client takes from the machine it runs on: clock, entropy, a thread, a name.

Nothing decides by where it runs. Whoever runs servers and clients elsewhere, such as in virtual
time (`aiops.testing`), sets `SURROUNDINGS` in a context; what is made in that context takes from
there what it would otherwise take from the machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from aiops.kernels.device import Device
from aiops.net import unix_socket
from aiops.net.busy_poll import Spin
from aiops.net.dns import Addresses, literal
from aiops.net.socket_options import unpace
from aiops.net.thread_pool import HANDS, hands_of
from aiops.net.update_thread import KernelRunner, UpdateThread

P = TypeVar("P", bound=asyncio.BaseProtocol)

Together: TypeAlias = Callable[[Sequence[Callable[[], Any]]], None]

_WAITING = 64  # connections that may wait to be accepted


def _identity() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _listening(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=_family(host), backlog=_WAITING)


def _unconnected(host: str) -> socket.socket:
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    unpace(sock, host)
    return sock


class Dial(Protocol):
    """Connects a protocol of the running event loop to an IP address and a port."""

    async def __call__(
        self, factory: Callable[[], P], host: str, port: int
    ) -> tuple[asyncio.Transport, P]:
        """Return the transport and the protocol; raise `OSError` where nobody is reached."""
        ...


async def _dialled(factory: Callable[[], P], host: str, port: int) -> tuple[asyncio.Transport, P]:
    loop = asyncio.get_running_loop()
    sock = _unconnected(host)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, port))
        return await loop.create_connection(factory, sock=sock)
    except BaseException:
        sock.close()
        raise


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _device(name: str) -> Device | None:
    if name == "cpu":
        return None
    from aiops.kernels import cupy_device

    return cupy_device.opened(name)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where something runs; by default a process of a real machine.

    Attributes
    ----------
    now
        Seconds of a monotonic clock, the one that the event loop's timers go by.
    token_bytes, below
        Entropy: so many random bytes; a random whole number from 0 up to one below the argument.
    applier
        Makes what runs a server's kernels: of its event loop, and of what is to be called when a
        kernel raises.
    spin
        Makes what looks for a message for a while before sleeping for it.
    parallel_map
        Has several threads do pieces of large work.
    shared
        Makes what has so many threads do that, the one that asks for it included.
    identity
        What to call a client that was given no name.
    listening, unconnected
        Make a socket, of an IP address: one that listens there, at a free port; and one to connect
        to it. The event loop reads and writes them.
    dialled
        Connects the event loop's protocols.
    known
        Returns the addresses of a host if nobody has to be asked for them; None: look it up.
    reached_at
        The IP address at which others reach what listens here; None: that of its connection.
    beside
        Listens beside a TCP address for this user's clients on the same machine; returns None where
        that cannot be. None itself where nobody is on the same machine.
    nearby
        Returns a socket connected to a server of this user that listens so; None without one.
    device
        Opens the device that a server's setting names; None: the host.
    """

    now: Callable[[], float] = time.monotonic
    token_bytes: Callable[[int], bytes] = secrets.token_bytes
    below: Callable[[int], int] = secrets.randbelow
    applier: Callable[
        [asyncio.AbstractEventLoop, Callable[[BaseException], None]], KernelRunner
    ] = UpdateThread
    spin: Callable[[], Spin] = Spin
    parallel_map: Together = HANDS.all
    shared: Callable[[int], Together] = lambda threads: hands_of(threads).all
    identity: Callable[[], str] = _identity
    listening: Callable[[str], socket.socket] = _listening
    unconnected: Callable[[str], socket.socket] = _unconnected
    dialled: Dial = _dialled
    known: Callable[[str], Addresses | None] = literal
    reached_at: str | None = None
    beside: Callable[[str, int], socket.socket | None] | None = unix_socket.listen
    nearby: Callable[[str, int], socket.socket | None] = unix_socket.reach
    device: Callable[[str], Device | None] = _device


_REAL = Environment()

SURROUNDINGS: ContextVar[Environment] = ContextVar("SURROUNDINGS", default=_REAL)
"""Those of the current context."""
