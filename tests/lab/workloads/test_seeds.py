from __future__ import annotations

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab.workloads.seeds import Purpose, generator


def test_equal_arguments_give_equal_streams() -> None:
    one, same = (generator(5, Purpose.BATCHES, 3) for _ in range(2))
    np.testing.assert_array_equal(one.random(8), same.random(8))


def test_every_seed_purpose_and_index_has_a_stream_of_its_own() -> None:
    seeds = (0, 1, 2**32, 2**32 + 1, 2**64)
    firsts = {
        generator(seed, purpose, index).random()
        for seed in seeds
        for purpose in Purpose
        for index in range(4)
    }
    plain = {np.random.default_rng(seed).random() for seed in seeds}
    assert len(firsts | plain) == len(seeds) * len(Purpose) * 4 + len(plain)


def test_numpy_integers_are_seeds() -> None:
    assert (
        generator(np.int64(4), Purpose.BATCHES).random() == generator(4, Purpose.BATCHES).random()
    )


@pytest.mark.parametrize("seed", [-1, 1.5, "0", None])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(UsageError, match="the seed is"):
        generator(seed, Purpose.BATCHES)  # type: ignore[arg-type]
