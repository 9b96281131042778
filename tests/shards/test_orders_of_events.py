"""Whatever comes when: what any answer brings is of one version, and each push counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from tests.shards.world import Actor, World

MODEL = {
    "w": np.zeros((50, 3), np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "b": np.zeros(7, np.float32),
    "double": np.zeros(20, np.float64),
    "half": np.zeros((3, 2), np.float16),
}


class Checker:
    """A client that pushes the same number everywhere, so that every version is flat."""

    def __init__(self, number: float, pushes: int) -> None:
        self.number, self.left = number, pushes
        self.params: Params | None = None
        self.sent = 0.0
        self.asked = ""

    def __call__(self, actor: Actor) -> Any:
        talk, random = actor.talk, actor.world.random
        if actor.request is not None:
            result = actor.request.value()
            if self.asked == "push":
                assert result.used
            if self.params is not None:
                self.check(self.params)
        if not talk.ready or talk.layout is None:
            self.asked = "define"
            return talk.define(MODEL)
        if self.params is None:
            self.params = Params(talk.layout)
            self.asked = "fetch"
            return talk.fetch(self.params)
        if not self.left:
            return None
        self.asked = random.choice(("push", "push", "exchange", "fetch"))
        if self.asked == "fetch":
            return talk.fetch(self.params)
        self.left -= 1
        self.sent += self.number
        grads = {name: np.full(a.shape, self.number, a.dtype) for name, a in self.params.items()}
        into = self.params if self.asked == "exchange" else None
        self.asked = "push"
        return talk.push(grads, self.params, into)

    @staticmethod
    def check(params: Params) -> None:
        values = {float(v) for a in params.values() for v in a.reshape(-1).tolist()}
        assert len(values) <= 1, f"a mixture of versions: {values}"


def final(world: World) -> Params:
    """What a client that comes later fetches."""
    checker = Checker(0, 0)
    late = Actor(world, "late", checker)
    world.actors.append(late)
    world.cuts = 0
    world.run()
    assert checker.params is not None
    return checker.params


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_asynchronous_clients(seed: int, shards: int) -> None:
    world = World(seed, shards)
    checkers = [Checker(2.0**n, 6) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.run()
    total = sum(c.sent for c in checkers)
    params = final(world)
    assert params.version == 18
    assert all((a == -total).all() for a in params.values())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("shards", [2, 3])
def test_connections_are_cut_and_pools_are_full(seed: int, shards: int) -> None:
    world = World(seed, shards)
    checkers = [Checker(2.0**n, 4) for n in range(4)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.cuts = 0.005
    for host in world.hosts:  # after the model is there, room for one push, or not even that
        host.brain.pools[0].bound = 1
        intake = host.brain.engine.intake if host is world.lead else host.brain.intake
        intake.buffers = 0
    import aiops.intake

    room, aiops.intake._ROOM = aiops.intake._ROOM, 1
    try:
        world.run()
        params = final(world)
    finally:
        aiops.intake._ROOM = room
    total = sum(c.sent for c in checkers)
    assert params.version == 16
    assert all((a == -total).all() for a in params.values())
    for host in world.hosts:
        assert host.brain.pools[0].out == 0, "every buffer has come back"
