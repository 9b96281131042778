"""The worker of all examples in this folder: it may be stopped at any time, and started again.

It finds its server by itself (``AIOPS_URL``, or what the launcher tells). It trains until the model
has seen ``TRAIN_STEPS`` gradients of all workers (20,000; 0: without end), and waits 600 s for
a server that is gone. SIGTERM ends it after the step under way, with status 75: it is not done.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import aiops
from aiops.lab.workloads import MLP, batches, load

STEPS = int(os.environ.get("TRAIN_STEPS", 20_000))
PAUSE = float(os.environ.get("TRAIN_PAUSE", 0.0))  # seconds a step: trials are not to end at once
UNFINISHED = 75  # EX_TEMPFAIL: try again


def main() -> int:
    """Train; return the exit status."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    data, model = load("digits"), MLP((64, 32, 10))
    begin: Any = model.init(seed=0)
    seed = int(os.environ.get("RANK", time.time_ns() % 1_000_000))  # another order for each worker
    with aiops.Worker(params=begin, timeout=600) as worker:
        first = worker.params.version
        for x, y in batches(data, 16, seed):
            if told or 0 < STEPS <= worker.params.version:
                break
            _loss, gradients = model.gradients(worker.params, x, y)
            worker.step(gradients)
            time.sleep(PAUSE)
        accuracy = model.accuracy(worker.params, data.test_x, data.test_y)
        print(f"from version {first:,} to {worker.params.version:,}, accuracy {accuracy:.1%}")
    return UNFINISHED if told else 0


if __name__ == "__main__":
    sys.exit(main())
