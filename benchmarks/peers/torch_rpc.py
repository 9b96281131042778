"""torch.distributed.rpc over TensorPipe: one call per cycle, which takes and returns the tensors.

TensorPipe sends a tensor from its own memory and receives it into a new one, of which the worker
copies the parameters into its array. Between processes of one machine it would choose shared
memory; here it is held to TCP. The call makes the update, in a thread of the server's pool.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.base import (
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
    "transport": "uv",
    "lanes_from": 8 << 20,
    "threads": 4,
    "chunk": 4 << 20,
    "whole": False,
}
"""``transport``: TensorPipe's. ``lanes_from``: bytes of a gradient from which it goes over several
connections (TensorPipe's channel mpt_uv), and not over one (basic). ``threads``: how many take
calls at the server. ``chunk``: bytes of one tensor. ``whole``: copy the parameters under the lock.

Tried on two busy cores: several connections are a fifth slower until 1 MiB, and a fifth quicker
from 16 MiB on; tensors of 4 MiB or 1 MiB are a fifth quicker than a single one of 64 MiB; 1, 4 or
16 threads, and glibc's memory left as it is, make no difference that shows."""
ENVIRONMENT: Mapping[str, str] = {
    **KEEP_MEMORY,
    "TP_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}

_NAME = "server"
_QUIET = 6 * 3600.0
"""Seconds after which a call would be given up; the benchmark has deadlines of its own."""


def missing() -> str | None:
    """Say so when PyTorch is not installed, or has no RPC."""
    if why := lacks("torch", "pip install torch"):
        return why
    from torch.distributed import rpc

    return None if rpc.is_available() else "this PyTorch was built without torch.distributed.rpc"


def _meet(job: Job, name: str, rank: int, file: str) -> Any:
    """Wait for all ranks, which meet in a file; return the module rpc."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=int(job.settings["threads"]),
        rpc_timeout=_QUIET,
        init_method=f"file://{file}",
        _transports=[str(job.settings["transport"])],
        _channels=["mpt_uv" if job.nbytes >= int(job.settings["lanes_from"]) else "basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=job.workers + 1, rpc_backend_options=options)
    return rpc


def _tensors(array: Array, job: Job) -> list[Any]:
    import torch

    return [torch.from_numpy(part) for part in pieces(array, int(job.settings["chunk"]))]


class Server:
    """Rank 0, whose threads take the calls."""

    serving: Server
    """The one of this process: a call names a function, and brings no more than tensors."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._theta: Array = np.zeros(job.elements, np.float32)
        self._parts = pieces(self._theta, int(job.settings["chunk"]))
        self._tensors = _tensors(self._theta, job)
        self._whole = bool(job.settings["whole"])
        self._sgd = load_sgd()
        self._lock = threading.Lock()
        Server.serving = self

    def start(self) -> str:
        """Meet the workers in a thread; the address is the file to meet in."""
        file = str(Path(tempfile.mkdtemp()) / "ranks")
        threading.Thread(target=_meet, args=(self._job, _NAME, 0, file), daemon=True).start()
        return file

    def exchange(self, pushed: list[Any]) -> list[Any]:
        """Update, and return the parameters."""
        with self._lock:
            for part, g in zip(self._parts, pushed, strict=True):
                self._sgd(part, g.numpy())
            if self._whole:
                return [tensor.clone() for tensor in self._tensors]
        return self._tensors

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Leave RPC to the end of the process: to shut it down is to wait for all processes."""


def exchange(pushed: list[Any]) -> list[Any]:
    """Be called by a worker, in the server's process."""
    return Server.serving.exchange(pushed)


class Worker:
    """Another rank."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        self.params: Array = np.zeros(job.elements, np.float32)
        self._into = _tensors(self.params, job)
        self._out = _tensors(gradient(job.elements), job)
        self._call = _meet(job, f"worker{index}", index + 1, address).rpc_sync

    def cycle(self) -> None:
        """Call the server, and copy what it returns."""
        for tensor, new in zip(self._into, self._call(_NAME, exchange, (self._out,)), strict=True):
            tensor.copy_(new)

    def close(self) -> None:
        """Leave RPC to the end of the process, like the server."""
