"""Workers and a server that are killed amid epochs: the model has each example once an epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aiops.lab.torture.data_trial import DataFindings, DataTrial, DataTrialPlan
from aiops.lab.torture.spawner import Spawner

PLAN = DataTrialPlan(
    kills=4, server_kills=1, workers=2, dataset="400", epochs=2, batch_size=4, pause=0.02
)


@pytest.mark.slow  # 5 s are the time that a worker has to come back
def test_each_example_once_an_epoch(tmp_path: Path) -> None:
    with Spawner() as spawner:
        found = DataTrial(PLAN, tmp_path, spawner).run()
    assert found.right, found.report()
    assert found.returned > 0
    assert found.accuracy > 0.7


@pytest.mark.slow
def test_a_standby_that_is_promoted(tmp_path: Path) -> None:
    plan = replace(PLAN, kills=0, server_kills=2, dataset="100", acks="replicated", standby=True)
    with Spawner() as spawner:
        found = DataTrial(plan, tmp_path, spawner).run()
    assert found.right, found.report()


def test_what_is_right() -> None:
    right = DataFindings(PLAN, 400, 4, 1, once=[400, 400], missing=[0, 0], twice=[0, 0])
    assert right.right
    assert right.report()["right"]
    assert not replace(right, once=[400, 399]).right
    assert not replace(right, killed=3).right
    assert not replace(right, servers_killed=0).right
