"""torch.distributed over gloo: point-to-point messages between a server rank and N worker ranks.

The server has a thread per worker, each with a process group of its own. Tensors share the memory
of the arrays, so nothing is copied; receives are posted before the other side may send, and large
tensors travel as several messages, which gloo overlaps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd

SETTINGS: Mapping[str, Setting] = {"chunk": 1 << 20, "prepost": True, "whole": False}
"""``chunk``: bytes of one message. ``whole``: hold the lock while sending, so versions never mix."""
ENVIRONMENT: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}

_QUIET = timedelta(hours=6)
"""Gloo's time-out: the server waits for a gradient while the other peers have their turn."""


def missing() -> str | None:
    """Say so when PyTorch is not installed."""
    return lacks("torch", "pip install torch")


class _Line:
    """Messages to and from one rank of a group of two; an array is a list of tensors over it."""

    def __init__(self, job: Job, store: Any, rank: int) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._chunk = int(job.settings["chunk"]) // 4
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.workers + 1, timeout=_QUIET
        )
        # Every rank makes every group, in the same order: that is what new_group asks for.
        self.groups = [dist.new_group([0, i + 1], timeout=_QUIET) for i in range(job.workers)]

    def pieces(self, array: Array) -> list[Any]:
        import torch

        return list(torch.from_numpy(array).split(self._chunk or array.size))

    def receive(self, pieces: list[Any], rank: int, group: Any) -> list[Any]:
        return [self._dist.irecv(piece, rank, group) for piece in pieces]

    def send(self, pieces: list[Any], rank: int, group: Any) -> list[Any]:
        return [self._dist.isend(piece, rank, group) for piece in pieces]


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
        threading.Thread(target=self._meet, daemon=True).start()
        return str(self._store.port)

    def _meet(self) -> None:
        line = _Line(self._job, self._store, 0)
        for index in range(self._job.workers):
            threading.Thread(target=self._serve, args=(line, index), daemon=True).start()

    def _serve(self, line: _Line, index: int) -> None:
        rank, group = index + 1, line.groups[index]
        g = np.empty(self._job.elements, np.float32)
        pushed, theta = line.pieces(g), line.pieces(self._theta)
        prepost = self._job.settings["prepost"]
        if prepost:
            push = line.receive(pushed, rank, group)
        while True:
            if not prepost:
                push = line.receive(pushed, rank, group)
            _wait(push)
            with self._lock:
                self._sgd(self._theta, g)
            if prepost:
                push = line.receive(pushed, rank, group)
            _wait(line.send(theta, rank, group))

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
        self._line = _Line(job, dist.TCPStore(HOST, int(address), None, False), index + 1)
        self._group = self._line.groups[index]
        self._into = self._line.pieces(self.params)
        self._out = self._line.pieces(gradient(job.elements))
        self._pp=job.settings["prepost"]

    def cycle(self) -> None:
        """Post the receives, send the gradient to rank 0, and wait for the parameters."""
        if self._pp:
            reply = self._line.receive(self._into, 0, self._group)
            _wait(self._line.send(self._out, 0, self._group))
        else:
            _wait(self._line.send(self._out, 0, self._group))
            reply = self._line.receive(self._into, 0, self._group)
        _wait(reply)

    def close(self) -> None:
        """Leave the group to the end of the process: the server's threads are waiting in it."""
