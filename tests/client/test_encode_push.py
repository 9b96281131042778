"""Gradients that are gathered in an arena."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.client.encode_push import gather
from aiops.client.params import Params
from aiops.model.layout import Array, Layout
from tests.rows import each_row

LAYOUT = Layout([("a", "float32", (3, 3)), ("b", "float32", (5,)), ("c", "float32", (2,))])


class Watched(np.ndarray):  # type: ignore[type-arg]
    """An array that must not be written to."""

    def __setitem__(self, key: object, value: object) -> None:
        pytest.fail("it was copied into itself")


def filled() -> Params:
    into = Params(LAYOUT)
    for name, array in into.items():
        array[...] = np.arange(array.size).reshape(array.shape) + ord(name)
    return into


def test_what_is_there_is_not_copied() -> None:
    into = filled()
    given: dict[str, Array] = {name: into[name][...] for name in "cb"}
    into.arena.views["b"] = into["b"].view(Watched)
    into.arena.views["c"] = into["c"].view(Watched)
    assert gather(LAYOUT, given, into).tolist() == [1, 2]


@each_row("turn", [lambda a: a.T, lambda a: a[::-1], lambda a: a + 1])
def test_other_arrays_are_copied_though_they_begin_there(turn: object) -> None:
    assert callable(turn)
    into, given = filled(), filled()
    wanted = turn(given["a"]).copy()
    assert gather(LAYOUT, {"a": turn(into["a"])}, into).tolist() == [0]
    np.testing.assert_array_equal(into["a"], wanted)
