"""The byte-level transformer: its sizes, its gradient, and that no byte sees later ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from tests.lab.experiments.slopes import is_slope

torch = pytest.importorskip("torch")

from aiops.lab.experiments.gpt import ByteGPT  # noqa: E402


@pytest.fixture(scope="module")
def task() -> ByteGPT:
    return ByteGPT(width=32, blocks=1, context=16)


def test_it_begins_knowing_nothing(task: ByteGPT) -> None:
    cost, error = task.validate(task.initial(0))
    assert cost == pytest.approx(np.log(256), abs=0.1)
    assert 0.8 < error <= 1


def test_the_same_seed_gives_the_same_parameters(task: ByteGPT) -> None:
    one, two, other = task.initial(1), task.initial(1), task.initial(2)
    assert all(np.array_equal(one[name], two[name]) for name in task.shapes)
    assert not np.array_equal(one["bytes"], other["bytes"])
    assert (one["0.norm1.scale"] == 1).all()
    assert not one["norm.shift"].any()


def test_its_gradient_is_the_slope_of_its_cost(task: ByteGPT) -> None:
    for name in ("bytes", "places", "0.in", "0.up", "0.norm2.scale", "norm.shift"):
        assert is_slope(task, name, np.array([5, 900, 20_000])), name


def test_no_byte_sees_later_ones(task: ByteGPT) -> None:
    weights: dict[str, Any] = task.weights(task.initial(3))
    text = task._held_out[:17].clone()
    with torch.no_grad():
        before, _wanted = task._scores(weights, text, np.array([0]))
        text[10] = (text[10] + 1) % 256
        after, _wanted = task._scores(weights, text, np.array([0]))
    changed = (before != after).any(1).numpy()
    assert not changed[:10].any()
    assert changed[10:].all()


def test_a_width_that_heads_do_not_divide() -> None:
    with pytest.raises(UsageError, match="a width of 40"):
        ByteGPT(width=40)
