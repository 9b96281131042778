"""The recommender on clicks of a known truth: the draw, the gradient, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.sim.turns.run import simulate
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.slopes import is_slope

pytest.importorskip("torch")

from aiops.lab.experiments.click_tables import (
    VALUES,
    ClickTables,
    drawn_clicks,
)


@pytest.fixture(scope="module")
def task() -> ClickTables:
    return ClickTables()


def test_examples_are_drawn_from_the_truth() -> None:
    clicks = drawn_clicks(40_000)
    assert (clicks.values.max(0) < VALUES).all()
    assert clicks.values.min() == 0
    for low, high in ((0.1, 0.2), (0.45, 0.55), (0.8, 0.9)):
        inside = (clicks.chances >= low) & (clicks.chances < high)
        expected = clicks.chances[inside].mean()
        assert clicks.clicks[inside].mean() == pytest.approx(expected, abs=0.03)
    assert np.array_equal(drawn_clicks(40_000).clicks, clicks.clicks)


def test_the_truth_costs_least(task: ClickTables) -> None:
    tested = task.tested_clicks
    assert tested.least_cost == pytest.approx(0.4115, abs=5e-4)  # as one-rule's note says
    share = tested.clicks.mean()
    unaware = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert tested.least_cost < unaware - 0.2


@pytest.mark.parametrize("name", ["table0", "table5", "dense1.weight", "top1.weight", "top2.bias"])
def test_its_gradient_is_the_slope_of_its_cost(task: ClickTables, name: str) -> None:
    assert is_slope(task, name, np.arange(64))


def test_it_learns_but_no_more_than_there_is(task: ClickTables) -> None:
    run = Simulation(
        policy="asgd", lr=0.01, set=("optimizer=adam",), clients=2, batch_size=64, iterations=300
    )
    last = simulate(run, task).curve[-1].cost
    assert task.tested_clicks.least_cost < last < 0.58
