"""Train a small PyTorch model on handwritten digits, with the parameters on a server.

::

    python -m aiops.server                              # prints its URL
    python examples/pytorch_loop.py URL                 # in as many terminals as you like

Without a URL (nor ``$AIOPS_URL``) it starts a server of its own. ``# aiops`` marks the lines that
differ from a loop with ``torch.optim.SGD``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from aiops.client.torch import RemoteOptimizer  # aiops
from aiops.lab.workloads import batches, load

STEPS, BATCH_SIZE = 600, 32


def train(url: str) -> float:
    """Train, and return the accuracy on the test images."""
    torch.set_num_threads(1)  # a model of this size is slower with two
    digits = load("digits").flat()
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(digits.features, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, digits.classes),
    )
    opt = RemoteOptimizer(model, url)  # aiops: was torch.optim.SGD(model.parameters(), lr=0.1)
    print(opt)
    for x, y in islice(batches(digits, BATCH_SIZE, seed=os.getpid()), STEPS):
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        opt.zero_grad()
        loss.backward()
        opt.step()  # as before, but the server takes the step
    opt.close()  # aiops: leave, so that no other worker waits for this one
    return accuracy(model, digits.test_x, digits.test_y)


def accuracy(model: Any, x: Any, y: Any) -> float:
    """Return the share of images that the model classifies correctly."""
    with torch.no_grad():
        found = model(torch.tensor(x)).argmax(dim=1)
    return float((found == torch.tensor(y)).float().mean())


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
