"""One process that does a cycle's work alone: what memory and one core give, no peer to beat.

It copies the gradient, updates, and copies the parameters, without any message or wait. Each
worker has parameters of its own, in a file that is memory, and the server adds them up in the end:
with several workers this is what independent processes can do. A peer that moves
nothing may be quicker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.peers.base import Array, Job, Setting, gradient, load_sgd

SETTINGS: Mapping[str, Setting] = {"whole": True}
ENVIRONMENT: Mapping[str, str] = {}


def missing() -> str | None:
    """Never: NumPy has all it needs."""
    return None


def _own(folder: str, index: int) -> Path:
    return Path(folder) / f"worker-{index}"


class Server:
    """Nothing but a folder, where the workers have their parameters."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = tempfile.mkdtemp()

    def start(self) -> str:
        """Return the folder's path."""
        return self._folder

    def parameters(self) -> Array:
        """Return the sum of all updates, of all workers."""
        files = (_own(self._folder, index) for index in range(self._job.workers))
        total: Array = np.zeros(self._job.elements, np.float32)
        for file in files:
            total += np.fromfile(file, np.float32)
        return total

    def close(self) -> None:
        """Leave the files: they go with the team's folder."""


class Worker:
    """All there is."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        self.params: Array = np.zeros(job.elements, np.float32)
        self._gradient = gradient(job.elements)
        self._pushed = np.zeros(job.elements, np.float32)
        memory = np.memmap(_own(address, index), np.float32, "w+", shape=(job.elements,))
        self._theta: Array = np.asarray(memory)
        self._sgd = load_sgd()

    def cycle(self) -> None:
        """Copy, update, copy."""
        np.copyto(self._pushed, self._gradient)
        self._sgd(self._theta, self._pushed)
        np.copyto(self.params, self._theta)

    def close(self) -> None:
        """Leave the file to the server."""
