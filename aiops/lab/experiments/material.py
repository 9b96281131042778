"""What worker processes train on: the data on disk, shared by all of them, and the test."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aiops.common.closing import Closing
from aiops.lab.workloads import MLP, load
from aiops.lab.workloads.dataset import Dataset


class Material(Closing):
    """A data set and its perceptron; the files are gone when the ``with`` block ends.

    Processes map the files into memory, so the data is there once, however many read it.

    Parameters
    ----------
    dataset
        Its name, or itself.
    hidden
        Units of the perceptron's hidden layer.

    Attributes
    ----------
    folder
        Where ``x.npy`` (float32[n, features]) and ``y.npy`` (int64[n]) lie, the training part.
    sizes
        The perceptron's layers.
    """

    def __init__(self, dataset: str | Dataset, hidden: int) -> None:
        data = (load(dataset) if isinstance(dataset, str) else dataset).flat()
        self._test = data.test_x, data.test_y
        self.sizes = (data.features, hidden, data.classes)
        self.model = MLP(self.sizes)
        self._folder = tempfile.TemporaryDirectory(prefix="aiops-")
        self.folder = Path(self._folder.name)
        np.save(self.folder / "x.npy", data.train_x)
        np.save(self.folder / "y.npy", data.train_y)

    def test(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the loss and the accuracy on the test set."""
        return self.model.evaluate(params, *self._test)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
