"""Train a perceptron on handwritten digits in plain NumPy, with the parameters on a server.

::

    python -m aiops.server                              # prints its URL
    python examples/numpy_loop.py URL                   # in as many terminals as you like

Without a URL (nor ``$AIOPS_URL``) it starts a server of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice

import aiops
from aiops.lab.workloads import MLP, batches, load

STEPS, BATCH_SIZE = 1000, 32


def train(url: str) -> float:
    """Train, and return the accuracy on the test images."""
    digits = load("digits").flat()
    model = MLP((digits.features, 64, digits.classes))
    with aiops.Worker(url, model.init(seed=0)) as worker:
        for x, y in islice(batches(digits, BATCH_SIZE, seed=os.getpid()), STEPS):
            loss, gradients = model.gradients(worker.params, x, y)
            receipt = worker.step(gradients)  # push, and bring worker.params up to date
            if worker.steps % 200 == 0:
                print(f"version {receipt.version:5}  staleness {receipt.staleness}  {loss:.4f}")
        return model.accuracy(worker.evaluation(), digits.test_x, digits.test_y)


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Run a server as long as it is needed; yield its URL, the first line that it prints."""
    command = [sys.executable, "-m", "aiops.server", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def main(argv: Sequence[str]) -> int:
    """Train at the server given in ``argv`` or ``$AIOPS_URL``, or at one of its own."""
    url = argv[0] if argv else os.environ.get("AIOPS_URL")
    with contextlib.nullcontext(url) if url else own_server() as where:
        print(f"test accuracy: {train(where):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
