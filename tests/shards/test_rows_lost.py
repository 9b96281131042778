"""Pushes of rows that one server of several has lost: the client is told of each, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.known_run import AcknowledgedPushes
from aiops.client.shards import APPLIED
from aiops.durable.commit_gate import Acks
from aiops.engine.events import Paused
from aiops.errors import ConnectionLost, NotReady, Restarted, Unavailable
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
        if isinstance(error, Restarted):  # it is not part of what is left, so it is made again
            actor.state["step"] -= 1
            return actor.ask(actor.requests.fetch_rows("z", np.arange(ROWS)))
        step = actor.state["step"] = actor.state.get("step", -1) + 1
        if step == PUSHES + 1:  # asked once more, to be told of what was lost since
            return actor.ask(actor.requests.fetch_rows("z", np.arange(3)))
        if step >= PUSHES:
            return None
        ids = actor.state["ids"] = ids_of(client, step)
        grads = np.ones((ROWS, 1), np.float32)
        return actor.ask(actor.requests.push_rows("z", ids, grads, wanted=ids))

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


def refused_push(seed: int) -> tuple[Actor, Any]:
    """A client, and its push, which the lead has refused, and followers may have applied."""
    world, acknowledged = KeptWorld(seed, 3, settings={"lr": 1}, spread_tables=True), list[Any]()
    [actor] = world.actors = [Actor(world, "a", pusher(0, acknowledged))]
    while len(acknowledged) < 2:
        world.step()
    world.lead.post(Paused(world.now, "for a test"))
    while actor.session.pending.refused is None:
        world.step()
    return actor, actor.request


def test_a_refusal_after_which_a_shard_has_applied_its_share_is_no_refusal() -> None:
    """The client's user is told that it is unknown, and may not push the same again."""
    kinds = set[bool]()
    for seed in range(12):
        actor, request = refused_push(seed)
        applied = APPLIED in request.refusal.details
        actor.session.pending.reject_refused(Unavailable("time is up"))
        assert isinstance(request.error, ConnectionLost if applied else Unavailable)
        kinds.add(applied)
    assert kinds == {True, False}
