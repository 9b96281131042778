from __future__ import annotations

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab.workloads import Dataset
from aiops.lab.workloads.dataset import unit_range


def make(train_y: list[int], test_y: list[int], classes: int = 3) -> Dataset:
    x = np.zeros((4, 2, 3), dtype=np.float32)
    return Dataset(
        "toys",
        x,
        np.array(train_y, dtype=np.int64),
        x[:2],
        np.array(test_y, dtype=np.int64),
        classes,
    )


def test_flat_shares_memory() -> None:
    data = make([0, 1, 2, 0], [1, 2])
    flat = data.flat()
    assert (data.shape, data.features) == ((2, 3), 6)
    assert (flat.shape, flat.features) == ((6,), 6)
    assert (flat.train_x.shape, flat.test_x.shape) == ((4, 6), (2, 6))
    assert np.shares_memory(flat.train_x, data.train_x)


def test_nobody_can_change_the_examples_of_others() -> None:
    for data in (make([0, 1, 2, 0], [1, 2]), make([0, 1, 2, 0], [1, 2]).flat()):
        for array in (data.train_x, data.train_y, data.test_x, data.test_y):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_the_arrays_handed_in_stay_writable() -> None:
    x = np.zeros((1, 2), dtype=np.float32)
    y = np.zeros(1, dtype=np.int64)
    Dataset("toys", x, y, x, y, 1)
    x[0] = 1
    y[0] = 0


def test_a_data_set_prints_as_one_line() -> None:
    text = repr(make([0, 1, 2, 0], [1, 2]))
    assert text == "<Dataset toys: 4 to train, 2 to test, 2×3 each, 3 classes>"


@pytest.mark.parametrize(
    ("train_y", "test_y", "reason"),
    [
        ([0, 1, 2], [1, 2], r"train_x of shape \(4, 2, 3\) and train_y of shape \(3,\)"),
        ([0, 1, 2, 0], [1], "test_x of shape"),
        ([0, 1, 3, 0], [1, 2], "train_y spans 0 to 3, but with 3 classes"),
        ([0, 1, 2, 0], [-1, 2], "test_y spans -1 to 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    train_y: list[int], test_y: list[int], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        make(train_y, test_y)


@pytest.mark.parametrize("top", [16, 255])
def test_unit_range_maps_the_top_to_exactly_one(top: int) -> None:
    values = unit_range(np.arange(top + 1, dtype=np.uint8), top)
    assert values.dtype == np.float32
    assert (values[0], values[-1]) == (0, 1)
    np.testing.assert_array_equal(values, (np.arange(top + 1) / top).astype(np.float32))
