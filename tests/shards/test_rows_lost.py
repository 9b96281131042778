"""Pushes of rows that one server of several has lost: the client is told of each, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.known_run import AcknowledgedPushes
from aiops.durable.commit_gate import Acks
from aiops.errors import NotReady
from aiops.model.tables import Table
from tests.seeds import seeds
from tests.shards.kept_world import Actor, KeptWorld

PUSHES, ROWS, CLIENTS = 12, 40, 2
TABLES = {"z": Table(CLIENTS * PUSHES * ROWS, 1, init="zeros")}


def ids_of(client: int, push: int) -> Any:
    """The rows of a push, which no other has; each server has some."""
    return (client * PUSHES + push) * ROWS + np.arange(ROWS)


def pusher(client: int, acknowledged: list[Any]) -> Any:
    def script(actor: Actor) -> Any:
        pushed, error = actor.state.pop("ids", None), actor.request and actor.request.error
        if actor.request is None or isinstance(error, NotReady):  # there is no model any more
            return actor.ask(actor.requests.define({}, TABLES))
        if pushed is not None and error is None:
            acknowledged.append(pushed)
        step = actor.state["step"] = actor.state.get("step", -1) + 1
        if step == PUSHES + 1:  # asked once more, to be told of what was lost since
            return actor.ask(actor.requests.fetch_rows("z", np.arange(3)))
        if step >= PUSHES:
            return None
        ids = actor.state["ids"] = ids_of(client, step)
        grads = np.ones((ROWS, 1), np.float32)
        return actor.ask(actor.requests.push_rows("z", ids, grads, version=0))

    return script


def stored(world: KeptWorld) -> set[int]:
    """The rows that any server has, of which each push made its own."""
    tables = [world.engine.tables, *(h.coordinator.rows.engine.tables for h in world.followers)]
    rows = set[int]()
    for [table] in tables:
        ids, values = table.stored()
        assert (values == -1).all(), "none is applied twice"
        rows |= {*ids.tolist()}
    return rows


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("acks", [Acks.APPLIED, Acks.WRITTEN, Acks.DURABLE])
def test_what_a_loss_of_power_takes_from_any_server_is_told(seed: int, acks: Acks) -> None:
    world = KeptWorld(seed, 3, settings={"lr": 1}, acks=acks, spread_tables=True)
    world.cuts, world.losses, world.dues = 0.01, 0.01, 0.02
    counts = [list[Any]() for _ in range(CLIENTS)]
    world.actors += [Actor(world, name, pusher(n, counts[n])) for n, name in enumerate("ab")]
    world.run()
    world.cuts = world.losses = 0
    for actor in world.actors:
        actor.done = False
    world.run()
    rows = stored(world)
    for actor, acknowledged in zip(world.actors, counts, strict=True):
        lost = sum(not rows.issuperset(ids.tolist()) for ids in acknowledged)
        assert actor.session.restarts.rolled_back == lost
        assert not (lost and acks is Acks.DURABLE)


def test_numbers_that_are_removed() -> None:
    pushes = AcknowledgedPushes()
    for first, last in ((1, 5), (8, 9), (20, 30)):
        pushes.add(first, last)
    assert pushes.remove(4, 22) == 7
    assert pushes.runs == [[1, 3], [23, 30]]
    assert pushes.remove(25, 26) == 2
    assert pushes.runs == [[1, 3], [23, 24], [27, 30]]
    assert pushes.remove(10, 12) == 0
