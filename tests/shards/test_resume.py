"""Servers of a sharded model are killed, and go on from their journals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from aiops.durable.commit_gate import Acks
from aiops.engine.events import JournalEnded, Reported
from aiops.errors import RemoteProtocolError, RolledBack
from aiops.store.finite_guard import Proof
from aiops.store.parameters import UpdateRound
from aiops.wire.server_messages import UpdateDone
from tests.seeds import by_turns, seeds
from tests.shards.kept_world import Actor, KeptWorld
from tests.shards.test_orders_of_events import MODEL, POLICIES, SINGLE, Checker, final
from tests.shards.test_policies import trained

ACKS = (Acks.WRITTEN, Acks.DURABLE)

EACH = [(seed, 2 + 2 * (seed % 2), ACKS[seed // 2 % 2]) for seed in seeds(12)]
"""Seeds, each with two shards or four, and one of two acks: all four pairs by turns."""


@pytest.mark.parametrize(("seed", "shards", "acks"), EACH)
def test_each_push_counts_once(seed: int, shards: int, acks: Acks) -> None:
    world = KeptWorld(seed, shards, acks=acks)
    checkers = [Checker(2.0**n, 6) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.kills = 0.003
    world.run()
    world.kills = 0
    params = final(world, MODEL)
    total = sum(c.sent for c in checkers)
    assert params.version == 18
    assert all((a == -total).all() for a in params.values())


@pytest.mark.parametrize(("seed", "shards", "acks"), EACH)
def test_each_push_counts_once_with_snapshots(seed: int, shards: int, acks: Acks) -> None:
    """Servers are killed at any moment of a set: ordered, captured, synced on some, on all."""
    world = KeptWorld(seed, shards, acks=acks)
    checkers = [Checker(2.0**n, 6) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.kills, world.dues = 0.005, 0.02
    world.run()
    world.kills = world.dues = 0
    params = final(world, MODEL)
    total = sum(c.sent for c in checkers)
    assert params.version == 18
    assert all((a == -total).all() for a in params.values())


def test_a_lead_begins_again_if_a_follower_has_lost_a_portion() -> None:
    """As after a loss of power: the lead has a push in its journal, the follower not its part."""
    world = KeptWorld(3, 2)
    world.actors = [Actor(world, f"worker-{n}", Checker(2.0**n, 4)) for n in range(3)]
    hosts: Any = world.hosts
    while not (hosts[0].coordinator.engine.training and world.engine.training.updates.queued):
        world.step()
    [lead, follower] = hosts
    number = max(each.number for each in follower.coordinator.portions)
    state = follower.coordinator.state()
    assert not world.lead_brain.readmission.refusal(1, state)
    portions = tuple(each for each in state.holds["portions"] if each != number)
    lost = replace(state, holds={**state.holds, "portions": portions})
    assert isinstance(world.lead_brain.readmission.refusal(1, lost), RolledBack)
    assert lead.recorder.recording


def test_a_lead_begins_again_if_a_follower_has_lost_an_update_of_no_version() -> None:
    """One of the delta replica, say, which a snapshot that it goes on from lacks."""
    world = KeptWorld(3, 2, acks=Acks.APPLIED)
    world.actors = [Actor(world, f"worker-{n}", Checker(2.0**n, 4)) for n in range(3)]
    world.run()
    hosts: Any = world.hosts
    state = hosts[1].coordinator.state()
    assert not world.lead_brain.readmission.refusal(1, state)
    lost = replace(state, update=state.update - 1)
    assert isinstance(world.lead_brain.readmission.refusal(1, lost), RolledBack)


@pytest.mark.parametrize("early", [False, True])
def test_a_follower_cannot_refuse_an_update_that_another_one_has_made(early: bool) -> None:
    """An earlier start of the lead had ordered the step, so all had found its result finite."""
    world = KeptWorld(3, 3)
    world.actors = [Actor(world, f"worker-{n}", Checker(2.0**n, 4)) for n in range(3)]
    lead: Any = world.lead_brain
    while not (lead.model is not None and lead.model.updating._outstanding):
        world.step()
    updating, hosts, version = lead.model.updating, list[Any](world.hosts), lead.engine.version
    [update] = updating._outstanding.values()
    assert update.missing == {0, 1, 2}
    states = {n: hosts[n].coordinator.state() for n in (1, 2)}
    made = replace(states[2], version=version + 1, update=update.ticket)
    bad = UpdateDone(update.ticket, np.array([0], "<i8").tobytes(), Proof().packed())
    if early:
        assert updating.done(Reported(0.0, 1, bad), bad) == []
        assert lead.readmission.refusal(2, made) is None
        assert (update.missing, update.made) == ({0, 2}, set()), "that it asks changes nothing"
        orders = updating.resume(2, made, version, 1.0)
        assert [each.shard for each in orders] == [2, 1], "the other one is asked again"
    else:
        updating.resume(2, made, version, 1.0)
    with pytest.raises(RemoteProtocolError, match="shard 1 would refuse update"):
        updating.done(Reported(0.0, 1, bad), bad)
    assert 1 in update.missing
    updating.resume(2, states[2], version, 1.0)  # it has not made it, after all
    assert updating.done(Reported(0.0, 1, bad), bad) == []


def test_a_follower_that_is_lost_amid_a_step_is_given_it_again() -> None:
    """Whether or not it has made it: it may be killed before it does, and before it says so."""
    world = KeptWorld(3, 3)
    world.actors = [Actor(world, f"worker-{n}", Checker(2.0**n, 4)) for n in range(3)]
    lead: Any = world.lead_brain
    while not any(
        update.job.round is UpdateRound.STEP and {1, 2} <= update.missing
        for update in (lead.model.updating._outstanding.values() if lead.model else ())
    ):
        world.step()
    updating, version = lead.model.updating, lead.engine.version
    [update] = updating._outstanding.values()
    state = list[Any](world.hosts)[1].coordinator.state()
    before = replace(state, version=version, update=update.ticket)  # it has rehearsed it
    assert updating.resume(1, before, version, 1.0) == [update.orders[1]]
    after = replace(before, version=version + 1)
    assert updating.resume(1, after, version, 1.0) == [update.orders[1]]
    update.missing.discard(1)  # it has said it
    assert updating.resume(1, before, version, 1.0) is None
    assert updating.resume(1, after, version, 1.0) == []


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("acks", ACKS)
def test_a_journal_that_has_ended_goes_on_behind_a_snapshot(seed: int, acks: Acks) -> None:
    """Disks of some servers, or of all, are full for a while; later all servers are killed."""
    world = KeptWorld(seed, 3, acks=acks)
    world.damages = 0  # of snapshots, whose predecessors have no journal behind them
    checkers = [Checker(2.0**n, 8) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    hosts: Any = world.hosts
    while world.engine.version < 4:
        world.step()
    full = world.random.sample(hosts, world.random.randint(1, 3))
    for host in full:
        host.post(JournalEnded(world.now, "the disk is full"))
    while world.engine.version < 8:
        world.step()
    assert [host for host in hosts if not host.recorder.recording] == [
        host for host in hosts if host in full
    ]
    for _ in range(20_000):
        recorder = hosts[0].recorder
        if not any(host.recorder.ended or host.recorder.resuming for host in hosts):
            break
        if not recorder.recording:
            hosts[0].perform([recorder.resume()])
        world.take_snapshot()
        world.step()
    assert [host.recorder.acks for host in hosts] == [acks] * 3
    world.kill(range(3))
    assert all(host.restored for host in full)
    world.run()
    params = final(world, MODEL)
    assert params.version == 24
    assert all((a == -sum(c.sent for c in checkers)).all() for a in params.values())


# What is acknowledged when is decided behind the policy.
@pytest.mark.parametrize(
    ("policy", "acks", "seed"),
    by_turns(
        [
            *(*POLICIES, "hardsync clipped", "fasgd clipped", "hardsync clipped-apart"),
            *("hardsync trimmed", "asgd codec"),
        ],
        ACKS,
        seeds(1),
    ),
)
def test_policies(policy: str, seed: int, acks: Acks) -> None:
    """Every version that is fetched is of one moment on all shards, and all go on to the end."""
    policy, _, how = policy.partition(" ")
    settings: dict[str, Any] = {"lr": 0.01}
    options: dict[str, Any] = {}
    if how == "clipped":
        settings["clip"] = 1.0
    if how == "clipped-apart":
        settings["per_tensor"] = "clip=1@*"
    if how == "trimmed":
        settings["trim"] = 0.2
    if how == "codec":
        options["push_codec"] = ("int8",)
    world = KeptWorld(seed, 3, policy, settings, acks, workers=3, **options)
    checkers = [Checker(2.0**n, 5, SINGLE) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.kills, world.dues = 0.002, 0.01
    world.run()
    world.kills = world.dues = 0
    Checker.check(final(world, SINGLE))
    for host in world.hosts:
        assert host.coordinator.pools[0].out == 0, "every buffer has come back"


@pytest.mark.parametrize("acks", ACKS)
@pytest.mark.parametrize(("policy", "seed"), by_turns(["asgd", "dcasgd"], seeds(4)))
def test_coded_parameters(policy: str, seed: int, acks: Acks) -> None:
    """Small whole numbers are what they are in fp16: so whole versions are seen here too."""
    model = {"w": np.zeros((300, 5), np.float32), "b": np.zeros(7, np.float32)}
    settings = {"lr": 1, "lam": 0, "adaptive": False} if policy == "dcasgd" else {"lr": 1}
    world = KeptWorld(seed, 3, policy, settings, acks, fetch_codec=("fp16",), fetch_lag=1)
    checkers = [Checker(2.0**n, 5, model) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.kills, world.dues = 0.001, 0.01
    world.run()
    world.kills = world.dues = 0
    params = final(world, model)
    total = sum(c.sent for c in checkers)
    assert params.version == 15
    assert all((a == -total).all() for a in params.values())


class Killed(KeptWorld):
    """A world in which servers are killed from the beginning."""

    worlds: ClassVar[list[KeptWorld]] = []

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kills, self.dues = 0.004, 0.01
        self.worlds.append(self)


@pytest.mark.parametrize(
    ("chosen", "shards"),
    by_turns(
        [
            ("asgd", {"lr": 0.1}),
            ("sasgd", {"lr": 0.1}),
            ("fasgd", {"lr": 0.01}),
            ("asgd", {"lr": 0.1, "optimizer": "adam"}),
            ("asgd", {"lr": 0.1, "optimizer": "momentum", "clip": 1}),
            ("sasgd", {"lr": 0.1, "clip": 9, "per_tensor": "clip=1@big,one clip=0@b clip=0.5@*f*"}),
            ("fedbuff", {}),
        ],
        [2, 4],  # a server is restored by itself, however many others there are
    ),
)
def test_the_same_to_the_last_bit(chosen: tuple[str, dict[str, Any]], shards: int) -> None:
    """As in a run in which nothing is killed."""
    policy, settings = chosen
    expected, said, version = trained(shards, policy, settings)
    Killed.worlds.clear()
    arrays, receipts, got = trained(shards, policy, settings, kind=Killed)
    assert Killed.worlds[0].killed >= 3
    hosts: Any = Killed.worlds[0].hosts
    assert sum(host.restored for host in hosts) >= 3
    assert version == got > 0
    assert receipts == said
    for name, array in expected.items():
        assert array.tobytes() == arrays[name].tobytes(), name
