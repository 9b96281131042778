from __future__ import annotations

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab.workloads import MLP, batches, load, synthetic


def test_the_sizes_are_those_asked_for() -> None:
    data = synthetic(n=100, d=7, classes=3, seed=1)
    assert (data.train_x.shape, data.test_x.shape) == ((100, 7), (25, 7))
    assert (data.train_x.dtype, data.train_y.dtype) == (np.float32, np.int64)
    assert set(data.train_y.tolist()) == {0, 1, 2}
    assert len(synthetic(n=1, d=1, classes=2).test_x) == 1


@pytest.mark.parametrize("seed", range(5))
def test_values_fill_the_unit_range(seed: int) -> None:
    data = synthetic(n=400, d=5, seed=seed)
    everything = np.concatenate([data.train_x, data.test_x])
    assert 0 <= everything.min() < 0.2
    assert 0.8 < everything.max() <= 1


def test_the_seed_alone_decides() -> None:
    one, same, other = synthetic(n=50, seed=1), synthetic(n=50, seed=1), synthetic(n=50, seed=2)
    np.testing.assert_array_equal(one.train_x, same.train_x)
    np.testing.assert_array_equal(one.test_y, same.test_y)
    assert not np.array_equal(one.train_x, other.train_x)


def test_it_can_be_learnt_but_not_at_once() -> None:
    data = load("synthetic")
    model = MLP((data.features, 64, data.classes))
    params = model.init(seed=0)
    assert model.accuracy(params, data.test_x, data.test_y) < 0.3
    stream = batches(data, batch_size=32, seed=0)
    for _ in range(1500):
        _, grads = model.gradients(params, *next(stream))
        for name, grad in grads.items():
            params[name] -= 0.3 * grad
    assert model.accuracy(params, data.test_x, data.test_y) > 0.85


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"n": 0}, "n is 0"),
        ({"d": 0}, "d is 0"),
        ({"classes": 1}, "classes is 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments: dict[str, int], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        synthetic(**arguments)
