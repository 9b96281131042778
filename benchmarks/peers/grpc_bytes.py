"""gRPC with raw bytes: generic handlers, no protobuf, no limits on the size of a message.

A worker holds one bidirectional stream for all its cycles, which beats a call per cycle; large
arrays travel as messages of ``chunk`` bytes. gRPC for Python sends and receives `bytes`, so each
side copies once into the message, and the worker once more out of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
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
    "chunk": 4 << 20,
    "max_frame_size": (1 << 24) - 1,
    "lookahead_bytes": 64 << 20,
    "write_buffer_size": 64 << 20,
    "whole": False,
}
"""Sizes in bytes; the middle three are HTTP/2's. ``whole``: copy the reply under the lock."""
ENVIRONMENT: Mapping[str, str] = KEEP_MEMORY

_SERVICE, _METHOD = "aiops.benchmark.Exchange", "cycles"


def missing() -> str | None:
    """Say so when grpcio is not installed."""
    return lacks("grpc", "pip install grpcio")


def _options(settings: Mapping[str, Setting]) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.http2.max_frame_size", int(settings["max_frame_size"])),
        ("grpc.http2.lookahead_bytes", int(settings["lookahead_bytes"])),
        ("grpc.http2.write_buffer_size", int(settings["write_buffer_size"])),
    ]


class Server:
    """A gRPC server with a thread per worker."""

    def __init__(self, job: Job) -> None:
        import grpc

        self._theta: Array = np.zeros(job.elements, np.float32)
        self._parts = pieces(self._theta, int(job.settings["chunk"]))
        self._whole = bool(job.settings["whole"])
        self._sgd = load_sgd()
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(job.workers), options=_options(job.settings))
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})]
        )

    def start(self) -> str:
        """Serve on a free port, in gRPC's own threads."""
        port = self._server.add_insecure_port(f"{HOST}:0")
        self._server.start()
        return f"{HOST}:{port}"

    def _serve(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        while pushed := list(islice(messages, len(self._parts))):
            with self._lock:
                for part, g in zip(self._parts, pushed, strict=True):
                    self._sgd(part, np.frombuffer(g, np.float32))
                reply = [part.tobytes() for part in self._parts] if self._whole else []
            del g
            pushed.clear()  # their memory serves the next gradient
            yield from reply or (part.tobytes() for part in self._parts)

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Stop at once."""
        self._server.stop(grace=None).wait(5)


class Worker:
    """One channel with one stream on it."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import grpc

        chunk = int(job.settings["chunk"])
        self.params: Array = np.zeros(job.elements, np.float32)
        self._into = pieces(self.params, chunk)
        self._out = pieces(gradient(job.elements), chunk)
        self._channel = grpc.insecure_channel(address, options=_options(job.settings))
        self._pushes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        open_stream = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        self._replies = open_stream(iter(self._pushes.get, b""))

    def cycle(self) -> None:
        """Make bytes of the gradient (it is new each time), push them, and copy the reply."""
        for part in self._out:
            self._pushes.put(part.tobytes())
        for part in self._into:
            np.copyto(part, np.frombuffer(next(self._replies), np.float32))

    def close(self) -> None:
        """End the stream and close the channel."""
        self._pushes.put(b"")
        self._channel.close()
