"""A data set: labelled examples, some to train on and some to test with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiops.errors import UsageError

__all__ = ["Dataset", "unit_range"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Labelled examples for classification; the arrays are read-only.

    Attributes:
        name: what :func:`aiops.lab.workloads.load` calls it.
        train_x: float32 in [0, 1], shape (n, ...): one example a row, images as (height, width)
            or (height, width, colour).
        train_y: int64 in [0, classes), shape (n,).
        test_x: like ``train_x``, for examples that are never trained on.
        test_y: like ``train_y``.
        classes: how many classes there are.

    Raises:
        UsageError: examples and labels differ in number, or a label is not a class.
    """

    name: str
    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        """Check that the parts fit together, and make the arrays read-only."""
        for part, x, y in self._parts():
            if y.shape != x.shape[:1]:
                raise UsageError(
                    f"data set {self.name!r}: {part}_x of shape {x.shape} and {part}_y of shape "
                    f"{y.shape} do not match; give one label for each example"
                )
            if y.size and (y.min() < 0 or y.max() >= self.classes):
                raise UsageError(
                    f"data set {self.name!r}: {part}_y spans {int(y.min())} to {int(y.max())}, "
                    f"but with {self.classes} classes labels go from 0 to {self.classes - 1}"
                )
        for field in ("train_x", "train_y", "test_x", "test_y"):
            view = getattr(self, field).view()
            view.flags.writeable = False  # workers share these arrays; none may change them
            object.__setattr__(self, field, view)

    def __repr__(self) -> str:
        """One line; the arrays would fill the screen."""
        shape = "×".join(str(side) for side in self.shape)
        return (
            f"<Dataset {self.name}: {len(self.train_x):,} to train, {len(self.test_x):,} to test, "
            f"{shape} each, {self.classes} classes>"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train_x.shape[1:]

    @property
    def features(self) -> int:
        """The number of values in one example: the input width of a perceptron."""
        return math.prod(self.shape)

    def flat(self) -> Dataset:
        """Return the same data set with each example as one row of numbers: (n, features)."""
        return replace(
            self,
            train_x=self.train_x.reshape(len(self.train_x), self.features),
            test_x=self.test_x.reshape(len(self.test_x), self.features),
        )

    def _parts(self) -> tuple[tuple[str, NDArray[Any], NDArray[Any]], ...]:
        return ("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)


def unit_range(values: NDArray[np.uint8], top: int = 255) -> NDArray[np.float32]:
    """Scale integers from [0, top] to float32 in [0, 1]; ``top`` becomes exactly 1."""
    return np.divide(values, np.float32(top), dtype=np.float32)
