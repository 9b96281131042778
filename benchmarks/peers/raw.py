"""Plain blocking sockets: the limit that the loopback sets, not a peer to beat.

No framing, no checks, no copies: `send` from the array's own memory, `recv_into` the array at its
final place. The server has a thread per worker and a lock around the update.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, load_sgd

SETTINGS: Mapping[str, Setting] = {"sndbuf": 1 << 20, "rcvbuf": 0, "whole": False}
"""Socket buffers in bytes, 0 leaves the kernel's own tuning on; ``whole``: send under the lock."""
ENVIRONMENT: Mapping[str, str] = {}


def missing() -> str | None:
    """Never: the standard library has all it needs."""
    return None


def tune(sock: socket.socket, settings: Mapping[str, Setting]) -> None:
    """Apply the buffer sizes and switch Nagle's algorithm off."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, option in (("sndbuf", socket.SO_SNDBUF), ("rcvbuf", socket.SO_RCVBUF)):
        if size := int(settings[name]):
            sock.setsockopt(socket.SOL_SOCKET, option, size)


def receive(sock: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; False when the other side has closed the connection."""
    while len(target):
        count = sock.recv_into(target, 0, socket.MSG_WAITALL)
        if not count:
            return False
        target = target[count:]
    return True


class Server:
    """A listening socket, and a thread per worker that joins."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._theta: Array = np.zeros(job.elements, np.float32)
        self._sgd = load_sgd()
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        tune(self._listener, job.settings)  # before accept: buffer sizes are inherited

    def start(self) -> str:
        """Accept in a thread; the address is the port."""
        threading.Thread(target=self._accept, daemon=True).start()
        return str(self._listener.getsockname()[1])

    def _accept(self) -> None:
        for _ in range(self._job.workers):
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        g = np.empty(self._job.elements, np.float32)
        into, out = g.data.cast("B"), self._theta.data.cast("B")
        whole = bool(self._job.settings["whole"])
        with sock:
            while receive(sock, into):
                with self._lock:
                    self._sgd(self._theta, g)
                    if whole:
                        sock.sendall(out)
                if not whole:
                    sock.sendall(out)

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Stop listening; the threads end when the workers close."""
        self._listener.close()


class Worker:
    """One connection."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        self.params: Array = np.zeros(job.elements, np.float32)
        self._into = self.params.data.cast("B")
        self._out = gradient(job.elements).data.cast("B")
        self._sock = socket.socket()
        tune(self._sock, job.settings)
        self._sock.connect((HOST, int(address)))

    def cycle(self) -> None:
        """Send the gradient whole, then receive the parameters whole."""
        self._sock.sendall(self._out)
        if not receive(self._sock, self._into):
            raise ConnectionError("the raw server closed the connection in mid-cycle")

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
