"""A lead, its follower or both are killed at random instants, and what is lost is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiops.lab.torture.plan import KillMoment, TrialPlan
from aiops.lab.torture.spawner import Spawner
from aiops.lab.torture.trial import Trial


@pytest.mark.slow
@pytest.mark.parametrize("acks", ["applied", "written"])
def test_shards_that_are_killed(acks: str, tmp_path: Path) -> None:
    early = KillMoment(seconds=0.05, early=True)
    plan = TrialPlan(
        seed=0,
        variant="asgd",
        near=False,
        acks=acks,
        workers=2,
        moments=(*(KillMoment(10, target=target) for target in (0, 1, 2)), early),
        pauses=(0.0, 0.001),
        size=1024,
        cells=512,
        layout="shards",
        snapshot_every=0.02,
    )
    with Spawner() as spawner:
        spawner.rehearse()
        result = Trial(plan, tmp_path, spawner).kill_servers()
    assert result.wrong == []
    assert result.kills >= 5
    assert result.acknowledged > 0
    assert acks == "applied" or not result.lost
