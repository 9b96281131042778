"""aiops in shared memory with one copy: gradients in `Worker.room`, parameters the worker's own.

The gradient is read where the worker writes it, as by the peer `views`; the parameters are copied
into the worker's own arrays, as by `shared`.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers import shared
from benchmarks.peers.base import Setting
from benchmarks.peers.ours import ENVIRONMENT, Server, missing
from benchmarks.peers.views import Worker

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]

SETTINGS: Mapping[str, Setting] = shared.SETTINGS
