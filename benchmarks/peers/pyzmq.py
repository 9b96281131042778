"""ZeroMQ through pyzmq: DEALER workers, a ROUTER server.

Messages of ``copy_below`` bytes and more are sent from the array's own memory (``copy=False``) and
the server reads the gradient where ZeroMQ received it; smaller ones are copied, which is quicker
than the bookkeeping of a shared buffer. Large arrays travel as messages of ``chunk`` bytes. The
worker takes the parameters with ``recv_into`` its own array.
"""

from __future__ import annotations

import importlib
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.base import (
    HOST,
    KEEP_MEMORY,
    Array,
    Job,
    Setting,
    gradient,
    lacks,
    load_sgd,
    pieces,
)

SETTINGS: Mapping[str, Setting] = {
    "copy_below": 64 << 10,
    "chunk": 4 << 20,
    "io_threads": 1,
    "sndbuf": 1 << 20,
    "rcvbuf": 0,
    "whole": False,
}
"""Sizes in bytes; a socket buffer of 0 is left to the kernel. ``whole``: always send copies."""
ENVIRONMENT: Mapping[str, str] = KEEP_MEMORY


def missing() -> str | None:
    """Say so when pyzmq is not installed."""
    return lacks("zmq", "pip install pyzmq")


def _open(kind: str, settings: Mapping[str, Setting]) -> Any:
    zmq: Any = importlib.import_module("zmq")
    socket = zmq.Context(io_threads=int(settings["io_threads"])).socket(getattr(zmq, kind))
    socket.set_hwm(0)
    socket.linger = 0
    for name, option in (("sndbuf", zmq.SNDBUF), ("rcvbuf", zmq.RCVBUF)):
        if size := int(settings[name]):
            socket.set(option, size)
    return socket


class Server:
    """One ROUTER socket, one thread that takes gradients in turn."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._theta: Array = np.zeros(job.elements, np.float32)
        self._sgd = load_sgd()
        self._socket = _open("ROUTER", job.settings)

    def start(self) -> str:
        """Bind to a free port and serve in a thread."""
        port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        threading.Thread(target=self._serve, daemon=True).start()
        return f"tcp://{HOST}:{port}"

    def _serve(self) -> None:
        more = importlib.import_module("zmq").SNDMORE
        socket, sgd, settings = self._socket, self._sgd, self._job.settings
        parts = pieces(self._theta, int(settings["chunk"]))
        small = self._job.nbytes < int(settings["copy_below"])
        send_copy = small or bool(settings["whole"])
        arrived: defaultdict[bytes, list[Array]] = defaultdict(list)
        while True:
            worker = socket.recv()
            frame = socket.recv(copy=small)
            pushed = arrived[worker]
            pushed.append(np.frombuffer(frame if small else frame.buffer, np.float32))
            if len(pushed) < len(parts):
                continue
            for part, g in zip(parts, pushed, strict=True):
                sgd(part, g)
            del frame, g
            pushed.clear()  # their memory serves the next gradient
            for part in parts:
                socket.send(worker, more)
                socket.send(part, copy=send_copy)

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Leave the socket to the end of the process: its thread is blocked in it."""


class Worker:
    """One DEALER socket."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        chunk = int(job.settings["chunk"])
        self.params: Array = np.zeros(job.elements, np.float32)
        self._into = pieces(self.params, chunk)
        self._out = pieces(gradient(job.elements), chunk)
        self._copy = job.nbytes < int(job.settings["copy_below"])
        self._socket = _open("DEALER", job.settings)
        self._socket.connect(address)

    def cycle(self) -> None:
        """Send the gradient's frames, receive those of the parameters into place."""
        for part in self._out:
            self._socket.send(part, copy=self._copy)
        for part in self._into:
            self._socket.recv_into(part)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
