"""Define an algorithm, Signum with staleness, from scratch, and train with it.

::

    aiops serve --policy examples.custom_algorithm:Signum --set beta=0.8
    aiops demo --policy examples.custom_algorithm:Signum
    python examples/custom_algorithm.py

The class below is the whole algorithm. The rule is plain arithmetic on arrays: the server compiles
it into one fused loop (or one GPU kernel). Without Numba, NumPy runs it unchanged.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import aiops
from aiops.algorithms.base import Algorithm
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar, sign
from aiops.lab.workloads import MLP, batches, load


def signum(
    w: Array, g: Array, m: Array, step: Scalar, beta: Scalar, rest: Scalar
) -> tuple[Array, ...]:
    """One update; ``step`` is α·s(τ), ``rest`` is 1−β."""
    m = beta * m + rest * g
    return w - step * sign(m), m


@dataclass(frozen=True, kw_only=True)
class Signum(Algorithm):
    """Signum: step by the sign of the averaged gradient, shorter for a stale one.

    .. math:: m ← β m + (1−β) g,   θ ← θ − α · s(τ) · sign(m),   s(τ) = 1/(τ+1)

    Source: Bernstein et al. 2018, *signSGD*, algorithm 2; s(τ) is DynSGD's, Jiang et al. 2017.
    """

    name = "signum"
    lr: float = 0.002
    beta: float = 0.9

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("beta", 0 <= self.beta < 1, "in [0, 1)")

    def rule(self) -> Rule:
        """Return the mathematics of an update."""
        return Rule(signum, {"m": 0.0}, {"beta": self.beta, "rest": 1 - self.beta})

    def modulation(self, staleness: int) -> float:
        """Return s(τ)."""
        return 1 / (staleness + 1)


def work(url: str, index: int, workers: int, steps: int = 500) -> float:
    """Train as one of several workers; return the accuracy on the test images."""
    digits = load("digits").flat()
    model = MLP((digits.features, 64, digits.classes))
    with aiops.Worker(url, model.init(seed=0)) as worker:
        for x, y in islice(batches(digits, 32, 0, index, workers), steps):
            _loss, gradients = model.gradients(worker.params, x, y)
            worker.step(gradients)
        return model.accuracy(worker.evaluation(), digits.test_x, digits.test_y)


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Run a server of this algorithm as long as it is needed; yield its URL."""
    command = [sys.executable, "-m", "aiops.server", "--port", "0", "--log-level", "warning"]
    policy = ["--policy", "custom_algorithm:Signum"]  # this file, found in the server's folder
    with subprocess.Popen(
        [*command, *policy], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def main(argv: Sequence[str]) -> int:
    """Train at the server given in ``argv`` or ``$AIOPS_URL``, or at one of its own."""
    url = argv[0] if argv else os.environ.get("AIOPS_URL")
    with (
        contextlib.nullcontext(url) if url else own_server() as where,
        ThreadPoolExecutor(2) as pool,
    ):
        found = pool.map(lambda index: work(where, index, 2), range(2))
        print(f"test accuracy: {max(found):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
