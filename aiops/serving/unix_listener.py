"""Listen for clients on this machine: Unix sockets beside a server's TCP addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable

from aiops.common import forks
from aiops.net.confinement import difference, peer_process

_log = logging.getLogger("aiops.server")

_PAUSE = 0.5  # seconds before the next connection is accepted, when there was no descriptor for one


class UnixListener:
    """Accepts the connections of clients on this machine: the same user's, confined as it is.

    Parameters
    ----------
    listen
        Makes a listening socket beside a TCP address, as `aiops.net.unix_socket.listen` does;
        returns None where the system cannot.
    accept
        Begins a connection, given its socket.
    """

    def __init__(
        self,
        listen: Callable[[str, int], socket.socket | None],
        accept: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._listen, self._accept = listen, accept
        self._listening: list[socket.socket] = []
        self._beginning: set[asyncio.Task[None]] = set()

    def begin(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Listen beside each of these TCP addresses; log once where the system cannot."""
        loop = asyncio.get_running_loop()
        for host, port in addresses:
            sock = self._listen(host, port)
            if sock is None:
                _log.info("no shared memory here: clients on this machine use TCP")
                return
            self._listening.append(sock)
            loop.add_reader(sock, self._welcome, sock)

    def _welcome(self, sock: socket.socket) -> None:
        try:
            connected, _address = sock.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it is gone again
            return
        except OSError:  # no descriptors are left: without a pause the loop would do nothing else
            loop = asyncio.get_running_loop()
            loop.remove_reader(sock)
            loop.call_later(_PAUSE, self._listen_again, sock)
            return
        why = difference(connected)
        if why:
            _log.info("process %d %s: it uses TCP", peer_process(connected), why)
            connected.close()
            return
        connected.setblocking(False)
        beginning = asyncio.get_running_loop().create_task(self._accept(connected))
        self._beginning.add(beginning)
        beginning.add_done_callback(self._beginning.discard)

    def _listen_again(self, sock: socket.socket) -> None:
        if sock in self._listening:
            asyncio.get_running_loop().add_reader(sock, self._welcome, sock)

    def end(self) -> None:
        """Listen no more."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock)
            sock.close()
        self._listening.clear()

    def forked(self) -> None:
        """Let go of it in a fork."""
        for sock in self._listening:
            forks.blank(sock.fileno())
