"""The perceptrons that simulated workers train."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.lab.workloads import PerceptronTask, PerceptronWorkload, load


class TestInTurns:
    def test_the_last_sixth_is_for_validation(self) -> None:
        task = PerceptronTask("digits", hidden=8)
        data = load("digits").flat()
        held_out = len(data.train_x) // 6
        assert task.examples == len(data.train_x) - held_out
        params = task.initial(0)
        cost, error = task.validate(params)
        x, y = data.train_x[-held_out:], data.train_y[-held_out:]
        assert cost == task.model.loss(params, x, y)
        assert error == 1 - task.model.accuracy(params, x, y)

    def test_hidden_units(self) -> None:
        with pytest.raises(UsageError, match="a hidden layer of 0 units: give 1 or more"):
            PerceptronTask("digits", 0)

    def test_an_unknown_data_set(self) -> None:
        with pytest.raises(UsageError, match=r"digts.*digits"):
            PerceptronTask("digts")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 0}, "a mini-batch of 0 examples"),
        ({"batch_size": 10**6}, "cannot be: the data has"),
        ({"data": "mnits"}, "did you mean 'mnist'"),
        ({"hidden": (0,)}, "layer sizes"),
    ],
)
def test_settings_of_a_cluster_s_workload(settings: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PerceptronWorkload(**settings)


def test_workers_draw_their_own_mini_batches() -> None:
    workload = PerceptronWorkload("digits", (8,), 4)
    params = workload.initial(0)
    first, again, other = (
        workload.gradient(worker, seed=1)(params)["layer0.weight"].copy() for worker in (0, 0, 1)
    )
    assert (first == again).all()
    assert (first != other).any()
