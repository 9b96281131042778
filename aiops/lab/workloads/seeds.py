"""Independent random streams from one seed.

A data set, a model's initial parameters and every worker's order of examples are often made with
the same seed. If each began ``default_rng(seed)``, they would read the very same numbers: a
teacher's weights would reappear in the student. A *spawn key* keeps the streams apart. (A list
such as ``SeedSequence([seed, worker])`` does not: the streams of ``[5]`` and ``[5, 0]`` are equal.)
"""

from __future__ import annotations

import operator
from enum import IntEnum

import numpy as np

from aiops.errors import UsageError

__all__ = ["Purpose", "generator"]


class Purpose(IntEnum):
    """The purpose of a random stream; the numbers are part of the results and never change."""

    BATCHES = 1
    INITIAL_PARAMETERS = 2
    SYNTHETIC_DATA = 3


def generator(seed: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
    """Return the PCG64 generator of one purpose and index (such as a worker) under ``seed``.

    Raises:
        UsageError: ``seed`` is not a whole number from 0 up.
    """
    try:
        whole = operator.index(seed)
    except TypeError:
        whole = -1
    if whole < 0:
        raise UsageError(f"the seed is {seed!r}; give a whole number, 0 or more", seed=seed)
    sequence = np.random.SeedSequence(whole, spawn_key=(int(purpose), index))
    return np.random.Generator(np.random.PCG64(sequence))
