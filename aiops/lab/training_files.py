"""A data set for worker processes: its training part as files, its test part in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from aiops.lab.workloads import MLP, load
from aiops.lab.workloads.dataset import Dataset


class TrainingFiles(ExitStack):
    """A data set and its perceptron; the files are removed when the ``with`` block ends.

    Processes map the files into memory (`aiops.lab.training_worker.mapped`), so the data is there
    once, however many read it.

    Parameters
    ----------
    dataset
        Its name, or itself.
    hidden
        Units of the perceptron's hidden layer.
    held_out
        Training examples, the last ones, that are tested on instead of the test part, to choose
        settings by; at most a fifth of all. 0: the test part is tested on.

    Attributes
    ----------
    folder
        The folder of ``x.npy`` (float32[n, features]) and ``y.npy`` (int64[n]).
    examples
        How many training examples the data set has, those held out included.
    sizes
        The perceptron's layers.
    model
        The perceptron.
    """

    def __init__(self, dataset: str | Dataset, hidden: int, held_out: int = 0) -> None:
        super().__init__()
        data = (load(dataset) if isinstance(dataset, str) else dataset).flat()
        x, y = data.train_x, data.train_y
        self._test = data.test_x, data.test_y
        self.examples = len(x)
        if held_out:
            held = min(held_out, len(x) // 5)
            self._test, x, y = (x[-held:], y[-held:]), x[:-held], y[:-held]
        self.sizes = (data.features, hidden, data.classes)
        self.model = MLP(self.sizes)
        self.folder = Path(self.enter_context(TemporaryDirectory(prefix="aiops-")))
        np.save(self.folder / "x.npy", x)
        np.save(self.folder / "y.npy", y)

    def test(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the loss (nats) and the accuracy (share of 1) on the test set."""
        return self.model.evaluate(params, *self._test)
