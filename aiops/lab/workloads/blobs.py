"""``synthetic``: made-up classification of any size, from a seed; for tests and for measuring."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiops.errors import UsageError
from aiops.lab.workloads.dataset import Dataset
from aiops.lab.workloads.seeds import Purpose, generator

__all__ = ["synthetic"]

_BLOBS_PER_CLASS = 2
_SEPARATION = 8.0


def synthetic(n: int = 4096, d: int = 32, classes: int = 10, seed: int = 0) -> Dataset:
    """Return Gaussian blobs: each class is two clouds of points.

    The centres lie about eight standard deviations of a cloud apart whatever ``d`` is. At the
    default size a perceptron with one hidden layer errs on a few percent of the test examples, so
    its mini-batch gradients stay noisy near the optimum, as they do on real data.

    Args:
        n: examples to train on; a quarter as many, at least one, are there to test with.
        d: numbers in an example.
        classes: how many classes; every example's is drawn uniformly.
        seed: the same seed gives the same data set.

    Raises:
        UsageError: an argument is below 1 (``classes``: below 2), or the seed is negative.
    """
    for name, value, least in (("n", n, 1), ("d", d, 1), ("classes", classes, 2)):
        if value < least:
            raise UsageError(f"{name} is {value}; a synthetic data set needs at least {least}")
    rng = generator(seed, Purpose.SYNTHETIC_DATA)
    # Two points of N(0, s² I) in d dimensions lie about s·√(2d) apart.
    scale = np.float32(_SEPARATION / np.sqrt(2 * d))
    centres = scale * rng.standard_normal((classes, _BLOBS_PER_CLASS, d), dtype=np.float32)
    n_test = max(1, n // 4)
    y = rng.integers(classes, size=n + n_test)
    blob = rng.integers(_BLOBS_PER_CLASS, size=n + n_test)
    x = rng.standard_normal((n + n_test, d), dtype=np.float32)
    x += centres[y, blob]
    _squeeze(x)
    return Dataset("synthetic", x[:n], y[:n], x[n:], y[n:], classes=classes)


def _squeeze(x: NDArray[np.float32]) -> None:
    """Move values into [0, 1] in place by one affine map, zero to one half."""
    x *= np.float32(0.5) / max(np.float32(np.abs(x).max()), np.finfo(np.float32).tiny)
    x += np.float32(0.5)
    np.clip(x, 0, 1, out=x)  # only the last bit of rounding
