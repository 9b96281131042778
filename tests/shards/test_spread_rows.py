"""Rows of tables on all shards: the same bits as on one server, whatever happens to connections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.client import AsyncClient
from aiops.durable.commit_gate import Acks
from aiops.engine.events import Paused, Stopping
from aiops.errors import BadPush, UsageError
from aiops.model.row_shards import (
    cut_rows,
    shards_of,
)
from aiops.model.tables import Table
from aiops.serving.config import Config
from aiops.shards.follower import Follower
from tests.rows import each_row
from tests.shards.kept_world import KeptWorld
from tests.shards.world import Actor, World

ROWS = 60
TABLES = {"a": Table(ROWS, 3, init="normal", seed=3), "b": Table(1 << 20, 1, dtype="float64")}


def asked(seed: int) -> list[tuple[Any, ...]]:
    """The pushes and fetches of one client: table, ids, gradients (None: a fetch), ids wanted."""
    draw, found = np.random.default_rng(seed), list[tuple[Any, ...]]()
    for _ in range(10):
        name = draw.choice(["a", "b"])
        table = TABLES[name]
        ids, wanted = (draw.integers(0, ROWS, draw.integers(1, 7)) for _ in range(2))
        grads = draw.normal(size=(len(ids), table.width)).astype(table.dtype)
        found.append((name, ids, grads if draw.random() < 0.7 else None, wanted))
    return [*found, ("a", np.arange(ROWS), None, ()), ("b", np.arange(ROWS), None, ())]


def answers(world: World, seed: int) -> list[Any]:
    """Everything that one client is answered."""
    found, plan = list[Any](), iter(asked(seed))

    def script(actor: Actor) -> Any:
        if actor.request is None:
            return actor.ask(actor.requests.define({"w": np.zeros(4, np.float32)}, TABLES))
        found.append(actor.request.value())
        for name, ids, grads, wanted in plan:
            if grads is None:
                return actor.ask(actor.requests.fetch_rows(name, ids))
            return actor.ask(actor.requests.push_rows(name, ids, grads, version=0, wanted=wanted))
        return None

    world.actors.append(Actor(world, "a", script))
    world.run()
    return found[1:]


def plain(answer: Any) -> Any:
    if isinstance(answer, tuple):
        receipt, rows = answer
        return receipt.version, receipt.staleness, rows.tolist()
    return answer.tolist()


@pytest.mark.parametrize("policy", ["asgd", "fasgd", "exponential", "adam", "per tensor"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_are_those_of_one_server_though_connections_are_cut(
    policy: str, seed: int
) -> None:
    settings: dict[str, Any] = {"lr": 0.5}
    if policy == "adam":
        policy, settings = "asgd", {"lr": 0.5, "optimizer": "adam"}
    if policy == "per tensor":
        others = "weight_decay=0.25@a lr=0.125@b"
        policy, settings = "asgd", {"lr": 0.5, "optimizer": "adagrad", "per_tensor": others}
    meant = [plain(each) for each in answers(World(0, 1, policy, settings), seed)]
    world = World(seed, 3, policy, settings, spread_tables=True)
    world.cuts = 0.02 if seed else 0.0
    assert [plain(each) for each in answers(world, seed)] == meant
    followers = [host.coordinator for host in world.followers]
    stores = [world.engine.tables, *(f.rows.engine.tables for f in followers)]  # type: ignore[union-attr]
    for number in range(2):
        stored = [store[number].stored_ids().tolist() for store in stores]
        for shard, ids in enumerate(stored):
            assert ids, "each shard has some"
            assert (shards_of(np.array(ids), 3) == shard).all()
            assert stores[shard][number].made == len(ids)
    for follower in followers:
        assert isinstance(follower, Follower)
        assert not any(pool.out for pool in follower.pools), "the rows' buffers are free again"


@each_row("bad", [9e17, np.nan, 1e18])
def test_a_bad_value_of_one_shard_is_refused_before_any_is_sent(bad: float) -> None:
    world, found = World(1, 3, spread_tables=True), list[Any]()
    many = np.r_[np.arange(ROWS), 7, 7]
    grads = np.ones((len(many), 3), np.float32)
    grads[many == 7] = bad

    def script(actor: Actor) -> Any:
        requests = actor.requests
        if actor.request is None:
            return actor.ask(requests.define({}, TABLES))
        found.append(actor.request)
        if len(found) > 1:
            return None
        with pytest.raises(BadPush, match=r"row 7 .*1e18.*nothing of this push was applied"):
            requests.push_rows("a", many, grads, version=0)
        return actor.ask(requests.fetch_rows("a", np.arange(ROWS)))

    world.actors.append(Actor(world, "a", script))
    world.run()
    table = world.engine.tables[0]
    fresh = np.empty((ROWS, 3), np.float32)
    table.gather(np.arange(ROWS), fresh)
    stores = [table, *(host.coordinator.rows.engine.tables[0] for host in world.followers)]
    assert [(store.made, store.version) for store in stores] == [(0, 0)] * 3
    assert np.array_equal(found[1].value(), fresh)


def pushed_by_four(world: World) -> None:
    """Have four clients push 8 times each to all rows of a table, at the same time; look at it."""
    done = list[Any]()

    def script(actor: Actor) -> Any:
        if actor.request is None:
            return actor.ask(actor.requests.define({}, {"z": Table(ROWS, 1, init="zeros")}))
        if actor.state.setdefault("pushes", 0) == 8:
            done.append(actor.request.value())
            return None
        actor.state["pushes"] += 1
        ids = np.arange(ROWS)
        return actor.ask(actor.requests.push_rows("z", ids, np.ones((ROWS, 1), np.float32)))

    world.actors += [Actor(world, name, script) for name in "abcd"]
    world.run()
    stores = [world.engine.tables[0]]
    stores += [host.coordinator.rows.engine.tables[0] for host in world.followers]
    assert len(done) == 4
    for shard, store in enumerate(stores):
        ids, rows = store.stored()
        assert (shards_of(ids, 3) == shard).all()
        assert (rows == -32).all()
        assert store.version == 32
    assert sum(store.made for store in stores) == ROWS


def test_pushes_that_race_are_applied_once_each_on_every_shard() -> None:
    world = World(3, 3, settings={"lr": 1}, spread_tables=True)
    world.cuts = 0.02
    pushed_by_four(world)


@pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_or_doubled_when_servers_are_killed(acks: Acks, seed: int) -> None:
    world = KeptWorld(seed, 3, settings={"lr": 1}, acks=acks, spread_tables=True)
    world.cuts, world.kills, world.dues = 0.01, 0.004, 0.02
    world.losses = 0.002 * (acks is Acks.DURABLE)
    pushed_by_four(world)
    assert world.killed > 5


@testing.virtual()
async def test_a_server_of_three_serves_rows_as_one_does() -> None:
    rows = dict[int, Any]()
    for shards in (1, 3):
        given: dict[str, Any] = {"set": {"lr": 1}, "kernels": "numpy"}
        if shards > 1:
            given |= {"shards": shards, "spread_tables": True}
        async with (
            aiops.serve(policy="asgd", **given) as server,
            AsyncClient(server.url, role="worker") as client,
        ):
            await client.define({}, TABLES)
            ids = np.arange(0, 40_000, 7) % ROWS
            receipt = await client.push_rows("a", ids, np.ones((len(ids), 3), np.float32))
            assert receipt.version == 1
            rows[shards] = await client.fetch_rows("a", np.arange(ROWS))
            [first, _second] = (await client.stats())["tables"]
            assert (first["made"], first["rows_pushed"]) == (ROWS, len(ids))
    assert np.array_equal(rows[1], rows[3])


# ---------------------------------------------------------------- the hash, and the parts


def test_the_hash_is_the_one_that_is_documented() -> None:
    def shard(id: int, shards: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            id = (id ^ id >> 33) * factor % (1 << 64)
        return ((id ^ id >> 33) >> 32) * shards >> 32

    ids = np.r_[np.arange(100), (1 << 40) - 1]
    for shards in (1, 2, 5, 1000):
        assert shards_of(ids, shards).tolist() == [shard(int(id), shards) for id in ids]


@each_row("stride", [1, 2, 4, 1 << 10, 1 << 20, 1_000_003])
def test_rows_of_any_stride_lie_evenly(stride: int) -> None:
    counts = np.bincount(shards_of(np.arange(40_000) * stride, 4), minlength=4)
    assert (np.abs(counts - 10_000) < 500).all(), "six standard deviations"


def test_rows_are_cut_in_their_order() -> None:
    ids = np.array([5, 9, 5, 1, 5, 9])
    cut = cut_rows(ids, 3)
    for shard in range(3):
        mine = cut.order[cut.edges[shard] : cut.edges[shard + 1]]
        assert mine.tolist() == np.flatnonzero(shards_of(ids, 3) == shard).tolist()


def test_rows_on_several_servers_have_a_schedule_of_updates_alone() -> None:
    settings = {"schedule_unit": "seconds"}
    world, found = World(1, 3, "asgd", settings, spread_tables=True), list[Any]()

    def script(actor: Actor) -> Any:
        if actor.request is None:
            return actor.ask(actor.requests.define({}, TABLES))
        found.append(actor.request)
        return None

    world.actors = [Actor(world, "one", script)]
    world.run()
    with pytest.raises(BadPush, match=r"have no common clock.*--set schedule_unit=updates"):
        found[0].value()


def test_one_server_has_no_others_to_spread_rows_over() -> None:
    with pytest.raises(UsageError, match="needs several servers"):
        Config(spread_tables=True)


# ---------------------------------------------------------------- rows that are evicted


@pytest.mark.parametrize(("bounds", "same"), [({"max_age": 16}, True), ({"max_rows": 30}, False)])
def test_rows_are_evicted_on_every_server(bounds: dict[str, int], same: bool) -> None:
    """By age as on one server, whose clock all have; each stores its share of the most rows."""
    found, counts = [], []
    for shards in (1, 3):
        world = World(1, shards, settings={"lr": 1}, spread_tables=shards > 1)
        table, draw = Table(1000, 1, init="zeros", **bounds), np.random.default_rng(0)
        rows = list[Any]()

        def script(
            actor: Actor, table: Table = table, draw: Any = draw, rows: list[Any] = rows
        ) -> Any:
            if actor.request is None:
                return actor.ask(actor.requests.define({}, {"e": table}))
            step = actor.state["step"] = actor.state.get("step", 0) + 1
            if step <= 60:
                ids = draw.integers(0, 1000, 4)
                return actor.ask(actor.requests.push_rows("e", ids, np.ones((4, 1), np.float32)))
            rows.append(actor.request.value())
            ask = actor.requests.fetch_rows("e", np.arange(1000))
            return None if step > 61 else actor.ask(ask)

        world.actors.append(Actor(world, "a", script))
        world.run()
        stores = [world.engine.tables[0]]
        stores += [host.coordinator.rows.engine.tables[0] for host in world.followers]
        counts.append(sum(store.made for store in stores))
        assert sum(store.evicted for store in stores)
        found.append(rows[-1])
        assert all(store.made == len(store.stored_ids()) for store in stores)
        assert not bounds.get("max_rows") or counts[-1] <= bounds["max_rows"]
    assert np.array_equal(*found) == same


def versions(world: World) -> list[int]:
    """The clock of a table on each server."""
    followers = [host.coordinator.rows for host in world.followers]
    engines = [world.engine, *(each.engine for each in followers if each is not None)]
    return [engine.tables[0].version for engine in engines if engine.tables]


def pushes(count: int) -> Any:
    """A client that pushes so often to all rows."""

    def script(actor: Actor) -> Any:
        if actor.request is None:
            return actor.ask(actor.requests.define({}, {"z": Table(ROWS, 1, init="zeros")}))
        actor.state["pushes"] = actor.state.get("pushes", -1) + 1
        if actor.state["pushes"] == count:
            return None
        ids = np.arange(ROWS)
        return actor.ask(actor.requests.push_rows("z", ids, np.ones((ROWS, 1), np.float32)))

    return script


def until_told(world: World) -> None:
    """Have the lead's orders arrive, and the followers' reports."""
    while any(leash.line.up.bytes or leash.line.down.bytes for leash in world.lead.orders):
        for leash in world.lead.orders:
            leash.line.host.arrive(leash.line, 1 << 16)
            leash.arrive(1 << 16)


@pytest.mark.parametrize("kind", ["paused", "ends"])
def test_a_pause_or_an_end_is_one_of_all_servers(kind: str) -> None:
    """A follower refuses its share of a push, as the lead does, until that takes pushes again."""
    world = KeptWorld(5, 3, settings={"lr": 1}, spread_tables=True)
    world.actors.append(Actor(world, "a", pushes(5)))
    world.run()
    event = Paused(world.now, "for a test") if kind == "paused" else Stopping(world.now, True)
    world.lead.post(event)
    until_told(world)
    world.actors.append(Actor(world, "b", pushes(5)))
    for killed in ([], [1], [0] if kind == "paused" else []):
        world.kill(killed)  # one that comes back is told, or tells, again
        for _ in range(200):
            world.step()
            assert set(versions(world)) == {5}
    if kind == "paused":
        world.lead.post(Paused(world.now, ""))
    else:
        world.kill([0])
    world.run()
    assert versions(world) == [10, 10, 10]
