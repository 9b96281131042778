from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import UsageError
from aiops.lab.workloads import batches, load


def drawn(n: int, batch_size: int, count: int, seed: int = 0, worker: int = 0) -> list[list[int]]:
    """The numbers of the examples in the first ``count`` mini-batches of one worker."""
    stream = batches((np.arange(n), np.arange(n)), batch_size, seed, worker, worker + 1)
    return [x.tolist() for x, _ in islice(stream, count)]


@given(n=st.integers(1, 20), batch_size=st.integers(1, 45), seed=st.integers(0, 2**64))
def test_each_epoch_has_each_example_once(n: int, batch_size: int, seed: int) -> None:
    taken = drawn(n, batch_size, count=3 + 3 * n // batch_size, seed=seed)
    assert {len(batch) for batch in taken} == {batch_size}
    order = [example for batch in taken for example in batch]
    for start in range(0, 3 * n, n):
        assert sorted(order[start : start + n]) == list(range(n))


def test_epochs_are_shuffled_anew() -> None:
    first, second = drawn(n=50, batch_size=50, count=2)
    assert first != second
    assert first != sorted(first)


def test_the_same_arguments_give_the_same_stream() -> None:
    assert drawn(30, 7, 20, seed=4, worker=2) == drawn(30, 7, 20, seed=4, worker=2)


def test_workers_and_seeds_have_different_orders() -> None:
    orders = [drawn(50, 50, 1, seed, worker)[0] for seed in range(3) for worker in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_workers_stream_does_not_depend_on_how_many_there_are() -> None:
    data = load("digits")
    alone, crowd = (batches(data, 8, seed=1, worker=0, workers=count) for count in (1, 100))
    for _ in range(5):
        np.testing.assert_array_equal(next(alone)[0], next(crowd)[0])


def test_examples_keep_their_labels() -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    y = np.arange(6)
    for batch_x, batch_y in islice(batches((x, y), 4, seed=0), 10):
        np.testing.assert_array_equal(batch_x, x[batch_y])
        assert batch_x.dtype == np.float32


def test_a_mini_batch_is_the_callers_to_keep() -> None:
    data = load("digits")
    x, y = next(batches(data, 4, seed=0))
    x[:] = 0
    y[:] = 0
    again, _ = next(batches(data, 4, seed=0))
    assert again.any()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"batch_size": 0}, "mini-batch size is 0"),
        ({"worker": 2, "workers": 2}, "worker 2 of 2: count from 0 to 1"),
        ({"worker": -1}, "worker -1"),
        ({"seed": -5}, "seed is -5"),
        ({"data": (np.zeros((3, 1)), np.zeros(2))}, "3 examples and 2 labels"),
        ({"data": (np.zeros((0, 1)), np.zeros(0))}, "0 examples and 0 labels"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, object], reason: str) -> None:
    good: dict[str, object] = {"data": load("digits"), "batch_size": 4, "seed": 0}
    with pytest.raises(UsageError, match=reason):
        batches(**(good | arguments))  # type: ignore[arg-type]
