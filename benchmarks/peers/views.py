"""aiops in shared memory without a copy: `aiops.Worker` with ``views=True``.

The worker writes its gradients where the server reads them, and reads the parameters where the
server keeps them. The gradient is always the same here, and so is the room for it, so it is written
once; what writing gradients costs is the same for all peers, and no part of a cycle with any.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.peers import ours, shared
from benchmarks.peers.base import Array, Job, Setting, gradient
from benchmarks.peers.ours import ENVIRONMENT, Server, missing

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]

SETTINGS: Mapping[str, Setting] = {**shared.SETTINGS, "views": True}
"""``views`` is no choice here: without it this is the peer `room`."""


class Worker:
    """The client that a program that trains would use."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import aiops

        self._gradient = gradient(job.elements)
        self._written: Array | None = None
        self._worker = aiops.Worker(
            address,
            {"w": np.zeros(job.elements, np.float32)},
            views=bool(job.settings.get("views")),
        )
        ours.check_transport(self._worker._client, job)

    @property
    def params(self) -> Array:
        """The server's own array, read-only, of the version that the last cycle made."""
        params: Array = self._worker.params["w"]
        return params

    def cycle(self) -> None:
        """Ask for the room, see that the gradient is in it, and take a step."""
        room = self._worker.room()
        if room["w"] is not self._written:
            self._written = room["w"]
            self._written[:] = self._gradient
        self._worker.step(room)

    def close(self) -> None:
        """Say goodbye."""
        self._worker.close()
