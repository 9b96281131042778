"""A few seconds of torture: all is well with the server, and a broken one is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiops.lab.torture.campaign import Campaign
from aiops.lab.torture.plan import VARIANTS, draw_servers, draw_workers
from tests.lab.torture import broken
from tests.support import Process


@pytest.mark.slow
@pytest.mark.parametrize("what", ["workers", "servers"])
def test_nothing_is_lost(what: str, tmp_path: Path) -> None:
    """The command itself, for 4 seconds; its report says what it did."""
    report = tmp_path / "report.json"
    command = ["-m", "aiops", "torture", what, "--seconds", "4", "--jobs", "1", "--json"]
    process = Process(*command, "--report", str(report), "--keep", str(tmp_path / "failed"))
    try:
        status, out, err = process.end(120)
    finally:
        process.kill()
    assert status == 0, out + err
    found = json.loads(report.read_text())
    assert found["torture"] == what
    assert found["failures"] == []
    assert found["kills"] > 0
    assert found["acknowledged"] > 0
    assert found["machine"]["packages"]


def caught(tmp_path: Path, what: str, run_server: Any, trials: int = 6) -> str:
    """Run trials until one fails; return what it found."""
    campaign = Campaign(what, names=("asgd",), folder=tmp_path, run_server=run_server)
    campaign.on_trial = lambda result: (
        campaign.stop() if result.wrong or len(campaign.results) == trials else None
    )
    campaign.run()
    assert campaign.failures, "a broken server was not caught"
    [failure] = campaign.report()["failures"]
    assert failure["again"].startswith(f"aiops torture {what} --seed {failure['seed']} --count 1")
    assert Path(failure["wrong"][-1].removeprefix("its files are in ")).is_dir()
    return " ".join(failure["wrong"])


@pytest.mark.slow
def test_a_server_that_acknowledges_before_it_writes_is_caught(tmp_path: Path) -> None:
    assert "worker-" in caught(tmp_path, "servers", broken.acknowledges_before_it_writes)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["workers", "servers"])
def test_a_server_that_applies_twice_is_caught(what: str, tmp_path: Path) -> None:
    assert "worker-" in caught(tmp_path, what, broken.applies_twice)


@pytest.mark.parametrize("draw", [draw_servers, draw_workers])
def test_a_seed_decides_the_plan(draw: Any) -> None:
    plans = [draw(seed) for seed in range(200)]
    assert plans == [draw(seed) for seed in range(200)]
    expected = {name for name in VARIANTS if draw is draw_servers or VARIANTS[name].additive}
    assert {plan.variant for plan in plans} == expected
    assert {plan.near for plan in plans} == {True, False}
    for plan in plans:
        assert plan.kills == len(plan.delays)
        lives = plan.workers + (plan.kills if draw is draw_workers else 0)
        last = plan.cells_of(lives - 1)
        assert last.first + last.count <= plan.size
