"""A few seconds of simulated torture: all is well, and broken servers are caught."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiops.durable.standby_feed import Replication
from aiops.lab.torture.cluster_plan import (
    KINDS,
    PLACE,
    PROMOTION,
    ClusterFault,
    ClusterPlan,
    draw_cluster,
    parsed,
)
from aiops.lab.torture.cluster_trial import ClusterTrial, quietly
from aiops.lab.torture.plan import VARIANTS
from aiops.lab.torture.seed_campaign import SeedCampaign, try_plan
from aiops.lab.torture.states import examine
from aiops.serving.server import Server
from aiops.shards.common_moment import CommonMoment
from aiops.shards.follower_rows import FollowerRows
from aiops.sim.virtual.disk import VirtualFile
from aiops.sim.virtual.network import HERE
from aiops.store.parameters import Store
from aiops.store.updater import Updater
from tests.seeds import examples
from tests.support import Process

FAILED = Path(__file__).with_name("failed_plans.jsonl")


def failed_once() -> list[Any]:
    """The newest plans that have failed: a whole plan each, as what a seed draws changes."""
    rows = [json.loads(line) for line in FAILED.read_text().splitlines()]
    rows = rows[-examples(len(rows)) :]  # each defect has a test of its own as well
    return [
        pytest.param(row["what"], parsed(row["plan"]), id=f"{row['what']}-{row['plan']['seed']}")
        for row in rows
    ]


@pytest.mark.parametrize(("what", "plan"), failed_once())
def test_what_failed_once_is_well(what: str, plan: ClusterPlan) -> None:
    """`aiops torture states|clusters --failed FILE` appends to that file."""
    with quietly():
        assert try_plan(what, plan).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("what", "count"), [("states", 450), ("clusters", 24)])
def test_all_is_well(what: str, count: int, tmp_path: Path) -> None:
    """The command itself, on the first seeds; its report says what it did."""
    report = tmp_path / "report.json"
    command = ["-m", "aiops", "torture", what, "--count", str(count), "--report", str(report)]
    process = Process(*command, "--failed", str(tmp_path / "failed"), "--json")
    try:
        status, out, err = process.end(120)
    finally:
        process.kill()
    assert status == 0, out + err
    found = json.loads(report.read_text())
    assert (found["torture"], found["tried"], found["failures"]) == (what, count, [])
    assert not (tmp_path / "failed").exists()


def caught(what: str, tmp_path: Path, first: int, trials: int = 12) -> str:
    """Run trials until one fails; return what it found."""
    kept = tmp_path / "failed"
    campaign = SeedCampaign(what, seconds=1e9, seed=first, names=("asgd",), failed=kept)
    campaign.on_trial = lambda result: (
        campaign.stop() if result.wrong or len(campaign.results) == trials else None
    )
    campaign.run()
    assert campaign.failures, "a broken server was not caught"
    [failure] = campaign.report()["failures"]
    assert failure["again"] == (
        f"aiops torture {what} --seed {failure['seed']} --count 1 --only asgd"
    )
    assert parsed(json.loads(kept.read_text())["plan"]) == draw_cluster(failure["seed"], ("asgd",))
    return " ".join(failure["wrong"])


def test_a_disk_that_does_not_sync_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualFile, "sync", lambda file: None)
    assert "start" in caught("states", tmp_path, 30)


def test_a_server_that_applies_twice_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, count = Store.update, [0]

    def tenth(self: Store, gradient: Any, steps: Any, scalars: Any) -> Any:
        count[0] += 1
        return update(self, gradient, steps * (1 + (count[0] % 10 == 0)), scalars)

    monkeypatch.setattr(Store, "update", tenth)
    assert "worker-" in caught("clusters", tmp_path, 30)


def replicated(*faults: ClusterFault) -> ClusterPlan:
    """A small plan with a standby, and these faults."""
    drawn = draw_cluster(37, ("asgd",))
    return replace(
        drawn, acks="replicated", workers=2, standby=True, deadline=1e6, faults=faults, naive=True
    )


def test_a_standby_takes_the_place_of_its_server_and_back() -> None:
    lost = ClusterFault(1.0, "power", seconds=1.0)
    plan = replicated(lost, ClusterFault(1.01, PROMOTION), ClusterFault(3.0, PROMOTION))
    with quietly():
        result = ClusterTrial(plan).run()
    assert result.wrong == []
    assert (result.promotions, result.lost) == (2, 0)
    assert result.acknowledged > 10


def test_a_server_that_does_not_wait_for_its_standby_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Replication, "_commit", lambda self: self.here)
    plan = replicated(ClusterFault(1.0, "silence", -1, 2.0), ClusterFault(1.5, PROMOTION))
    with quietly():
        result = ClusterTrial(plan).run()
    assert any("told that" in text or "was acknowledged" in text for text in result.wrong)


def test_an_old_server_that_does_not_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "supersede", lambda *given: None)
    with quietly():
        plan = replicated(ClusterFault(1.0, PROMOTION))
        result = ClusterTrial(replace(plan, acks="durable", deadline=0.5)).run()
    assert result.wrong == ["a server that was superseded serves for 60 s"]


def sharded(*faults: ClusterFault, acks: str = "written") -> ClusterPlan:
    """A small plan with three shards, and these faults."""
    drawn = draw_cluster(37, ("asgd",))
    faults = *faults, ClusterFault(1.5, "cut", -1)
    plan = replace(drawn, acks=acks, workers=2, faults=faults, standby=False, latency=0.001)
    return replace(
        plan, shards=3, pushes=24, cells=24, snapshot_every=0.4, pauses=(0.1, 0.07), jitter=0.0
    )


@pytest.mark.parametrize("acks", ["applied", "written", "durable"])
def test_shards_come_back(acks: str) -> None:
    lost = [ClusterFault(0.35 * each, "power", shard=each % 3, seconds=0.1) for each in (1, 2, 3)]
    with quietly():
        result = ClusterTrial(sharded(*lost, acks=acks)).run()
    assert result.wrong == []
    assert result.starts >= 6
    assert (result.lost == 0) == (acks == "durable")


@pytest.mark.parametrize("naive", [False, True])
def test_the_standby_of_a_follower_takes_its_place_and_back(naive: bool) -> None:
    """The operator starts again late what was killed, so no follower is back before that."""
    faults = [ClusterFault(time, PLACE, shard=1, seconds=1.5) for time in (1.0, 3.5)]
    plan = replace(sharded(acks="replicated"), standby=True, deadline=1e6, naive=naive)
    with quietly():
        result = ClusterTrial(replace(plan, faults=tuple(faults))).run()
    assert result.wrong == []
    assert (result.places, result.lost) == (2, 0)
    assert result.acknowledged > 40


def test_a_follower_that_does_not_go_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommonMoment, "ahead", lambda self, row: [])
    with quietly():
        result = ClusterTrial(sharded(ClusterFault(0.9, "power", shard=1))).run()
    assert result.wrong


def test_a_follower_that_applies_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = Updater.whole, [0]

    def tenth(self: Updater, source: Any, target: Any, data: Any, steps: Any, scalars: Any) -> Any:
        count[0] += HERE.get() == "server-2"
        twice = HERE.get() == "server-2" and count[0] % 10 == 0
        return whole(self, source, target, data, steps * (1 + twice), scalars)

    monkeypatch.setattr(Updater, "whole", tenth)
    with quietly():
        result = ClusterTrial(sharded(acks="durable")).run()
    assert any("worker-" in text for text in result.wrong)


def test_a_campaign_in_two_processes_has_the_seeds_of_one_in_order() -> None:
    found = []
    for jobs in (1, 2):
        campaign = SeedCampaign("clusters", count=6, seed=40, jobs=jobs)
        campaign.run()
        assert campaign.report()["seeds"] == [40, 45]
        results = sorted(campaign.results, key=lambda result: result.plan.seed)
        found.append([replace(result, seconds=0.0) for result in results])
    assert found[0] == found[1]


def spread(*faults: ClusterFault, acks: str = "durable") -> ClusterPlan:
    """The same with rows of tables on all shards."""
    return replace(sharded(*faults, acks=acks), rows=True)


def test_rows_on_all_shards_are_counted() -> None:
    with quietly():
        result = ClusterTrial(spread(ClusterFault(0.9, "power", shard=1))).run()
    assert result.wrong == []
    assert (result.lost, result.acknowledged > 10) == (0, True)


def test_a_follower_that_applies_rows_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had forgotten what it has answered; so is one that applies none."""
    received = FollowerRows.received

    def forgets(self: FollowerRows, event: Any, hello: Any) -> Any:
        for member in self.engine.membership:
            member.last_seq = 0
            member.answers.clear()
        return received(self, event, hello)

    monkeypatch.setattr(FollowerRows, "received", forgets)
    cuts = [ClusterFault(0.3 * n, "cut", n % 2) for n in range(1, 12)]
    with quietly():
        result = ClusterTrial(spread(*cuts)).run()
    assert any("the model lacks" in text or "counts" in text for text in result.wrong)


def test_a_seed_decides_all() -> None:
    plans = [draw_cluster(seed) for seed in range(300)]
    assert plans == [draw_cluster(seed) for seed in range(300)]
    assert {plan.variant for plan in plans} == set(VARIANTS)
    assert {plan.acks for plan in plans} == {"applied", "written", "durable", "replicated"}
    assert {fault.kind for plan in plans for fault in plan.faults} == {*KINDS, PROMOTION, PLACE}
    assert all(plan.standby for plan in plans if plan.acks == "replicated")
    assert {plan.shards for plan in plans} == {1, 2, 3, 4}
    assert {plan.shards for plan in plans if plan.rows} == {2, 3, 4}
    assert {plan.standby for plan in plans if plan.rows} == {False, True}
    with quietly():
        runs = [ClusterTrial(draw_cluster(21)).run() for _ in range(2)]
        states = [examine(draw_cluster(3)) for _ in range(2)]
    for run in (*runs, *states):
        run.seconds = 0.0
    assert runs[0] == runs[1]
    assert runs[0].acknowledged > 0
    assert states[0] == states[1]
