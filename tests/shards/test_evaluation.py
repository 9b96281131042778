"""Fetches for evaluation, from several shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.engine.events import CopyDue
from aiops.errors import RemoteProtocolError
from aiops.shards.orders import EVALUATION, left_out
from tests.rows import each_row
from tests.seeds import seeds
from tests.shards.kept_world import KeptWorld
from tests.shards.test_coded_fetches import CUT, EVEN
from tests.shards.test_hostile import done
from tests.shards.test_orders_of_events import SINGLE, Checker, final
from tests.shards.world import Actor, World

SETTINGS = {"orthogonal": False, "rise": 1.0}

STEPS = 5


def evaluated(shards: int, model: Any) -> tuple[dict[str, Any], dict[str, Any], Params]:
    """Train on so many shards; return the parameters, those for evaluation, and a fetch of both."""
    world = World(0, shards, "schedule-free", SETTINGS)
    actor = Actor(world, "worker", lambda actor: None)
    actor.done = True
    world.actors.append(actor)
    actor.connect()
    world.settle()
    random = np.random.default_rng(3)
    done(world, actor, actor.requests.define(model))
    assert actor.session.info.layout is not None
    params, found = Params(actor.session.info.layout), Params(actor.session.info.layout)
    done(world, actor, actor.requests.fetch(params))
    for step in range(STEPS):
        grads = {n: random.normal(size=a.shape).astype(a.dtype) for n, a in params.items()}
        done(world, actor, actor.requests.push(grads, params, params))
        if step % 2:
            done(world, actor, actor.requests.fetch(found, evaluation=True))
    for _ in range(2):  # the second of the version that is there
        done(world, actor, actor.requests.fetch(found, evaluation=True))
    assert found.version == params.version == STEPS
    numbers, best = params.numpy(), found.numpy()
    done(world, actor, actor.requests.fetch(found, evaluation=True))
    return numbers, best, found


@each_row("model", [EVEN, CUT])
def test_several_servers_send_what_one_would(model: Any) -> None:
    params, one, _ = evaluated(1, model)
    for shards in (2, 3, 4):
        numbers, several, _ = evaluated(shards, model)
        for name, array in one.items():
            np.testing.assert_array_equal(several[name], array)
            np.testing.assert_array_equal(numbers[name], params[name])
            assert (array != params[name]).any()


@each_row("bad", [[-0.1], [1.1], [np.nan], [0.5, 0.5, 0.5], []])
def test_a_follower_takes_shares_alone(bad: list[float]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"run_update\.work"):
        left_out({EVALUATION: np.array(bad, "<f8").tobytes()}, 2)


def test_shares_are_those_of_the_pieces() -> None:
    assert left_out({EVALUATION: np.array([0.5], "<f8").tobytes()}, 2).tolist() == [0.5, 0.5]
    assert left_out({EVALUATION: np.array([0.5, 0.2], "<f8").tobytes()}, 2).tolist() == [0.5, 0.2]


class Evaluator:
    """A client that fetches for evaluation: each version is flat, as gradients are."""

    def __init__(self, fetches: int) -> None:
        self.left, self.params = fetches, list[Params]()

    def __call__(self, actor: Actor) -> Any:
        info = actor.session.info
        if actor.request is not None:
            actor.request.value()
            for params in self.params:
                Checker.check(params)
        if not actor.session.ready or info.layout is None:
            return actor.requests.define(SINGLE)
        if not self.left:
            return None
        self.left -= 1
        self.params = self.params or [Params(info.layout)]
        return actor.requests.fetch(self.params[0], evaluation=True)


@pytest.mark.parametrize("seed", seeds(6))
def test_servers_that_are_killed_send_one_version(seed: int) -> None:
    world = KeptWorld(seed, 3, "schedule-free", SETTINGS)
    workers = [Checker(2.0**n, 6, SINGLE) for n in range(2)]
    evaluators = [Evaluator(8) for _ in range(2)]
    scripts: list[Any] = [*workers, *evaluators]
    world.actors = [Actor(world, f"worker-{n}", script) for n, script in enumerate(scripts)]
    world.kills, world.dues = 0.003, 0.02
    world.run()
    world.kills = world.dues = 0
    assert final(world, SINGLE).version == 12
    assert not any(evaluator.left for evaluator in evaluators)


@pytest.mark.parametrize("policy", ["schedule-free", "asgd"])
@pytest.mark.parametrize("seed", seeds(4))
def test_copies_of_servers_that_are_killed_are_of_one_version(seed: int, policy: str) -> None:
    world = KeptWorld(seed, 3, policy, SETTINGS if policy == "schedule-free" else {"lr": 1})
    scripts: list[Any] = [Checker(2.0**n, 6, SINGLE) for n in range(2)]
    world.actors = [Actor(world, f"worker-{n}", script) for n, script in enumerate(scripts)]
    world.kills, world.dues = 0.003, 0.02
    found = list[tuple[int, float]]()
    due = 0
    while world.step():
        due += 1
        if due % 40 == 0 and world.lead.ended is None:
            world.lead.post(CopyDue(world.now))
        for collection in world.lead.collections:
            if collection.done and not collection.failure:
                values = {float(v) for a in collection.arena.views.values() for v in a.flat}
                assert len(values) == 1, "a mixture of versions"
                found.append((collection.version, *values))
                collection.failure = "it is looked at"
    world.kills = world.dues = 0
    assert final(world, SINGLE).version == 12
    assert len({version for version, _value in found}) > 2
    assert len(set(found)) == len({version for version, _value in found})
