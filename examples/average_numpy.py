"""Train a perceptron on handwritten digits in plain NumPy; the workers average their models.

::

    python -m aiops.server --policy average             # prints its URL
    python examples/average_numpy.py URL                # in as many terminals as you like

Every worker has a model of its own and updates it. From time to time, while all of them go on
training, the workers average their models among themselves. The server only arranges the rounds.
Without a URL (nor ``$AIOPS_URL``) it starts a server of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice

import aiops.client
from aiops.lab.workloads import MLP, batches, load

STEPS, BATCH_SIZE = 1000, 32


def train(url: str) -> float:
    """Train, and return the accuracy on the test images."""
    digits = load("digits").flat()
    model = MLP((digits.features, 64, digits.classes))
    params = model.init(seed=os.getpid())  # replaced by the average of the others, if any
    with aiops.client.ModelAverager(url, params) as averager:
        for x, y in islice(batches(digits, BATCH_SIZE, seed=os.getpid()), STEPS):
            with averager.step():  # no average is applied between these lines
                loss, gradients = model.gradients(params, x, y)
                for name, gradient in gradients.items():
                    params[name] -= averager.lr * gradient
            if averager.steps % 200 == 0:
                print(f"step {averager.steps:5}  {loss:.4f}  {averager}")
        averager.average()  # a last one, with the workers that still train
        return model.accuracy(params, digits.test_x, digits.test_y)


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Run a server as long as it is needed; yield its URL, the first line that it prints."""
    command = [sys.executable, "-m", "aiops.server", "--policy", "average", "--port", "0"]
    with subprocess.Popen(
        [*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True
    ) as server:
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
