"""Updates whose result is not finite, on several servers: refused whole by all, as by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.client import Client
from aiops.durable.commit_gate import Acks
from aiops.engine.events import Options
from aiops.errors import BadPush
from aiops.lab.torture.sharded_engine import ShardedEngine
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Layout
from aiops.store.parameters import Store, UpdateJob
from aiops.wire.messages import Ack, Error
from tests.rows import each_row
from tests.seeds import seeds
from tests.shards.kept_world import KeptWorld
from tests.shards.test_orders_of_events import Checker, final
from tests.shards.world import Actor, World
from tests.support import assert_same, server_process

ROWS = tuple((f"t{n}", dtype, (40,)) for n, dtype in enumerate(("float32", "float64", "float32")))
LAST = ROWS[-1][0]
HALVES = tuple((f"h{n}", "float16", (64,)) for n in range(3))


class Servers:
    """A model on some servers, and its two workers."""

    def __init__(
        self,
        shards: int,
        policy: str,
        settings: Any,
        rows: Any = ROWS,
        workers: int = 2,
        **more: Any,
    ) -> None:
        self.layout = Layout(rows)
        data = aligned(self.layout.nbytes)
        for view in Arena(self.layout, data).views.values():
            view[...] = np.linspace(-1, 1, view.size)
        options = Options(workers=workers, backend="numpy", shards=shards, shard_bytes=1, **more)
        self.engine = ShardedEngine(find(policy).make(settings), options, random.Random(shards))
        self.engine.define(rows, data)
        self.seqs = dict.fromkeys(range(1, workers + 1), 0)
        for peer in self.seqs:
            self.engine.join(peer)

    def push(self, peer: int, value: float, **others: float) -> list[Any]:
        """Push this value everywhere, but for tensors with another."""
        data = aligned(self.layout.nbytes)
        for name, view in Arena(self.layout, data).views.items():
            view[...] = others.get(name, value)
        self.seqs[peer] += 1
        return self.engine.push(peer, self.seqs[peer], data, fetch=False)

    @property
    def held(self) -> bytes:
        """Parameters, and the optimiser's state, of all servers."""
        stores = self.engine.stores
        arrays = [each for store in stores for section in store.state for each in section]
        arrays += [master for store in stores for master in store.masters if master is not None]
        return b"".join(array.tobytes() for array in (*self.engine.arenas, *arrays))


@each_row("shards", [2, 3, 4])
def test_it_is_refused_by_all_where_one_part_would_be_infinite(shards: int) -> None:
    """The last server alone has no proof, and no finite result."""
    servers = Servers(shards, "asgd", {"lr": 1e21})
    [fine] = servers.push(1, 1e-21)
    assert isinstance(fine, Ack)
    before = servers.held
    [refused] = servers.push(2, 0.0, **{LAST: 9e17})
    assert isinstance(refused, Error)
    assert refused.details["tensor"] == LAST
    assert "nothing of this push was applied" in refused.text
    assert servers.held == before
    assert servers.engine.engine.version == 1
    [fine] = servers.push(2, 1e-21)
    assert isinstance(fine, Ack)
    assert (fine.used, fine.version) == (True, 2)


def test_the_first_tensor_of_all_is_named() -> None:
    servers = Servers(3, "asgd", {"lr": 1e21})
    [refused] = servers.push(1, 9e17, t1=0.0)
    assert refused.details["tensor"] == "t0"


@pytest.mark.parametrize("shards", [2, 4])
def test_a_sum_is_dropped_by_all(shards: int) -> None:
    """The next step is made of the gradients that came after it."""
    many, one = Servers(shards, "hardsync", {"lr": 1e21}), Servers(1, "hardsync", {"lr": 1e21})
    before = many.held
    for servers in (many, one):
        assert servers.push(1, 0.0, **{LAST: 9e17}) == []  # it is held
        answers = servers.push(2, 0.0, **{LAST: 9e17})
        assert [type(each) for each in answers] == [Error, Error]
        assert "these 2 pushes" in answers[0].text
    assert many.held == before
    for servers in (many, one):
        servers.push(1, 2e-21)
        [*answers] = servers.push(2, 4e-21)
        assert [each.used for each in answers] == [True, True]
    assert b"".join(a.tobytes() for a in many.engine.arenas) == one.engine.arenas[0].tobytes()


def test_a_clipped_gradient_is_rehearsed_after_its_norm_is_known() -> None:
    servers = Servers(2, "asgd", {"lr": 1e30, "clip": 1e-9})
    servers.push(1, 1e3)
    assert servers.engine.rounds == ["measure", "rehearse", "step"]
    servers = Servers(2, "asgd", {"lr": 1e36, "clip": 1e5})
    before = servers.held
    [refused] = servers.push(1, 1e6)
    assert servers.engine.rounds == ["measure", "rehearse"]
    assert isinstance(refused, Error)
    assert servers.held == before


def test_the_gradients_of_a_group_without_a_limit_are_rehearsed_as_they_are() -> None:
    """The others would be finite, as their norm is 1e-9."""
    settings = {"lr": 1e30, "clip": 1e-9, "per_tensor": f"clip=0@{LAST}"}
    servers = Servers(2, "asgd", settings)
    before = servers.held
    [refused] = servers.push(1, 1e3, **{LAST: 1e17})
    assert isinstance(refused, Error)
    assert refused.details["tensor"] == LAST
    assert servers.held == before
    [answer] = servers.push(1, 1e9, **{LAST: 1e-3})
    assert answer.used
    assert servers.engine.rounds == ["measure", "rehearse", "measure", "rehearse", "step"]


class TestRounds:
    """What is proven on all servers takes one round."""

    @pytest.mark.parametrize("policy", ["asgd", "fasgd", "softsync", "hardsync", "easgd"])
    def test_usual_updates_are_rehearsed_once(self, policy: str) -> None:
        servers = Servers(3, policy, {})
        for step in range(40):
            servers.push(1 + step % 2, 1e-3)
        assert servers.engine.engine.version >= 20
        assert servers.engine.rounds.count("rehearse") == 2  # by each follower
        assert servers.engine.rounds.count("step") >= 80

    def test_float16_is_proven_for_gradients_like_those_seen(self) -> None:
        """A proof that holds for no larger ones: the lead knows those of every portion."""
        servers = Servers(2, "asgd", {"lr": 0.01}, HALVES)
        for step in range(64):
            servers.push(1 + step % 2, 1.0 + step % 3)
        rehearsed = servers.engine.rounds.count("rehearse")
        assert rehearsed == 1
        servers.push(1, 100.0)
        assert servers.engine.rounds[-2:] == ["rehearse", "step"]

    def test_only_servers_without_a_proof_rehearse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The lead's float64 is proven for all gradients, float16 for some four times as large."""
        rehearsed = list[str]()
        rehearse = Store.rehearse

        def noted(store: Store, job: UpdateJob) -> int:
            rehearsed.append((store.held or store.layout).sections[0].dtype.name)
            return rehearse(store, job)

        monkeypatch.setattr(Store, "rehearse", noted)
        servers = Servers(
            2, "asgd", {"lr": 1e-3}, (("a", "float16", (200,)), ("b", "float64", (50,)))
        )
        for power in range(5):
            servers.push(1, 5.0**power)
        assert rehearsed == ["float64", *["float16"] * 5]
        assert servers.engine.rounds == ["rehearse", "step"] * 5


class Wild(Checker):
    """A client whose pushes may be refused for what they would make of the model."""

    refused = 0

    def __call__(self, actor: Actor) -> Any:
        request = actor.request
        if request is not None and isinstance(request.error, BadPush):
            assert request.error.details["tensor"] in ("w", "last")
            self.refused += 1
            actor.request = None
        return super().__call__(actor)


def wild(world: World, pushes: int) -> list[Wild]:
    """Have three clients push, some of whose pushes are too large."""
    model = {"w": np.zeros((50, 3), np.float32), "last": np.zeros(60, np.float32)}

    numbers = 2.0**-70, 2.0**59, 2.0**-69
    checkers = [Wild(number, pushes, model) for number in numbers]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    return checkers


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_in_any_order_of_events(seed: int, shards: int) -> None:
    world = World(seed, shards, "asgd", {"lr": 2.0**70})
    checkers = wild(world, 6)
    world.run()
    params = final(world, checkers[0].model)
    assert [c.refused for c in checkers] == [0, 6, 0]
    assert params.version == 12
    assert all((a == -18.0).all() for a in params.values())


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
def test_with_servers_that_are_killed(seed: int, acks: Acks) -> None:
    """Between any two messages of a vote: the lead, a follower, or all."""
    world = KeptWorld(seed, 2 + seed % 3, "asgd", {"lr": 2.0**70}, acks)
    checkers = wild(world, 6)
    world.kills, world.dues = 0.004, 0.01
    world.run()
    world.kills = world.dues = 0
    params = final(world, checkers[0].model)
    assert [c.refused for c in checkers] == [0, 6, 0]
    assert params.version == 12
    assert all((a == -18.0).all() for a in params.values())
    world.kill(range(len(world.hosts)))
    again = final(world, checkers[0].model)
    assert_same(again, {name: params[name] for name in params})


def test_a_server_that_publishes_what_is_not_finite_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above look at what they say: without rehearsals the model is infinite."""
    monkeypatch.setattr(Store, "rehearse", lambda store, job: -1)
    servers = Servers(2, "asgd", {"lr": 1e21})
    servers.push(1, 0.0, **{LAST: 9e17})
    assert np.isinf(servers.engine.arenas[1].view("f4")).any()


@pytest.mark.slow
def test_real_processes(tmp_path: Any) -> None:
    model = {"a": np.ones((60, 20), np.float32), "b": np.ones((60, 20), np.float32)}
    flags = ("--policy", "asgd", "--lr", "1e21", "--shards", "2", "--shard-bytes", "1")
    with (
        server_process(*flags, "--kernels", "numpy", "--state", str(tmp_path / "state")) as server,
        Client(server.url, role="worker") as client,
    ):
        params = client.define(model)
        small = {name: np.full_like(array, 1e-21) for name, array in model.items()}
        client.exchange(params, small)
        assert_same(params, {name: np.zeros_like(array) for name, array in model.items()})
        for name in model:  # "b" is on the follower
            with pytest.raises(BadPush, match=f"would make '{name}' infinite") as caught:
                client.push(params, small | {name: np.full_like(small[name], 9e17)})
            assert caught.value.details["tensor"] == name
        assert_same(client.fetch(), {name: np.zeros_like(array) for name, array in model.items()})
        assert client.exchange(params, small).version == 2
        assert_same(params, {name: np.full_like(array, -1) for name, array in model.items()})
