"""aiops with its model on a GPU, and its workers on the same machine in shared memory.

Otherwise it is the peer `shared`, which it is measured beside. The gradients and the parameters of
the workers are on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiops.errors import UsageError
from aiops.kernels import cupy_device
from benchmarks.peers import shared
from benchmarks.peers.base import Setting
from benchmarks.peers.ours import ENVIRONMENT, Server, Worker

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]

SETTINGS: Mapping[str, Setting] = {**shared.SETTINGS, "device": "cuda"}


def missing() -> str | None:
    """Return why there is no GPU to use, or None."""
    try:
        cupy_device.opened("cuda")
    except UsageError as error:
        return str(error)
    return None
