"""The connecting of a blocking client's sockets, with a deadline, from wherever it may be ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from aiops.client.backoff import ATTEMPT, LONGEST_WELCOME, overdue, reason
from aiops.client.shard_channel import ShardChannel
from aiops.common import forks
from aiops.common.urls import ServerAddress
from aiops.errors import ConnectionLost, Untrusted
from aiops.net.dns import addresses_waited_for
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.socket_options import tune
from aiops.net.tls import TlsClient, TlsTarget, explained
from aiops.net.tls_socket import StreamSocket, TlsSocket
from aiops.net.unix_socket import UnixSide, welcomed


class Dialler:
    """Connects to a server and to the other shards of its model.

    One thread uses it at a time, except for `interrupt`. Deadlines (``until``) are times of
    `time.monotonic`. Each address of a host is given at most `ATTEMPT` seconds.

    Parameters
    ----------
    url
        The URL of the server or servers, for error texts.
    left
        Returns the seconds that are left until a deadline, or raises `DeadlineExceeded`.
    tls
        Connects to servers by TLS; None: they speak plain TCP.
    near
        Whether servers on this machine are reached by their Unix sockets.

    Attributes
    ----------
    socket
        The socket that is being connected, or None.
    interrupted
        Whether no connection is to be made any more.
    """

    interrupted: bool

    def __init__(
        self,
        url: str,
        left: Callable[[float], float],
        tls: TlsClient | None = None,
        *,
        near: bool = True,
    ) -> None:
        self._url, self._left, self._tls, self._near = url, left, tls, near
        self._env = CURRENT_ENVIRONMENT.get()
        self.socket: socket.socket | None = None
        self.interrupted = self._forked = False
        self._woken = threading.Event()  # when it is interrupted

    # ------------------------------------------------------------ connecting

    def present_address(self, server: ServerAddress) -> tuple[str, int]:
        """Return the host and the port at which a server is now."""
        return self._env.present_address(server.host, server.port)

    def connect_to_server(
        self, server: ServerAddress, until: float, patience: float
    ) -> tuple[StreamSocket, UnixSide | None]:
        """Return a socket that is connected to a server; on this machine, with its side channel.

        ``patience``: seconds that a server on this machine may take to accept the connection, and
        another one for the handshake of TLS.

        Raises
        ------
        ConnectionLost, OSError, DeadlineExceeded
            When the server cannot be reached.
        """
        host, port = self.present_address(server)
        target = None if self._tls is None else self._tls.target(server.host)
        return self._connect(host, port, server.url, until, patience, target)

    def connect_to_shard(
        self, channel: ShardChannel, until: float
    ) -> tuple[StreamSocket, UnixSide | None]:
        """Connect to another shard of the model; returns and raises as `connect_to_server`."""
        try:
            target = None if self._tls is None else self._tls.target(channel.host)
            where = channel.host, channel.port, channel.server
            found = self._connect(*where, until, LONGEST_WELCOME if target else ATTEMPT, target)
        except Untrusted:
            raise
        except OSError as error:
            raise ConnectionLost(f"{channel.server} cannot be reached: {reason(error)}") from error
        found[0].settimeout(None)
        return found

    def _connect(
        self,
        host: str,
        port: int,
        name: str,
        until: float,
        patience: float,
        target: TlsTarget | None,
    ) -> tuple[StreamSocket, UnixSide | None]:
        hosts = self._addresses(host, until)
        for address in hosts if self._near else ():
            near = self._env.connect_unix(address, port)
            if near is None:
                continue
            side = self._welcomed(near, name, patience, until)
            if side is not None:
                return near, side
            near.close()  # it does not share memory with this process
        sock = self._connect_to_any(hosts, port, until)
        tune(sock)
        if target is None:
            return sock, None
        return self._secured(sock, target, name, min(until, time.monotonic() + patience)), None

    def _secured(
        self, sock: socket.socket, target: TlsTarget, name: str, until: float
    ) -> TlsSocket:
        """Go through the handshake of TLS."""
        secured, self.socket = TlsSocket(sock, target, name), sock
        try:
            self.check()
            secured.handshake(lambda: max(0.001, until - time.monotonic()))
            return secured
        except BaseException as error:
            sock.close()
            self.check()
            if isinstance(error, TimeoutError):
                raise overdue(name, "its part of the TLS handshake", "in time") from None
            if isinstance(error, OSError):
                raise explained(name, error) from None
            raise
        finally:
            self.socket = None

    def _addresses(self, host: str, until: float) -> Sequence[str]:
        known = self._env.known_addresses(host)
        return known or addresses_waited_for(host, min(self._left(until), ATTEMPT), self.check)

    def _welcomed(
        self, near: socket.socket, name: str, patience: float, until: float
    ) -> UnixSide | None:
        self.socket = near
        try:
            self.check()
            near.settimeout(min(patience, self._left(until)))
            return welcomed(near)
        except TimeoutError:
            near.close()
            raise overdue(name, "its welcome", "in time") from None
        except BaseException:
            near.close()
            raise
        finally:
            self.socket = None

    def _connect_to_any(self, hosts: Sequence[str], port: int, until: float) -> socket.socket:
        """Return a socket that is connected to the first of these addresses that answers."""
        for others in range(len(hosts) - 1, 0, -1):
            # A silent address leaves the others their share of the time.
            with contextlib.suppress(OSError):
                return self._dial(hosts[-1 - others], port, self._left(until) / (1 + others))
        return self._dial(hosts[-1], port, self._left(until))

    def _dial(self, host: str, port: int, seconds: float) -> socket.socket:
        self.socket = sock = self._env.unconnected_socket(host)
        try:
            self.check()  # it may have come too early to find this socket
            sock.settimeout(min(seconds, ATTEMPT))
            sock.connect((host, port))
            self.check()
        except BaseException:
            sock.close()
            self.check()
            raise
        finally:
            self.socket = None
        return sock

    # ------------------------------------------------------------ ending

    def wait(self, seconds: float) -> None:
        """Wait before connecting again, unless this is interrupted."""
        self._woken.wait(seconds)

    def check(self) -> None:
        """Raise `ConnectionLost` after `interrupt`, and `UsageError` in a fork."""
        if self._forked:
            raise forks.inherited("client")
        if self.interrupted:
            raise ConnectionLost(f"{self._url}: this client was interrupted")

    def interrupt(self) -> None:
        """Make no more connections; end the attempt that another thread waits in."""
        self.interrupted = True
        self._woken.set()
        shut_down(self.socket)

    def forked(self) -> None:
        """Make no more connections in a fork, and close this process's descriptor."""
        self._forked = True
        if self.socket is not None:
            self.socket.close()


def shut_down(sock: StreamSocket | None) -> None:
    """End both directions of a socket, if there is one: a thread that waits for it goes on."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
