"""A model in memory: aligned, and seen as its tensors without a copy."""

from __future__ import annotations

import numpy as np

from aiops.model.arena import Arena, aligned
from aiops.model.layout import Layout
from tests.rows import each_row


def test_the_views_are_the_tensors_in_the_arena() -> None:
    arrays = {
        "b": np.full(3, 0.5, np.float16),
        "w": np.arange(4.0).reshape(2, 2),
        "s": np.float32(1).reshape(()),
    }
    arena = Arena(Layout.of(arrays))
    assert arena.data.ctypes.data % 64 == 0
    for name, array in arrays.items():
        arena.views[name][...] = array
        assert arena.views[name].shape == array.shape
        assert np.shares_memory(arena.views[name], arena.data)
        np.testing.assert_array_equal(arena.shown[name], array)
        assert not arena.shown[name].flags.writeable
    assert [section.tolist() for section in arena.sections] == [[0, 1, 2, 3], [1], [0.5] * 3]


@each_row("nbytes", [1, 63, 64, 65, 1000])
def test_aligned(nbytes: int) -> None:
    data = aligned(nbytes)
    assert data.ctypes.data % 64 == 0
    assert data.shape == (nbytes,)
