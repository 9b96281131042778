"""The loops of the Ray benchmark; ``python -m benchmarks.ray_loops BYTES SECONDS`` runs the first.

They import nothing of Ray: `aiops run` and `aiops.ray.train` run the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import aiops
from aiops.kernels import resolve

_COMPILED = 60.0  # seconds that the server may take to compile its kernels
_BATCH = 20  # steps between two looks at the clock


def steps_per_second(config: Mapping[str, Any]) -> float:
    """Return the steps a second of this worker, once the server's kernels are compiled."""
    weights = np.zeros(config["nbytes"] // 4, np.float32)
    with aiops.Worker(params={"w": weights}) as worker:
        gradient = {"w": np.full_like(weights, 1e-6)}

        def take_steps(seconds: float) -> float:
            count, begin = 0, time.perf_counter()
            while (now := time.perf_counter()) - begin < seconds:
                for _ in range(_BATCH):
                    worker.step(gradient)
                count += _BATCH
            return count / (now - begin)

        deadline = time.perf_counter() + _COMPILED
        while worker.stats()["kernels"] != resolve("auto") and time.perf_counter() < deadline:
            take_steps(0.1)
        take_steps(config["seconds"] / 2)
        rate = take_steps(config["seconds"])
        take_steps(config["seconds"] / 2)  # while the other workers still measure
        return rate


def count_steps(config: Mapping[str, Any]) -> int:
    """Push a one to the parameter of this rank until a file says stop; note each acknowledgement.

    ``acks-RANK`` gets the time of each, as eight bytes. Returns the pushes that were rolled back.
    """
    rank, folder = int(os.environ["RANK"]), Path(config["folder"])
    mine = np.zeros(int(os.environ["WORLD_SIZE"]), np.float32)
    mine[rank] = -1
    with (
        aiops.Worker(params={"w": np.zeros_like(mine)}) as worker,
        open(folder / f"acks-{rank}", "ab", buffering=0) as acks,
    ):
        while not (folder / "stop").exists():
            worker.step({"w": mine})
            acks.write(np.float64(time.time()).tobytes())
            time.sleep(config["pause"])
        return worker.rolled_back


def acknowledged(folder: Path, rank: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the times of a worker's acknowledged steps, seconds since 1970."""
    path = folder / f"acks-{rank}"
    content = path.read_bytes() if path.exists() else b""
    return np.frombuffer(content[: len(content) // 8 * 8], np.float64)


if __name__ == "__main__":
    print(steps_per_second({"nbytes": int(sys.argv[1]), "seconds": float(sys.argv[2])}))
