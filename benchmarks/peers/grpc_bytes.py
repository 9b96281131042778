"""gRPC with raw bytes: generic handlers, no protobuf, no limits on the size of a message.

gRPC for Python sends and receives `bytes`, so each side copies once into the message and the
worker once more out of it. ``style`` chooses between one call per cycle (``unary``) and one stream
for all cycles (``stream``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd

SETTINGS: Mapping[str, Setting] = {
    "style": "unary",
    "max_frame_size": (1 << 24) - 1,
    "lookahead_bytes": 64 << 20,
    "write_buffer_size": 64 << 20,
    "tcp_read_chunk_size": 0,
    "bdp_probe": True,
    "minimal_stack": False,
}
"""HTTP/2 and TCP settings, in bytes (0 leaves gRPC's own)."""

_SERVICE, _METHOD = "aiops.benchmark.Exchange", "cycle"
_PATH = f"/{_SERVICE}/{_METHOD}"


def missing() -> str | None:
    """Say so when grpcio is not installed."""
    return lacks("grpc", "pip install grpcio")


def _options(settings: Mapping[str, Setting]) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.http2.bdp_probe", int(settings["bdp_probe"])),
        ("grpc.minimal_stack", int(settings["minimal_stack"])),
    ]
    for name in ("max_frame_size", "lookahead_bytes", "write_buffer_size"):
        if value := int(settings[name]):
            options.append((f"grpc.http2.{name}", value))
    if chunk := int(settings["tcp_read_chunk_size"]):
        for prefix in ("tcp_read", "tcp_min_read", "tcp_max_read"):
            options.append((f"grpc.experimental.{prefix}_chunk_size", chunk))
    return options


class Server:
    """A gRPC server with a thread per worker."""

    def __init__(self, job: Job) -> None:
        import grpc

        self._theta: Array = np.zeros(job.elements, np.float32)
        self._sgd = load_sgd()
        self._lock = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(job.workers), options=_options(job.settings)
        )
        if job.settings["style"] == "stream":
            handler = grpc.stream_stream_rpc_method_handler(self._stream)
        else:
            handler = grpc.unary_unary_rpc_method_handler(self._unary)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})]
        )

    def start(self) -> str:
        """Serve on a free port, in gRPC's own threads."""
        port = self._server.add_insecure_port(f"{HOST}:0")
        self._server.start()
        return f"{HOST}:{port}"

    def _unary(self, pushed: bytes, context: Any) -> bytes:
        with self._lock:
            self._sgd(self._theta, np.frombuffer(pushed, np.float32))
        return self._theta.tobytes()

    def _stream(self, pushes: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for pushed in pushes:
            yield self._unary(pushed, context)

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Stop at once."""
        self._server.stop(grace=None).wait(5)


class Worker:
    """One channel."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import grpc

        self.params: Array = np.zeros(job.elements, np.float32)
        self._gradient = gradient(job.elements)
        self._channel = grpc.insecure_channel(address, options=_options(job.settings))
        if job.settings["style"] == "stream":
            self._pushes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            self._replies = self._channel.stream_stream(_PATH)(iter(self._pushes.get, b""))
            self._call = self._stream
        else:
            self._call = self._channel.unary_unary(_PATH)

    def _stream(self, message: bytes) -> Any:
        self._pushes.put(message)
        return next(self._replies)

    def cycle(self) -> None:
        """Push as bytes (a gradient is new each time, so they are made each time), copy the reply."""
        reply = self._call(self._gradient.tobytes())
        np.copyto(self.params, np.frombuffer(reply, np.float32))

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
