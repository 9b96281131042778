"""torch.distributed over gloo: ``send`` and ``recv`` between one server rank and N worker ranks.

The server has a thread per worker, each with a process group of its own (``serve="threads"``), or
one thread that takes gradients from any source (``serve="any"``). Tensors share the memory of the
arrays, so nothing is copied. Versions may mix, as for the raw sockets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd

SETTINGS: Mapping[str, Setting] = {"serve": "threads"}

_QUIET = timedelta(hours=6)
"""Gloo's time-out: the server waits in ``recv`` while the other peers have their turn."""


def missing() -> str | None:
    """Say so when PyTorch is not installed."""
    return lacks("torch", "pip install torch")


def _join(job: Job, store: Any, rank: int) -> list[Any]:
    """Enter the group of all; return one pair group per worker (or none, to use that of all)."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.workers + 1, timeout=_QUIET
    )
    if job.settings["serve"] == "any":
        return [None] * job.workers
    # Every rank makes every group, in the same order: that is what new_group asks for.
    return [dist.new_group([0, i + 1], timeout=_QUIET) for i in range(job.workers)]


class Server:
    """Rank 0, and the store that the ranks meet in."""

    def __init__(self, job: Job) -> None:
        import torch.distributed as dist

        self._job = job
        self._theta: Array = np.zeros(job.elements, np.float32)
        self._sgd = load_sgd()
        self._lock = threading.Lock()
        self._store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)

    def start(self) -> str:
        """Meet the workers in a thread; the address is the store's port."""
        threading.Thread(target=self._serve, daemon=True).start()
        return str(self._store.port)

    def _serve(self) -> None:
        groups = _join(self._job, self._store, 0)
        if self._job.settings["serve"] == "any":
            self._serve_any()
            return
        for i, group in enumerate(groups):
            threading.Thread(target=self._serve_one, args=(i + 1, group), daemon=True).start()

    def _serve_any(self) -> None:
        import torch
        import torch.distributed as dist

        theta, g = torch.from_numpy(self._theta), torch.empty(self._job.elements)
        while True:
            source = dist.recv(g)
            self._sgd(self._theta, g.numpy())
            dist.send(theta, source)

    def _serve_one(self, rank: int, group: Any) -> None:
        import torch
        import torch.distributed as dist

        theta, g = torch.from_numpy(self._theta), torch.empty(self._job.elements)
        received = g.numpy()
        while True:
            dist.recv(g, rank, group)
            with self._lock:
                self._sgd(self._theta, received)
            dist.send(theta, rank, group)

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Leave the groups to the end of the process: their threads are blocked in them."""


class Worker:
    """One worker rank."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.params: Array = np.zeros(job.elements, np.float32)
        self._into = torch.from_numpy(self.params)
        self._out = torch.from_numpy(gradient(job.elements))
        self._send, self._recv = dist.send, dist.recv
        store = dist.TCPStore(HOST, int(address), None, False)
        self._group = _join(job, store, index + 1)[index]

    def cycle(self) -> None:
        """Send the gradient to rank 0 and receive the parameters into place."""
        self._send(self._out, 0, self._group)
        self._recv(self._into, 0, self._group)

    def close(self) -> None:
        """Leave the group to the end of the process: the server's threads are waiting in it."""
