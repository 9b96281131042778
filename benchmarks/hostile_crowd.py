"""The processes of the hostile benchmark: honest workers, and a crowd of connections that stall."""

from __future__ import annotations

import contextlib
import os
import resource
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
        sent = wire.send(Hello(0, PROTOCOL, *who, os.urandom(16), "stalled"))
        wire.state = "open"  # it does not wait for the welcome
        if writes:
            push = Push(1, 1, False, -1, (Part(0, size, "raw", size, 0),))
            sent.append(wire.send(push, [[memoryview(bytes(size))]])[0])
        else:
            sent += wire.send(Fetch(1, -1))
        self._sock.sendall(b"".join(sent))
        self._sock.setblocking(False)

    def drip(self, nbytes: int) -> bool:
        """Send a little, if it writes; return whether the server has ended it."""
        try:
            if self.writes:
                self._sock.recv(1 << 16)  # its welcome, or the end
                self._sock.send(bytes(nbytes))
                return False
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            if not self.writes:
                return False
        except OSError:
            return True
        try:
            self._sock.send(bytes(nbytes))
        except BlockingIOError:
            pass
        except OSError:
            return True
        return False

    def close(self) -> None:
        """End it."""
        self._sock.close()


def stall(pipe: Pipe) -> None:
    """Be the crowd, until a message comes; answer with the number of those that came back."""
    url, size, readers, writers, rate, again = pipe.recv()
    _allow(readers + writers + _SPARE_FILES)
    address = urls.parse(url)
    kinds = [False] * readers + [True] * writers
    all_of_them = [_Stalled(address, size, writes=writes) for writes in kinds]
    pipe.send(None)
    back, budget, last = 0, 0.0, time.monotonic()
    while not pipe.poll(_TICK):
        now = time.monotonic()
        budget = min(budget + again * (now - last), again)
        nbytes, last = int(rate * (now - last)), now
        for place, one in enumerate(all_of_them):
            if one.drip(nbytes) and budget >= 1:
                one.close()
                all_of_them[place] = _Stalled(address, size, writes=one.writes)
                back, budget = back + 1, budget - 1
    pipe.send(back)


def _allow(files: int) -> None:
    """Raise the limit of open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        most = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
