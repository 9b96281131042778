"""ZeroMQ through pyzmq: DEALER workers, a ROUTER server.

Messages of ``copy_below`` bytes and more are sent from the array's own memory (``copy=False``) and
the server reads the gradient where ZeroMQ received it; smaller ones are copied, which is quicker
than the bookkeeping of a shared buffer. The worker takes the parameters with ``recv_into`` its own
array. The server updates in place while ZeroMQ may still be sending: mixed versions are allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd

SETTINGS: Mapping[str, Setting] = {
    "copy_below": 64 << 10,
    "io_threads": 1,
    "sndbuf": 1 << 20,
    "rcvbuf": 0,
}
"""``copy_below`` and the socket buffers are bytes; a buffer of 0 is left to the kernel."""


def missing() -> str | None:
    """Say so when pyzmq is not installed."""
    return lacks("zmq", "pip install pyzmq")


def _open(kind: int, settings: Mapping[str, Setting]) -> Any:
    import zmq

    socket = zmq.Context(io_threads=int(settings["io_threads"])).socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    for name, option in (("sndbuf", zmq.SNDBUF), ("rcvbuf", zmq.RCVBUF)):
        if size := int(settings[name]):
            socket.set(option, size)
    return socket


class Server:
    """One ROUTER socket, one thread that takes gradients in turn."""

    def __init__(self, job: Job) -> None:
        import zmq

        self._job = job
        self._theta: Array = np.zeros(job.elements, np.float32)
        self._sgd = load_sgd()
        self._socket = _open(zmq.ROUTER, job.settings)

    def start(self) -> str:
        """Bind to a free port and serve in a thread."""
        port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        threading.Thread(target=self._serve, daemon=True).start()
        return f"tcp://{HOST}:{port}"

    def _serve(self) -> None:
        import zmq

        socket, theta, sgd = self._socket, self._theta, self._sgd
        copy = self._job.nbytes < int(self._job.settings["copy_below"])
        while True:
            worker = socket.recv()
            frame = socket.recv(copy=copy)
            sgd(theta, np.frombuffer(frame if copy else frame.buffer, np.float32))
            del frame  # its memory may serve the next gradient
            socket.send(worker, zmq.SNDMORE)
            socket.send(theta, copy=copy)

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Leave the socket to the end of the process: its thread is blocked in it."""


class Worker:
    """One DEALER socket."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import zmq

        self.params: Array = np.zeros(job.elements, np.float32)
        self._gradient = gradient(job.elements)
        self._copy = job.nbytes < int(job.settings["copy_below"])
        self._socket = _open(zmq.DEALER, job.settings)
        self._socket.connect(address)

    def cycle(self) -> None:
        """Send the gradient as one frame, receive the parameters into place."""
        self._socket.send(self._gradient, copy=self._copy)
        self._socket.recv_into(self.params)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
