"""``digits``: real handwriting that ships with the package, so that it works without a network.

1,797 digits by 13 writers as 8×8 images, each pixel a count from 0 to 16: the test file of the
UCI data set *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, 1998,
doi:10.24432/C50P49, CC BY 4.0; see data/CREDITS.md). scikit-learn's ``load_digits`` is the same.
"""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np

from aiops.lab.workloads.dataset import Dataset, unit_range

__all__ = ["load_digits"]

_TOP = 16
_TEST_EVERY = 5


def load_digits() -> Dataset:
    """Return the digits: 1,437 images to train on and 360 to test with, shape (8, 8).

    The split uses no randomness, so it is the same for ever: order the images by digit, and within
    a digit as in the file; every fifth of them, from the first on, is for testing. So each digit
    and each writer has its share in both parts. Within a part the file's order is kept.
    """
    packed = resources.files(__package__).joinpath("data", "optdigits.tes.gz").read_bytes()
    text = gzip.decompress(packed).decode("ascii").strip().replace("\n", ",")
    table = np.fromstring(text, np.uint8, sep=",").reshape(-1, 8 * 8 + 1)
    x = unit_range(table[:, :-1].reshape(-1, 8, 8), _TOP)
    y = table[:, -1].astype(np.int64)
    test = np.zeros(len(y), dtype=bool)
    test[np.argsort(y, kind="stable")[::_TEST_EVERY]] = True
    return Dataset("digits", x[~test], y[~test], x[test], y[test], classes=10)
