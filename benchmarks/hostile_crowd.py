"""The processes of the hostile benchmark: honest workers, and a crowd of connections that stall."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from multiprocessing.connection import Connection as Pipe

import numpy as np

from aiops.client import Worker
from aiops.common import urls
from aiops.model.parts import Part
from aiops.wire.connection import Connection
from aiops.wire.messages import PROTOCOL, Fetch, Hello, Push

_TENSORS = 4
_TICK = 0.05  # seconds between two looks at the crowd
_WINDOW = 4096  # bytes: the socket's room for what a reader does not read
_PATIENCE = 120.0
_SPARE_FILES = 64


def work(pipe: Pipe) -> None:
    """Be an honest worker."""
    url, size = pipe.recv()
    each = max(size // 4 // _TENSORS, 1)
    model = {f"w{number}": np.zeros(each, np.float32) for number in range(_TENSORS)}
    gradient = {name: np.full(each, 1e-6, np.float32) for name in model}
    with Worker(url, model, timeout=_PATIENCE) as worker:
        worker.step(gradient)
        pipe.send(None)
        with contextlib.suppress(EOFError):  # then it is over
            while True:
                seconds: float = pipe.recv()
                until, laps = time.perf_counter() + seconds, list[float]()
                while (begin := time.perf_counter()) < until:
                    worker.step(gradient)
                    laps.append(time.perf_counter() - begin)
                pipe.send(laps)


# ---------------------------------------------------------------- the crowd


class _Stalled:
    """A connection that asks for the parameters and does not read them, or sends a push slowly."""

    def __init__(self, address: tuple[str, int], size: int, *, writes: bool) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
        self._sock.settimeout(_PATIENCE)
        self._sock.connect(address)
        self.writes, wire = writes, Connection("client")
        who = os.urandom(8).hex(), 1, "stalled", "worker" if writes else "observer", False
        hello = wire.send(Hello(0, PROTOCOL, *who, os.urandom(16), "stalled"))
        self._sock.sendall(b"".join(hello))
        self._sock.recv(1)  # the welcome begins: a request before it would be out of order
        wire.state = "open"
        if writes:
            push = Push(1, 1, False, -1, (Part(0, size, "raw", size, 0),))
            self._sock.sendall(wire.send(push, [[memoryview(bytes(size))]])[0])
        else:
            self._sock.sendall(b"".join(wire.send(Fetch(1, -1))))
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._sock.fileno()

    def drip(self, nbytes: int) -> None:
        """Send a little, if it writes."""
        if self.writes:
            with contextlib.suppress(OSError):
                self._sock.send(bytes(nbytes))

    def close(self) -> None:
        """End it."""
        self._sock.close()


def stall(pipe: Pipe) -> None:
    """Be the crowd, until a message comes; answer with the number of those that came back."""
    url, size, readers, writers, rate, again = pipe.recv()
    _allow(readers + writers + _SPARE_FILES)
    address = urls.parse(url)
    kinds = [False] * readers + [True] * writers
    poll, crowd = select.poll(), dict[int, _Stalled]()

    def come(writes: bool) -> None:
        one = _Stalled(address, size, writes=writes)
        crowd[one.fileno()] = one
        poll.register(one, select.POLLRDHUP)

    for writes in kinds:
        come(writes)
    pipe.send(None)
    back, budget, last = 0, 0.0, time.monotonic()
    while not pipe.poll(_TICK):
        now = time.monotonic()
        budget = min(budget + again * (now - last), again)
        nbytes, last = int(rate * (now - last)), now
        for one in crowd.values():
            one.drip(nbytes)
        ended = [fd for fd, _event in poll.poll(0)]
        oldest = [fd for fd in crowd if fd not in ended]
        for fd in (*ended, *oldest):
            if budget < 1:
                break
            poll.unregister(fd)
            old = crowd.pop(fd)
            old.close()
            come(old.writes)
            back, budget = back + 1, budget - 1
    pipe.send(back)


def _allow(files: int) -> None:
    """Raise the limit of open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        most = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
