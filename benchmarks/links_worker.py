"""One worker of `benchmarks.links`: ``python -m benchmarks.links_worker URL ELEMENTS EXCHANGES``.

It prints a line when an exchange is done: the time of the system's monotonic clock in seconds, and
the seconds that all processors together have been busy, and idle, so far.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import aiops

_PATIENCE = 600.0  # seconds that an exchange may take


def processor_seconds() -> tuple[float, float]:
    """Return the seconds that all processors together have been busy, and idle."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, idle


def main(url: str, elements: int, exchanges: int) -> None:
    """Exchange, and print the times."""
    with aiops.Client(url, role="worker", timeout=_PATIENCE) as client:
        params = client.define({"w": np.zeros((elements // 1024, 1024), np.float32)})
        gradients = {"w": np.full((elements // 1024, 1024), 1e-3, np.float32)}
        for _ in range(exchanges):
            client.exchange(params, gradients)
            print(time.monotonic(), *processor_seconds(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
