"""A lead, its follower, their standbys are killed at random instants; what is lost is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from aiops.lab.torture.plan import KillMoment, LineCut, SecondKill, TrialPlan
from aiops.lab.torture.spawner import Spawner
from aiops.lab.torture.trial import Trial, TrialResult


def struck(
    folder: Path, acks: str, layout: str, targets: Sequence[tuple[int, ...]], *more: KillMoment
) -> TrialResult:
    """Return what is found when servers are killed, those of each of ``targets`` together."""
    plan = TrialPlan(
        seed=0,
        variant="asgd",
        near=False,
        acks=acks,
        workers=2,
        moments=(*(KillMoment(10, targets=each) for each in targets), *more),
        pauses=(0.0, 0.001),
        size=1024,
        cells=512,
        layout=layout,
        snapshot_every=0.02,
    )
    with Spawner() as spawner:
        spawner.rehearse()
        return Trial(plan, folder, spawner).kill_servers()


@pytest.mark.slow
@pytest.mark.parametrize("acks", ["applied", "written"])
def test_shards_that_are_killed(acks: str, tmp_path: Path) -> None:
    early = KillMoment(seconds=0.05, early=True)
    result = struck(tmp_path, acks, "shards", [(0,), (1,), (0, 1)], early)
    assert result.wrong == []
    assert result.kills >= 5
    assert result.acknowledged > 0
    assert acks == "applied" or not result.lost


@pytest.mark.slow
def test_a_lead_that_is_cut_off_from_its_follower(tmp_path: Path) -> None:
    """Workers wait meanwhile, and go on; between the cuts the follower is killed, too."""
    cuts = [KillMoment(10, targets=(), cut=LineCut(0.3, silent)) for silent in (False, True)]
    again = KillMoment(10, targets=(1,))
    result = struck(tmp_path, "durable", "shards", [], *cuts, again, *cuts)
    assert result.wrong == []
    assert (result.cuts, result.kills) == (4, 3)
    assert result.acknowledged >= 50
    assert not result.lost


@pytest.mark.slow
def test_shards_with_standbys_that_are_killed(tmp_path: Path) -> None:
    """Each promotion has another site serve: one with its old follower gone, and one with it."""
    result = struck(tmp_path, "replicated", "shards with standbys", [(3,), (0, 1), (1,), (0,)])
    assert result.wrong == []
    assert result.kills == 7
    assert result.acknowledged > 0
    assert not result.lost


@pytest.mark.slow
def test_servers_that_are_killed_amid_a_promotion(tmp_path: Path) -> None:
    """The standby dies before it answers, and soon after; and both sites as the old one returns."""
    seconds = [
        SecondKill("promotion", 0.0, (0,)),
        SecondKill("promotion", 0.03, (0, 1)),
        SecondKill("return", 0.05, (0, 3)),
    ]
    amid = [KillMoment(10, second=second) for second in seconds]
    result = struck(tmp_path, "replicated", "shards with standbys", [], *amid)
    assert result.wrong == []
    assert result.kills == 10
    assert result.acknowledged > 0
    assert not result.lost
