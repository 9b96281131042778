"""Parameters that are fetched coded, from several shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.codecs.choice import CodecChoice
from aiops.errors import RemoteProtocolError, Unavailable
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.model.placement import Placement
from aiops.store.delta_replica import _codecs
from aiops.wire.server_messages import ShardParts
from tests.rows import each_row
from tests.seeds import by_turns
from tests.shards.test_hostile import done, ones
from tests.shards.world import Actor, World

CODECS = ["fp16", "bf16", "int8", "topk:0.1", "onebit", "lowrank:2"]

EVEN = {name: np.zeros((128, 64), np.float32) for name in "abcd"}
"""On two or four shards no tensor is cut."""

CUT = {
    "big": np.zeros((512, 64), np.float32),
    "double": np.zeros((30, 50), np.float64),
    "small": np.zeros(5, np.float32),
}


class Training:
    """Workers in turn, on so many shards."""

    def __init__(
        self, shards: int, model: Any, *codecs: str, policy: str = "asgd", lr: float = 0.5
    ) -> None:
        self.world = World(0, shards, policy, {"lr": lr}, fetch_codec=codecs)
        self.random = np.random.default_rng(3)
        self.actors = [self.joined(model, f"worker-{n}") for n in range(2)]
        self.heard: list[Any] = []

    def joined(self, model: Any, name: str) -> tuple[Actor, Params]:
        actor = Actor(self.world, name, lambda actor: None)
        actor.done = True
        self.world.actors.append(actor)
        actor.connect()
        self.world.settle()
        done(self.world, actor, actor.requests.define(model))
        assert actor.session.info.layout is not None
        params = Params(actor.session.info.layout)
        done(self.world, actor, actor.requests.fetch(params))
        return actor, params

    def step(self, number: int, wanted: Any = None) -> None:
        actor, params = self.actors[number]
        grads = {n: self.random.normal(size=a.shape).astype(a.dtype) for n, a in params.items()}
        before = actor.session.traffic[0]
        receipt = done(self.world, actor, actor.requests.push(grads, params, params, wanted))
        self.heard.append((receipt.version, receipt.staleness, params.version))
        self.brought = actor.session.traffic[0] - before

    def replica(self) -> bytes:
        """What the shards hold together."""
        replica = self.world.engine.replica
        assert replica is not None
        replicas = [
            replica,
            *(host.coordinator.shard.replica for host in self.world.followers),
        ]
        numbers = {replica.current.number for replica in replicas}
        assert numbers == {replica.current.number}
        return b"".join(replica.current.arena.data.tobytes() for replica in replicas)


# Tensors are whole, so that a codec has the same of them on 2 servers and 4, and of all policies.
@pytest.mark.parametrize(
    ("codec", "shards", "policy"), by_turns(CODECS, [2, 4], ["asgd", "dcasgd", "fasgd"])
)
def test_where_no_tensor_is_cut_all_is_what_it_is_on_one_server(
    codec: str, shards: int, policy: str
) -> None:
    alone, spread = (Training(n, EVEN, codec, policy=policy, lr=0.01) for n in (1, shards))
    for training in (alone, spread):
        for step in range(12):
            training.step(step % 2 if step < 8 else 0)
        training.step(1)
    assert alone.heard == spread.heard
    for (_, theirs), (_, ours) in zip(alone.actors, spread.actors, strict=True):
        for name, array in theirs.items():
            assert array.any()
            assert array.tobytes() == ours[name].tobytes(), name
    assert alone.world.engine.replica is not None
    assert spread.world.engine.replica is not None
    replicas = [each.world.engine.replica for each in (alone, spread)]  # type: ignore[union-attr]
    assert replicas[0].report() == replicas[1].report(), "one decision, of the same numbers"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_what_a_reader_holds_is_the_shadow(shards: int, codec: str) -> None:
    training = Training(shards, CUT, codec)
    for step in range(10):
        training.step(step % 2)
        _actor, params = training.actors[step % 2]
        assert params.own().data.tobytes() == training.replica()
        assert params.version == training.world.engine.replica.current.number  # type: ignore[union-attr]
    training.step(1)
    raw = sum(array.nbytes for array in CUT.values())
    assert training.brought < raw * 0.8, "it came as increments"
    late, params = training.joined(CUT, "late")
    assert params.own().data.tobytes() == training.replica()
    assert late.session.traffic[0] > raw


def test_some_tensors_only_and_then_the_others() -> None:
    training = Training(3, CUT, "int8")
    layout = training.actors[0][0].session.info.layout
    assert layout is not None
    for step in range(6):
        training.step(0, wanted=np.array([layout.index["big"]]) if step % 3 else None)
    actor, params = training.actors[0]
    done(training.world, actor, actor.requests.fetch(params))
    assert params.own().data.tobytes() == training.replica()


def test_increments_are_forgotten_on_all_shards() -> None:
    training = Training(3, CUT, "fp16")
    for _step in range(20):
        training.step(0)
    assert training.world.engine.replica is not None
    oldest = training.world.engine.replica.oldest
    assert oldest > 10
    for host in training.world.followers:
        replica = host.coordinator.shard.replica
        assert oldest - replica.oldest <= 1, "told with the next"


def test_all_pieces_of_a_tensor_travel_one_way() -> None:
    """A piece that would be no shorter has the others sent as they are, too."""
    layout = Layout([("w", "float32", (400, 3))])
    found = {}
    for cut in (12 * 200, 12):
        pieces = Placement(layout, [0, cut]).all
        found[cut] = [codec is not None for codec in _codecs(pieces, CodecChoice.of(["lowrank:2"]))]
    assert found[12] == [False, False]
    layout = Layout([("w", "float32", (400, 30))])
    pieces = Placement(layout, [0, 120 * 200]).all
    assert all(_codecs(pieces, CodecChoice.of(["int8"])))


def test_values_that_run_away_are_sent_as_they_are() -> None:
    training = Training(2, CUT, "int8")
    training.step(0)
    training.step(0)
    actor, params = training.actors[0]
    grads = ones(params)
    grads["big"][-1] = 5e17
    for _ in range(5):
        done(training.world, actor, actor.requests.push(grads, params, params))
    assert params["big"][-1, 0] < -1e18
    assert params.own().data.tobytes() == training.replica()


def test_a_shard_that_is_gone_while_the_shadow_follows() -> None:
    """Whoever waits for it is told, and does not wait for ever."""
    training = Training(2, CUT, "int8")
    training.step(0)
    actor, params = training.actors[0]
    world = training.world
    request = actor.requests.push(ones(params), params, params)
    actor.flush()
    assert world.engine.training is not None
    delta_replies = world.engine.training.delta_replies
    assert delta_replies is not None
    while not delta_replies.waiting:
        found = world.choices()
        found[0]()
    world.lead.orders[0].lost()
    world.settle()
    assert isinstance(request.refusal, Unavailable)


@each_row("what", ["codec", "raw", "too long", "another version"])
def test_a_shard_that_sends_other_increments_than_announced(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(2, CUT, "int8")
    for _ in range(3):
        training.step(0)
    actor, params = training.actors[0]
    assert actor.session.info.placement is not None
    (branch,) = actor.session.shards.channels
    seen: list[Part] = []

    sink_for = branch._sink_for

    def tampered(message: Any) -> Any:
        if isinstance(message, ShardParts):
            part = next(part for part in message.parts if part.codec == "int8")
            seen.append(part)
            size = part.stop - part.start
            other = {
                "codec": part._replace(codec="fp16"),
                "raw": part._replace(codec="raw", nbytes=size),
                "too long": part._replace(nbytes=size + 1),
                "another version": part._replace(version=part.version + 1),
            }[what]
            parts = tuple(other if each is part else each for each in message.parts)
            message = ShardParts(message.id, message.version, parts)
        return sink_for(message)

    monkeypatch.setattr(branch, "_sink_for", tampered)
    actor.requests.push(ones(params), params, params)
    actor.flush()
    with pytest.raises(RemoteProtocolError):
        training.world.settle()
    assert seen
