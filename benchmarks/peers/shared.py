"""aiops in shared memory: the peer `ours`, left to find out that all are on one machine.

The gradient and the parameters are in the worker's own arrays, as over TCP: the gradient is copied
into memory that the server reads, and the parameters out of memory that the server has written.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers import ours
from benchmarks.peers.base import Setting
from benchmarks.peers.ours import ENVIRONMENT, Server, Worker, missing

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]

SETTINGS: Mapping[str, Setting] = {**ours.SETTINGS, "no_shm": False}
