"""The dealing of a data set's blocks, without Ray."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from aiops.errors import UsageError
from aiops.ray.dealing import Dealing, DealtBlock, EpochOver
from tests.seeds import seeds


def test_an_epoch_is_dealt_once_and_the_next_begins_without_waiting() -> None:
    dealing = Dealing()
    assert dealing.ask(0, 0, 0) == DealtBlock(0, 0)
    assert dealing.ask(1, 0, 0) == DealtBlock(0, 1)
    found = dealing.ask(1, 0, 0)
    assert found == DealtBlock(0, 2)
    assert isinstance(found, DealtBlock)
    assert dealing.exhausted(found) == EpochOver(0)
    assert dealing.ask(1, 0, 1) == DealtBlock(1, 0)  # while worker 0 has a block of the first
    assert dealing.ask(0, 0, 0) == EpochOver(0)
    assert dealing.unfinished == {DealtBlock(1, 0)}


def test_what_a_lost_worker_held_goes_to_another() -> None:
    dealing = Dealing()
    dealing.ask(0, 0, 0)
    dealing.lost(0)
    assert dealing.ask(1, 0, 0) == DealtBlock(0, 0)
    assert dealing.begin(1, 1) == 0  # it is replaced before that was noted
    with pytest.raises(UsageError, match="worker 1 has been replaced"):
        dealing.ask(1, 0, 0)
    assert dealing.ask(2, 0, 0) == DealtBlock(0, 0)


def test_an_epoch_to_come_is_refused() -> None:
    with pytest.raises(UsageError, match="epoch 1 has not begun"):
        Dealing().ask(0, 0, 1)


@pytest.mark.parametrize("seed", seeds(20))
def test_each_block_is_finished_once_an_epoch_through_any_losses(seed: int) -> None:
    random, dealing = Random(seed), Dealing()
    blocks, epochs, workers = 7, 3, 4
    starts, held = [0] * workers, dict[int, DealtBlock]()
    epoch = dict.fromkeys(range(workers), 0)
    finished = Counter[DealtBlock]()
    while any(each < epochs for each in epoch.values()):
        rank = random.choice([r for r in range(workers) if epoch[r] < epochs])
        if random.random() < 0.1:
            held.pop(rank, None)
            starts[rank] += 1
            epoch[rank] = dealing.begin(rank, starts[rank])
            continue
        if rank in held:
            finished[held.pop(rank)] += 1
        found = dealing.ask(rank, starts[rank], epoch[rank])
        if isinstance(found, DealtBlock) and found.number == blocks:
            found = dealing.exhausted(found)
        if isinstance(found, EpochOver):
            epoch[rank] = found.epoch + 1
        else:
            held[rank] = found
    assert set(finished.values()) == {1}
    assert len(finished) == blocks * epochs
