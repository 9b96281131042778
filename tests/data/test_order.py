"""The order of an epoch: a permutation, the same everywhere, that is well mixed."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.data.order import EpochOrder, permuted
from aiops.errors import UsageError
from tests.rows import each_row


@each_row("examples", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4096, 4097])
@each_row("block", [0, 1, 2, 7, 64, 5000])
def test_each_example_has_one_position(examples: int, block: int) -> None:
    order = EpochOrder(examples, block, seed=3)
    assert sorted(order.indices(5, 0, examples)) == list(range(examples))


@each_row("block", [0, 1, 7])
def test_any_range_is_a_part_of_the_whole(block: int) -> None:
    order = EpochOrder(100, block, seed=9)
    whole = order.indices(2, 0, 100)
    for start, stop in ((0, 1), (13, 29), (90, 100), (99, 100), (40, 40)):
        assert (order.indices(2, start, stop) == whole[start:stop]).all()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        tuple(EpochOrder(50, 1, seed).indices(epoch, 0, 50))
        for seed in (0, 1, 2**53 - 1)
        for epoch in (0, 1, 2**53 - 1)
    ]
    assert len(set(orders)) == 9


def test_blocks_stay_together() -> None:
    found = EpochOrder(1000, 10, seed=1).indices(0, 0, 1000).reshape(100, 10)
    assert all(len({example // 10 for example in row}) == 1 for row in found.tolist())
    assert [row[0] // 10 for row in found.tolist()] != list(range(100))
    assert any(row != sorted(row) for row in found.tolist())


def test_it_is_well_mixed() -> None:
    """Where an example stands says nothing of it: counts per cell are as of random numbers."""
    cells = np.zeros((10, 10))
    for epoch in range(20):
        found = EpochOrder(1000, 1, seed=7).indices(epoch, 0, 1000)
        np.add.at(cells, (np.arange(1000) // 100, found // 100), 1)
    chi = float(((cells - 200) ** 2 / 200).sum())
    assert 40 < chi < 140, "81 degrees of freedom"
    neighbours = np.corrcoef(found[:-1], found[1:])[0, 1]
    assert abs(neighbours) < 0.1


def test_a_large_set_takes_no_memory() -> None:
    found = EpochOrder(2**53 - 1, 1, seed=0).indices(0, 2**52, 2**52 + 1000)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < 2**53 - 1


def test_an_order_never_changes() -> None:
    """Workers of two releases may share a run; docs/wire-data.md has these numbers, too."""
    assert permuted(np.arange(8), 8, 0, 0, 0).tolist() == EXPECTED
    assert EpochOrder(8).indices(0, 0, 8).tolist() == EXPECTED


EXPECTED = [5, 2, 1, 3, 7, 0, 4, 6]


@each_row(("examples", "block", "seed"), [(0, 1, 0), (1, -1, 0), (1, 1, 2**53), (1, 1, 1.0)])
def test_numbers_that_are_refused(examples: int, block: int, seed: int) -> None:
    with pytest.raises(UsageError, match=r"2\*\*53 - 1"):
        EpochOrder(examples, block, seed)
