"""What is learnt: the data on disk, as worker processes want it, and the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiops.common.closing import Closing
from aiops.lab.workloads import MLP, load
from aiops.lab.workloads.dataset import Dataset

HELD_OUT = 5_000
"""Training examples that are kept apart to choose settings with; the test set is not for that."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be learnt, and in how many samples.

    ``validate``: train on all but the last 5,000 training examples, and test on those.
    """

    dataset: str = "mnist"
    hidden: int = 200
    batch_size: int = 32
    epochs: float = 10
    workers: int = 4
    validate: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = asdict(self)
        if float(self.epochs).is_integer():
            found["epochs"] = int(self.epochs)
        if not found.pop("validate"):
            return found
        return {**found, "validate": True}


class Bench(Closing):
    """A problem set up: ``with Bench(problem) as bench``; the files are gone afterwards."""

    def __init__(self, problem: Problem, data: Dataset | None = None) -> None:
        self.problem = problem
        data = data or load(problem.dataset)
        x, y = data.flat().train_x, data.train_y
        self._test: tuple[Any, Any] = (data.flat().test_x, data.test_y)
        self.epoch = len(x)
        if problem.validate:
            held = min(HELD_OUT, len(x) // 5)
            self._test, x, y = (x[-held:], y[-held:]), x[:-held], y[:-held]
        self.sizes = (data.features, problem.hidden, data.classes)
        self.model = MLP(self.sizes)
        self.nbytes = sum(array.nbytes for array in self.model.init(0).values())
        self._folder = tempfile.TemporaryDirectory(prefix="aiops-bench-")
        self.folder = Path(self._folder.name)
        np.save(self.folder / "x.npy", x)
        np.save(self.folder / "y.npy", y)

    @property
    def steps(self) -> int:
        """Mini-batches in all, over all workers."""
        problem = self.problem
        return max(int(problem.epochs * self.epoch) // problem.batch_size, problem.workers)

    def test(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the loss and the accuracy on the test set (or what is held out)."""
        return self.model.evaluate(params, *self._test)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
