"""Whatever comes when: what any answer brings is of one version, and each push counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiops.engine.admission
from aiops.client.params import Params
from tests.seeds import seeds
from tests.shards.world import Actor, World

MODEL = {
    "w": np.zeros((50, 3), np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "b": np.zeros(7, np.float32),
    "double": np.zeros(20, np.float64),
    "half": np.zeros((3, 2), np.float16),
}


SINGLE = {name: array for name, array in MODEL.items() if array.dtype == np.float32}


class Checker:
    """A client that pushes the same number everywhere, so that every version is flat."""

    def __init__(self, number: float, pushes: int, model: Any = MODEL) -> None:
        self.number, self.left, self.model = number, pushes, model
        self.params: Params | None = None
        self.sent = 0.0
        self.used = 0  # pushes
        self.asked = ""

    def __call__(self, actor: Actor) -> Any:
        talk, random = actor.session, actor.world.random
        if actor.request is not None:
            result = actor.request.value()
            if self.asked == "push":
                self.used += result.used
            if self.params is not None:
                self.check(self.params)
        if not talk.ready or talk.info.layout is None:
            self.asked = "define"
            return actor.requests.define(self.model)
        if self.params is None:
            self.params = Params(talk.info.layout)
            self.asked = "fetch"
            return actor.requests.fetch(self.params)
        if not self.left:
            return None
        self.asked = random.choice(("push", "push", "exchange", "fetch"))
        if self.asked == "fetch":
            return actor.requests.fetch(self.params)
        self.left -= 1
        self.sent += self.number
        grads = {name: np.full(a.shape, self.number, a.dtype) for name, a in self.params.items()}
        into = self.params if self.asked == "exchange" else None
        self.asked = "push"
        return actor.requests.push(grads, self.params, into)

    @staticmethod
    def check(params: Params) -> None:
        values = {float(v) for a in params.values() for v in a.reshape(-1).tolist()}
        assert len(values) <= 1, f"a mixture of versions: {values}"


def final(world: World, model: Any = MODEL) -> Params:
    """What a client that comes later fetches."""
    checker = Checker(0, 0, model)
    late = Actor(world, "late", checker)
    world.actors.append(late)
    world.cuts = 0
    world.run()
    assert checker.params is not None
    return checker.params


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_asynchronous_clients(seed: int, shards: int) -> None:
    world = World(seed, shards)
    checkers = [Checker(2.0**n, 6) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.run()
    params = final(world)
    total = sum(c.sent for c in checkers)
    assert sum(c.used for c in checkers) == params.version
    assert params.version == 18
    assert all((a == -total).all() for a in params.values())


POLICIES = ["fasgd", "dcasgd", "softsync", "ssp", "gap-aware", "rennala", "hardsync"]


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server has room for one push at a time."""
    monkeypatch.setattr(aiops.engine.admission, "ROOM", 1)


def world_with_little_room(seed: int, shards: int, *given: Any, **options: Any) -> World:
    world = World(seed, shards, *given, **options)
    world.cuts = 0.005
    followers = (host.coordinator.admission for host in world.followers)
    for admission in (world.engine.admission, *followers):
        admission.buffers = 0
    return world


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("shards", [2, 3])
def test_connections_are_cut_and_pools_are_full(seed: int, shards: int) -> None:
    world = world_with_little_room(seed, shards)
    checkers = [Checker(2.0**n, 4) for n in range(4)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.run()
    params = final(world)
    total = sum(c.sent for c in checkers)
    assert sum(c.used for c in checkers) == params.version
    assert params.version == 16
    assert all((a == -total).all() for a in params.values())
    for host in world.hosts:
        assert host.coordinator.pools[0].out == 0, "every buffer has come back"


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_other_policies(policy: str, seed: int) -> None:
    world = world_with_little_room(seed, 3, policy, {"lr": 0.01}, workers=3)
    checkers = [Checker(2.0**n, 5, SINGLE) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.run()
    Checker.check(final(world, SINGLE))
    for host in world.hosts:
        assert host.coordinator.pools[0].out == 0, "every buffer has come back"
        assert not host.kernels


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("policy", ["asgd", "dcasgd"])
def test_coded_parameters(policy: str, seed: int) -> None:
    """Small whole numbers are what they are in fp16: so whole versions are seen here too."""
    model = {"w": np.zeros((300, 5), np.float32), "b": np.zeros(7, np.float32)}
    settings = {"lr": 1, "lam": 0, "adaptive": False} if policy == "dcasgd" else {"lr": 1}
    world = world_with_little_room(seed, 3, policy, settings, fetch_codec=("fp16",), fetch_lag=1)
    checkers = [Checker(2.0**n, 5, model) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.run()
    params = final(world, model)
    total = sum(c.sent for c in checkers)
    assert params.version == 15
    assert all((a == -total).all() for a in params.values())
    for host in world.hosts:
        assert host.coordinator.pools[0].out == 0, "every buffer has come back"


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("seed", seeds(3))
def test_relaxed_reads(seed: int) -> None:
    """They may mix versions; in the end all is there."""
    world = world_with_little_room(seed, 3, relaxed=True)
    checkers = [Checker(2.0**n, 5) for n in range(3)]
    for checker in checkers:
        checker.check = lambda params: None  # type: ignore[method-assign]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.run()
    params = final(world)
    total = sum(c.sent for c in checkers)
    assert params.version == 15
    assert all((a == -total).all() for a in params.values())
