"""Coded pushes over shards, and gradients that are applied again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from tests.rows import each_row
from tests.shards.test_hostile import done, ones
from tests.shards.world import Actor, World

CODECS = ["fp16", "bf16", "int8", "topk:0.1", "onebit", "lowrank:2"]

EVEN = {name: np.zeros((128, 64), np.float32) for name in "abcd"}
"""On two or four shards no tensor is cut."""

CUT = {"big": np.zeros((512, 64), np.float32), "small": np.zeros(5, np.float32)}


def trained(shards: int, model: Any, codec: str, steps: int = 4, **settings: Any) -> Params:
    world = World(0, shards, "asgd", {"lr": 0.5, **settings}, push_codec=(codec,))
    actor = Actor(world, "worker", lambda actor: None)
    actor.done = True
    world.actors.append(actor)
    actor.connect()
    world.settle()
    done(world, actor, actor.requests.define(model))
    assert actor.session.info.layout is not None
    params, random = Params(actor.session.info.layout), np.random.default_rng(3)
    done(world, actor, actor.requests.fetch(params))
    for _ in range(steps):
        grads = {name: random.normal(size=a.shape).astype("f4") for name, a in params.items()}
        receipt = done(world, actor, actor.requests.push(grads, params, params))
    assert receipt.version == params.version == steps
    if shards > 1:
        assert world.lead_brain.report()[1]["version"] == steps
    return params


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_where_no_tensor_is_cut_the_bits_are_the_same(codec: str, shards: int) -> None:
    alone, spread = trained(1, EVEN, codec), trained(shards, EVEN, codec)
    for name, array in alone.items():
        assert array.any()
        assert array.tobytes() == spread[name].tobytes(), name


def test_a_coded_gradient_that_is_clipped_makes_the_step_of_one_server() -> None:
    """The lead decodes its portion to measure it, and still knows of which push it is."""
    alone, spread = trained(1, EVEN, "int8", clip=1.0), trained(2, EVEN, "int8", clip=1.0)
    for name, array in alone.items():
        assert np.abs(array).max() > 0
        np.testing.assert_allclose(array, spread[name], rtol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_coded_gradients_of_groups_are_clipped_by_followers_as_by_one_server(codec: str) -> None:
    """Each has whole groups. A follower reads the payloads again for the step, each scaled."""
    settings = {"clip": 9, "per_tensor": "clip=1@a clip=2@c clip=0.5@d"}
    alone, spread = (trained(shards, EVEN, codec, **settings) for shards in (1, 4))
    free = trained(1, EVEN, codec)
    for name, array in alone.items():
        assert array.tobytes() == spread[name].tobytes() != free[name].tobytes(), name


@each_row("codec", CODECS)
def test_pieces_are_coded_each_as_a_tensor_of_its_own(codec: str) -> None:
    spread = trained(3, CUT, codec)
    random = np.random.default_rng(3)
    total = np.zeros_like(CUT["big"])
    for _ in range(4):
        total -= 0.5 * random.normal(size=total.shape).astype("f4")
        random.normal(size=5)
    moved = spread["big"]
    for rows in np.array_split(np.arange(512), 3):  # each shard's have moved the right way
        assert float((moved[rows] * total[rows]).sum()) > 0.1 * float((moved[rows] ** 2).sum()) > 0
    if codec in ("fp16", "bf16", "int8"):
        np.testing.assert_allclose(moved, total, atol=0.1)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_a_bad_value_in_a_piece_is_named(codec: str) -> None:
    world = World(0, 3, "asgd", {"lr": 0.5}, push_codec=(codec,))
    actor = Actor(world, "worker", lambda actor: None)
    actor.done = True
    world.actors.append(actor)
    actor.connect()
    world.settle()
    done(world, actor, actor.requests.define(CUT))
    assert actor.session.info.layout is not None
    params = Params(actor.session.info.layout)
    done(world, actor, actor.requests.fetch(params))
    grads = ones(params)
    grads["big"][400, 7] = np.nan
    with pytest.raises(Exception, match=r"'big' holds nan at \[400, 7\]"):
        actor.requests.push(grads, params, params)
    assert done(world, actor, actor.requests.push(ones(params), params, params)).version == 1


@pytest.mark.parametrize("bound", [1 << 20, 100])
def test_a_gradient_is_applied_again(bound: int) -> None:
    """On every shard; or, if it is not kept any more, on none."""
    world = World(0, 2, "fasgd", {"lr": 0.5}, gate="bfasgd:skipped=reapply", recall=bound)
    alone = World(0, 1, "fasgd", {"lr": 0.5}, gate="bfasgd:skipped=reapply", recall=2 * bound)
    ends = []
    for each in (world, alone):
        actor = Actor(each, "worker", lambda actor: None)
        actor.done = True
        each.actors.append(actor)
        actor.connect()
        each.settle()
        done(each, actor, actor.requests.define({"w": np.zeros((30, 2), np.float32)}))
        assert actor.session.info.layout is not None
        params = Params(actor.session.info.layout)
        done(each, actor, actor.requests.fetch(params))
        done(each, actor, actor.requests.push(ones(params, 3), params, params))
        used = [done(each, actor, actor.requests.reapply(params, params)).used for _ in range(3)]
        done(each, actor, actor.requests.push(ones(params, 2), params, params))
        used.append(done(each, actor, actor.requests.reapply(params, params)).used)
        assert used == [bound > 100] * 4
        ends.append((params.version, params["w"].tobytes()))
        for host in each.hosts:
            assert host.coordinator.pools[0].out == 0
    assert ends[0] == ends[1]
    kept = len(world.followers[0].coordinator._buffers._by_number)
    assert kept == (bound > 100), "what is not kept any more is forgotten everywhere"
