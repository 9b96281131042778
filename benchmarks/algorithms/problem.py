"""The problem that the policies learn: its settings, its data on disk, and its tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from aiops.lab.training_files import TrainingFiles
from aiops.lab.workloads.dataset import Dataset

HELD_OUT = 5_000
"""Training examples that are kept apart to choose settings with; the test set is not for that."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set and a model, and in how many samples it is to be learnt.

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


class Bench(TrainingFiles):
    """A problem set up: ``with Bench(problem) as bench``; the files are removed afterwards.

    Attributes
    ----------
    nbytes
        Of the model.
    """

    def __init__(self, problem: Problem, data: Dataset | None = None) -> None:
        held_out = HELD_OUT if problem.validate else 0
        super().__init__(data or problem.dataset, problem.hidden, held_out)
        self.problem = problem
        self.nbytes = sum(array.nbytes for array in self.model.init(0).values())

    @property
    def steps(self) -> int:
        """Mini-batches in all, over all workers; an epoch is one of the whole training part."""
        problem = self.problem
        return max(int(problem.epochs * self.examples) // problem.batch_size, problem.workers)
