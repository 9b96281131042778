"""A few seconds of torture: all is well with the server, and a broken one is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiops.algorithms import BUILT_IN
from aiops.errors import UsageError
from aiops.lab.torture.campaign import Campaign
from aiops.lab.torture.plan import (
    LAYOUTS,
    PROCESS_VARIANTS,
    draw_endings,
    draw_servers,
    draw_workers,
)
from aiops.lab.torture.trial_series import merged, read_earlier
from aiops.net.faulty_disk import points
from tests.lab.torture import broken
from tests.support import Process


@pytest.mark.slow
@pytest.mark.parametrize(("what", "seed"), [("workers", 0), ("servers", 8)])  # 8: a short trial
def test_nothing_is_lost(what: str, seed: int, tmp_path: Path) -> None:
    """The command itself, for a second and a trial; its report says what it did."""
    report = tmp_path / "report.json"
    command = ["-m", "aiops", "torture", what, "--seconds", "1", "--jobs", "1", "--json"]
    command += ["--seed", str(seed), "--report", str(report), "--keep", str(tmp_path / "failed")]
    process = Process(*command)
    try:
        status, out, err = process.end(300)
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


@pytest.mark.parametrize("draw", [draw_endings, draw_servers, draw_workers])
def test_a_seed_decides_the_plan(draw: Any) -> None:
    plans = [draw(seed) for seed in range(600)]
    assert plans == [draw(seed) for seed in range(600)]
    assert {plan.variant for plan in plans} == set(PROCESS_VARIANTS)
    assert {plan.near for plan in plans} == {True, False}
    for plan in plans:
        assert plan.kills == len(plan.moments) - plan.cuts > 0
        lives = plan.workers + (plan.kills if draw is draw_workers else 0)
        assert len(plan.pauses) == lives
        last = plan.cells_of(lives - 1)
        assert last.first + last.count <= plan.size
        assert not plan.lossy or plan.checked.tells


def test_servers_are_killed_in_every_way() -> None:
    plans = [draw_servers(seed) for seed in range(2000)]
    assert {plan.acks for plan in plans} == {"applied", "written", "durable", "replicated"}
    assert {plan.layout for plan in plans} == {*LAYOUTS}
    groups = {"shards": {(0,), (1,), (0, 1)}}
    groups["three shards"] = {(0,), (1,), (2,), (1, 2), (0, 2), (0, 1, 2)}
    for layout, targets in groups.items():
        shards = [plan for plan in plans if plan.layout == layout]
        assert {plan.acks for plan in shards} == {"applied", "written", "durable"}
        struck = {moment.targets for plan in shards for moment in plan.moments if not moment.cut}
        assert struck == targets
    cuts = [moment.cut for plan in plans for moment in plan.moments if moment.cut]
    assert {cut.silent for cut in cuts} == {True, False}
    assert not any(plan.cuts for plan in plans if plan.layout not in groups)
    both = [plan for plan in plans if plan.layout == "shards with standbys"]
    assert {plan.acks for plan in both} == {"replicated"}
    struck = {moment.targets for plan in both for moment in plan.moments}
    assert struck == {(0, 1), (0,), (1,), (2,), (3,), (2, 3)}
    moments = [moment for plan in plans for moment in plan.moments]
    assert all(moment.second is None for moment in moments if 0 not in moment.targets)
    kinds = {plan.layout: set[tuple[str, tuple[int, ...]]]() for plan in plans}
    for plan in plans:
        kinds[plan.layout] |= {(m.second.amid, m.second.targets) for m in plan.moments if m.second}
    assert not kinds["single"] | kinds["shards"] | kinds["three shards"]
    ways = {("promotion", (0,)), ("return", (0,)), ("return", (1,)), ("return", (0, 1))}
    assert kinds["standby"] == ways
    assert {("promotion", each) for each in [(0,), (1,), (0, 1)]} < kinds["shards with standbys"]
    assert {moment.point for moment in moments} == {"", *points()}
    assert any(moment.early for moment in moments)


def test_servers_that_are_asked_to_end_lose_nothing_at_any_level() -> None:
    plans = [draw_endings(seed) for seed in range(400)]
    assert {plan.acks for plan in plans} == {"applied", "written", "durable", "replicated"}
    assert {plan.layout for plan in plans} == {*LAYOUTS}
    assert not any(plan.lossy for plan in plans)
    for plan in plans:
        assert {moment.targets for moment in plan.moments} == {tuple(range(plan.shards))}


@pytest.mark.slow
def test_a_server_that_ends_without_a_snapshot_is_caught(tmp_path: Path) -> None:
    """Under ``applied`` there is no journal, so what it had acknowledged is lost."""
    found = caught(tmp_path, "endings", broken.ends_without_a_snapshot, trials=12)
    assert "worker-" in found


def test_every_policy_but_one_is_killed() -> None:
    """That of `Average` has workers exchange models: its server takes no push."""
    flags = [variant.flags for variant in PROCESS_VARIANTS.values()]
    assert {given[given.index("--policy") + 1] for given in flags} == {*BUILT_IN} - {"average"}


def report(kills: int, first: int, **more: Any) -> dict[str, Any]:
    run = {
        "revision": "a",
        "seconds": 1.5,
        "trials": 2,
        "kills": kills,
        "seeds": [first, first + 1],
    }
    return {
        "torture": "servers",
        "options": {"only": ["asgd"]},
        **run,
        "kills_by_acks": {"written": kills},
        "ended_at": {},
        "failures": [],
        "runs": [run],
        **more,
    }


def test_a_run_continues_another(tmp_path: Path) -> None:
    earlier, later = report(10, 0, ended_at={"journal.torn": 1}), report(20, 2, revision="b")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(earlier))
    found = merged(read_earlier("servers", path, ("asgd",)), later)
    assert found["kills"] == 30
    assert found["trials"] == 4
    assert found["seconds"] == 3.0
    assert found["seeds"] == [0, 3]
    assert found["kills_by_acks"] == {"written": 30}
    assert found["ended_at"] == {"journal.torn": 1}
    assert found["runs"] == earlier["runs"] + later["runs"]
    campaign = Campaign("servers", count=25, names=("asgd",), earlier=earlier)
    assert campaign.counted == 10
    for what, names in (("workers", ("asgd",)), ("servers", ("ssp",))):
        with pytest.raises(UsageError, match="--resume"):
            read_earlier(what, path, names)
    path.write_text("{")
    with pytest.raises(UsageError, match="no report"):
        read_earlier("servers", path, ("asgd",))
