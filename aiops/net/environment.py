"""The environment of a server or a client: clock, entropy, threads, sockets, names.

Servers and clients take all of these from an `Environment`, by default that of the real machine. To
run them elsewhere, such as in virtual time (`aiops.testing`), set `CURRENT_ENVIRONMENT` in a
context: all servers and clients made in that context use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from aiops.common import urls
from aiops.kernels.device import Device
from aiops.net import moved_servers, unix_socket
from aiops.net.busy_poll import Spin
from aiops.net.disk import Disk, SystemDisk
from aiops.net.dns import Addresses, literal
from aiops.net.socket_options import unpace
from aiops.net.thread_pool import DEFAULT_POOL, pool_of
from aiops.net.tls import TlsTarget, ended_early, explained
from aiops.net.update_thread import KernelRunner, UpdateThread

P = TypeVar("P", bound=asyncio.BaseProtocol)

ParallelMap: TypeAlias = Callable[[Sequence[Callable[[], Any]]], None]

_WAITING = 64  # connections that may wait to be accepted


_ANCHOR = time.time_ns() - time.perf_counter_ns()


def _trace_clock() -> int:
    return _ANCHOR + time.perf_counter_ns()


def _identity() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _listening_socket(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=_family(host), backlog=_WAITING)


def _free_port(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return True
    return False


def _unconnected_socket(host: str) -> socket.socket:
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    unpace(sock, host)
    return sock


class Dial(Protocol):
    """Connects a protocol of the running event loop to an IP address and a port."""

    async def __call__(
        self, factory: Callable[[], P], host: str, port: int, tls: TlsTarget | None = None
    ) -> tuple[asyncio.Transport, P]:
        """Return the transport and the protocol; raise `OSError` if none answers.

        ``tls``: the server that it must be, by TLS; None: plain TCP.
        """
        ...


async def _dial(
    factory: Callable[[], P], host: str, port: int, tls: TlsTarget | None = None
) -> tuple[asyncio.Transport, P]:
    loop = asyncio.get_running_loop()
    sock = _unconnected_socket(host)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, port))
        if tls is None:
            return await loop.create_connection(factory, sock=sock)
    except BaseException:
        sock.close()
        raise
    try:
        return await loop.create_connection(
            factory, sock=sock, ssl=tls.context, server_hostname=tls.host
        )
    except (ssl.SSLError, ConnectionError) as error:
        peer = urls.address(tls.host, port)
        if isinstance(error, ssl.SSLEOFError | ConnectionError):
            raise ended_early(peer) from None
        raise explained(peer, error) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _device(name: str) -> Device | None:
    if name == "cpu":
        return None
    from aiops.kernels import cupy_device

    return cupy_device.opened(name)


@dataclass(frozen=True, slots=True)
class Environment:
    """The functions of a machine; by default those of a real process on a real machine.

    Attributes
    ----------
    now
        Seconds of a monotonic clock, the same as that of the event loop's timers.
    wall_clock
        Seconds since 1970, for people.
    trace_clock
        Nanoseconds since 1970 for traces, by a clock that is never set: spans are as long as what
        they are of. None: nothing is traced here.
    token_bytes, randbelow
        Entropy: the given number of random bytes; a random integer from 0 to below the argument.
    kernel_runner
        Makes the runner of a server's kernels, given its event loop and the function to call when a
        kernel raises.
    spin
        Makes the decision to poll for a message before sleeping until it comes.
    parallel_map
        Shares the pieces of large work among threads.
    parallel_map_of
        Makes a ``parallel_map`` of a number of threads, the caller's included.
    identity
        Names a client that was given no name.
    listening_socket, unconnected_socket
        Make a socket, given an IP address: one that listens there at a free port; and one to
        connect to it. The event loop reads and writes them.
    free_port
        Returns whether a listener may take a port of an IP address.
    dial
        Connects the event loop's protocols.
    present_address
        Returns the address (host, port) of a server that is known by another, if it has moved.
    known_addresses
        Returns the addresses of a host if they are known without a lookup; None: look it up.
    advertised_address
        The IP address at which other machines reach a listener here; None: that of its connection.
    listen_unix
        Listens beside a TCP address for this user's clients on the same machine; returns None where
        the system cannot. None itself where no client is on the same machine.
    connect_unix
        Returns a socket connected to such a listener of this user; None without one.
    disk
        The file system that a server's state is kept in.
    device
        Opens the device that a server's setting names; None: the host.
    """

    now: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    trace_clock: Callable[[], int] | None = _trace_clock
    token_bytes: Callable[[int], bytes] = secrets.token_bytes
    randbelow: Callable[[int], int] = secrets.randbelow
    kernel_runner: Callable[
        [asyncio.AbstractEventLoop, Callable[[BaseException], None]], KernelRunner
    ] = UpdateThread
    spin: Callable[[], Spin] = Spin
    parallel_map: ParallelMap = DEFAULT_POOL.all
    parallel_map_of: Callable[[int], ParallelMap] = lambda threads: pool_of(threads).all
    identity: Callable[[], str] = _identity
    listening_socket: Callable[[str], socket.socket] = _listening_socket
    unconnected_socket: Callable[[str], socket.socket] = _unconnected_socket
    free_port: Callable[[str, int], bool] = _free_port
    dial: Dial = _dial
    present_address: Callable[[str, int], tuple[str, int]] = moved_servers.present_address
    known_addresses: Callable[[str], Addresses | None] = literal
    advertised_address: str | None = None
    listen_unix: Callable[[str, int], socket.socket | None] | None = unix_socket.listen
    connect_unix: Callable[[str, int], socket.socket | None] = unix_socket.reach
    disk: Disk = field(default_factory=SystemDisk)
    device: Callable[[str], Device | None] = _device


_REAL = Environment()

CURRENT_ENVIRONMENT: ContextVar[Environment] = ContextVar("CURRENT_ENVIRONMENT", default=_REAL)
"""The environment of the current context."""
