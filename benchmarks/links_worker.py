"""One worker of `benchmarks.links`: ``python -m benchmarks.links_worker URL ELEMENTS``.

It prints a line after its first exchange, and goes on until it is ended.
"""

from __future__ import annotations

import sys

import numpy as np

import aiops

_PATIENCE = 600.0  # seconds that an exchange may take


def main(url: str, elements: int) -> None:
    """Exchange for ever."""
    shape = elements // 1024, 1024
    with aiops.Client(url, role="worker", timeout=_PATIENCE) as client:
        params = client.define({"w": np.zeros(shape, np.float32)})
        gradients = {"w": np.full(shape, 1e-3, np.float32)}
        client.exchange(params, gradients)
        print("at work", flush=True)
        while True:
            client.exchange(params, gradients)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
