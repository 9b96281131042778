"""The byte-level LSTM: its gradient, that no byte sees later ones, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.sim.turns.run import simulate
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.slopes import is_slope, params_of

torch = pytest.importorskip("torch")

from aiops.lab.experiments.lstm import ByteLSTM  # noqa: E402


@pytest.fixture(scope="module")
def task() -> ByteLSTM:
    return ByteLSTM(width=8, units=16, context=12)


def test_the_same_seed_gives_the_same_parameters(task: ByteLSTM) -> None:
    one, two, other = task.initial(1), task.initial(1), task.initial(2)
    assert all(np.array_equal(one[name], two[name]) for name in task.shapes)
    assert not np.array_equal(one["in"], other["in"])
    assert (one["gates"] == np.repeat([0, 1, 0, 0], 16)).all()


@pytest.mark.parametrize("name", ["bytes", "in", "again", "gates", "out", "out.bias"])
def test_its_gradient_is_the_slope_of_its_cost(task: ByteLSTM, name: str) -> None:
    assert is_slope(task, name, np.array([5, 900, 20_000]))


def test_no_byte_sees_later_ones(task: ByteLSTM) -> None:
    weights = task.weights(params_of(task))
    seen = torch.arange(12)[None] + 60
    with torch.no_grad():
        before = task.following(weights, seen)
        seen[0, 7] = 200
        after = task.following(weights, seen)
    changed = (before != after).any(2)[0].numpy()
    assert not changed[:7].any()
    assert changed[7:].all()


def test_it_learns(task: ByteLSTM) -> None:
    run = Simulation(
        policy="asgd", lr=0.02, set=("optimizer=adam",), clients=2, batch_size=8, iterations=60
    )
    first, *_others, last = (sample.cost for sample in simulate(run, task).curve)
    assert first == pytest.approx(np.log(256), abs=0.3)
    assert last < first - 2


def test_sizes_of_none() -> None:
    with pytest.raises(UsageError, match="1 or more"):
        ByteLSTM(units=0)
