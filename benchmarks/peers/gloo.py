"""torch.distributed over gloo: point-to-point messages between a server rank and N worker ranks.

The server has a thread per worker, each with a process group of its own. Tensors share the memory
of the arrays, so nothing is copied. Receives are posted before the other side can send, and large
arrays travel as several messages at once: both quicker than one `send` and one `recv` after it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd, pieces

SETTINGS: Mapping[str, Setting] = {"chunk": 4 << 20, "whole": False}
"""``chunk``: bytes of one message. ``whole``: send under the lock."""
ENVIRONMENT: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}

_QUIET = timedelta(hours=6)
"""Gloo's time-out: the server waits for a gradient while the other peers have their turn."""


def missing() -> str | None:
    """Say so when PyTorch is not installed."""
    return lacks("torch", "pip install torch")


class _Line:
    """Messages to and from the other rank of a group of two."""

    def __init__(self, other: int, group: Any) -> None:
        import torch.distributed as dist

        self._isend, self._irecv = dist.isend, dist.irecv
        self._other, self._group = other, group

    def receive(self, tensors: list[Any]) -> list[Any]:
        return [self._irecv(tensor, self._other, self._group) for tensor in tensors]

    def send(self, tensors: list[Any]) -> list[Any]:
        return [self._isend(tensor, self._other, self._group) for tensor in tensors]


def _meet(job: Job, store: Any, rank: int) -> list[Any]:
    """Wait for all ranks; return a group of the server and worker i for every i."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.workers + 1, timeout=_QUIET
    )
    # Every rank makes every group, in the same order: that is what new_group asks for.
    return [dist.new_group([0, worker + 1], timeout=_QUIET) for worker in range(job.workers)]


def _tensors(array: Array, job: Job) -> list[Any]:
    import torch

    return [torch.from_numpy(part) for part in pieces(array, int(job.settings["chunk"]))]


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


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
        threading.Thread(target=self._serve_all, daemon=True).start()
        return str(self._store.port)

    def _serve_all(self) -> None:
        for index, group in enumerate(_meet(self._job, self._store, 0)):
            line = _Line(index + 1, group)
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: _Line) -> None:
        whole = bool(self._job.settings["whole"])
        g = np.empty(self._job.elements, np.float32)
        into, out = _tensors(g, self._job), _tensors(self._theta, self._job)
        push = line.receive(into)
        while True:
            _wait(push)
            with self._lock:
                self._sgd(self._theta, g)
                push = line.receive(into)
                if whole:
                    _wait(line.send(out))
            if not whole:
                _wait(line.send(out))

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
        self._into = _tensors(self.params, job)
        self._out = _tensors(gradient(job.elements), job)
        store = dist.TCPStore(HOST, int(address), None, False)
        self._line = _Line(0, _meet(job, store, index + 1)[index])

    def cycle(self) -> None:
        """Post the receives, send the gradient to rank 0, and wait for the parameters."""
        reply = self._line.receive(self._into)
        _wait(self._line.send(self._out))
        _wait(reply)

    def close(self) -> None:
        """Leave the group to the end of the process: the server's threads are waiting in it."""
