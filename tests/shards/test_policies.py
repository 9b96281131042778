"""The same parameters to the last bit, whatever the policy, on one server and on several."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.client.lr_factors import LrFactors
from aiops.client.params import Params
from aiops.errors import StaleGradient
from tests.seeds import by_turns
from tests.shards.world import Actor, World

POLICIES: dict[str, dict[str, Any]] = {
    "asgd": {"lr": 0.1},
    "sasgd": {"lr": 0.1},
    "exponential": {"lr": 0.1},
    "downpour": {"lr": 0.1},
    "fasgd": {"lr": 0.01},
    "dcasgd": {"lr": 0.1},
    "gap-aware": {"lr": 0.1},
    "schedule-free": {},
    "schedule-free collecting": {"collect": 3},  # no matrix of this model is cut
    "softsync": {"lr": 0.1, "n": 2},
    "hardsync": {"lr": 0.1},
    "hardsync trimmed": {"lr": 0.1, "trim": 0.3},
    "softsync trimmed": {"lr": 0.1, "n": 1, "trim": 0.2, "optimizer": "momentum"},
    "hardsync reject": {"lr": 0.1, "admission": "reject"},
    "ssp": {"lr": 0.1},
    "rennala": {"lr": 0.1},
    "ringmaster": {"lr": 0.1},
    "diloco": {},
    "asgd per tensor": {
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "per_tensor": "weight_decay=0@b*,one lr=0.005@[!b]*",
    },
    "asgd examples": {"schedule": "cosine:80", "schedule_unit": "examples", "mini_batch": 4},
    "softsync per tensor": {"lr": 0.1, "n": 2, "per_tensor": "weight_decay=0.5@w lr=0.05@*o*"},
    "fedbuff": {},
    "easgd": {},
}

WORKERS = 3


def model() -> dict[str, Any]:
    random = np.random.default_rng(1)
    shapes = {"w": (41, 3), "none": (0, 2), "b": (5,), "one": (), "big": (300, 4)}
    arrays = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    arrays["double"] = random.normal(size=(9, 2))
    arrays["half"] = random.normal(size=33).astype("f2")
    return arrays


def trained(
    shards: int,
    policy: str,
    settings: dict[str, Any],
    steps: int = 8,
    straight: float = 0.0,
    kind: type[World] = World,
    lr_factors: LrFactors = None,
    **options: Any,
) -> tuple[dict[str, Any], list[Any], Any]:
    """Three workers in turn, who push all tensors or some; return what comes of it.

    ``straight``: the mean of the gradients. ``lr_factors``: of the learning rates.
    """
    policy = policy.partition(" ")[0]
    world = kind(0, shards, policy, settings, workers=WORKERS, **options)
    random, receipts = np.random.default_rng(2), []
    actors = [Actor(world, f"worker-{n}", lambda actor: None) for n in range(WORKERS)]
    world.actors = actors
    params: list[Params] = []
    for actor in actors:
        actor.done = True
        actor.connect()
        world.settle()
        request = actor.ask(actor.requests.define(model()))
        world.settle()
        request.value()
        assert actor.session.info.layout is not None
        params.append(Params(actor.session.info.layout))
        request = actor.ask(actor.requests.fetch(params[-1]))
        world.settle()
        request.value()
    open_: list[Any] = [None] * WORKERS
    for step in range(steps * WORKERS):
        number = step % WORKERS
        actor, mine = actors[number], params[number]
        if open_[number] is not None:
            if not open_[number].done:
                continue  # it waits for the others
            receipts.append(read(open_[number]))
        grads = {
            name: (straight + random.normal(size=array.shape)).astype(array.dtype)
            for name, array in mine.items()
        }
        if step % 4 == 3 and policy not in ("diloco", "fedbuff", "easgd", "hardsync"):
            grads = {name: grads[name] for name in ("w", "half", "big")}
        into = None if step % 5 == 4 else mine
        push = actor.requests.push(grads, mine, into, lr_factors=lr_factors)
        open_[number] = actor.ask(push)
        world.settle()
    for shard, host in enumerate(world.hosts):
        assert not host.kernels, shard
    late = Actor(world, "late", lambda actor: None)
    late.done = True
    world.actors.append(late)
    late.connect()
    world.settle()
    assert late.session.info.layout is not None
    last = Params(late.session.info.layout)
    request = late.ask(late.requests.fetch(last))
    world.settle()
    request.value()
    return last.numpy(), receipts, last.version


def test_a_gradient_to_be_computed_again_brings_the_parameters() -> None:
    world = World(0, 3, "hardsync", POLICIES["hardsync reject"], workers=1)
    actor = Actor(world, "worker", lambda actor: None)
    actor.done = True
    world.actors = [actor]
    actor.connect()
    world.settle()
    for request in (actor.requests.define(model()),):
        actor.ask(request)
        world.settle()
    assert actor.session.info.layout is not None
    params = Params(actor.session.info.layout)
    actor.ask(actor.requests.fetch(params))
    world.settle()
    grads = {name: np.ones_like(array) for name, array in params.items()}
    actor.ask(actor.requests.push(grads, params, None))
    world.settle()
    assert params.version == 0
    request = actor.ask(actor.requests.push(grads, params, params))
    world.settle()
    assert isinstance(request.error, StaleGradient)
    assert params.version == 1
    np.testing.assert_array_equal(params["big"], (model()["big"] - np.float32(0.1)))


def test_warnings_of_several_servers_are_those_of_one() -> None:
    """Of a statistic, which is summed over the parts that all of them have."""
    given = []
    for shards in (1, 3):
        worlds: list[World] = []

        class Kept(World):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                worlds.append(self)  # noqa: B023  (it is made in this round of the loop)

        trained(shards, "fasgd", {"eps": 0.82}, kind=Kept)
        given.append(worlds[0].engine.report()["warnings"])
    assert given[0] == given[1]
    [text] = given[0]
    assert "within 10 % of its floor" in text


def test_a_rate_that_rises_is_the_same_on_several_servers() -> None:
    """By a gauge, which is summed over the parts that all of them have."""
    found, gains = [], []
    for shards in (1, 3):
        worlds: list[World] = []

        class Kept(World):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                worlds.append(self)  # noqa: B023  (it is made in this round of the loop)

        arrays, _receipts, _version = trained(
            shards, "schedule-free", {}, steps=40, straight=1.0, kind=Kept
        )
        found.append({name: array.tobytes() for name, array in arrays.items()})
        gains.append(worlds[0].engine.report()["rate_gain"])
    assert found[0] == found[1]
    assert gains[0] == gains[1] > 1.5


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("pushed", [["big", "big", "big", "all"], ["b", "big", "w", "all", "big"]])
def test_sums_that_have_nothing_of_some_servers(pushed: list[str], shards: int) -> None:
    """And directions are made of what comes there next."""
    settings = {"collect": 2, "schedule": "constant", "rise": 1}
    found = [pushed_one_by_one(count, settings, pushed) for count in (1, shards)]
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["softsync", "schedule-free"])
def test_a_sum_that_was_refused_is_forgotten_where_the_next_begins_without_a_part(
    policy: str,
) -> None:
    """Of a matrix, its momentum too."""
    settings = {"softsync": {"n": 1, "lr": 1e15}, "schedule-free": {"collect": 2, "lr": 1e28}}
    found = []
    for shards in (1, 3):
        huge = pushed_one_by_one(shards, settings[policy], ["huge", "huge", "w", "all"], policy)
        calm = pushed_one_by_one(shards, settings[policy], ["w", "all"], policy)
        assert huge == calm
        some = [*["all"] * 4, *["huge half"] * 2, *["all"] * 4]  # not of the matrix "w"
        found.append((huge, pushed_one_by_one(shards, settings[policy], some, policy)))
    assert found[0] == found[1]


def pushed_one_by_one(
    shards: int, settings: dict[str, Any], pushed: list[str], policy: str = "schedule-free"
) -> dict[str, bytes]:
    """Return what comes of pushes by one worker: of one tensor each, of all, or of huge values."""
    world = World(0, shards, policy, settings, workers=2)
    actor = Actor(world, "worker", lambda actor: None)
    actor.done, world.actors = True, [actor]
    actor.connect()
    world.settle()
    actor.ask(actor.requests.define(model()))
    world.settle()
    assert actor.session.info.layout is not None
    params = Params(actor.session.info.layout)
    actor.ask(actor.requests.fetch(params))
    world.settle()
    random = np.random.default_rng(5)
    for name in pushed:
        scale = 9e17 if "huge" in name else 1e-15
        grads = {
            each: np.full_like(array, min(scale, 6e4) if array.dtype == np.float16 else scale)
            if "huge" in name
            else (scale * random.normal(size=array.shape)).astype(array.dtype)
            for each, array in params.items()
        }
        chosen = name.removeprefix("huge ").split()
        mine = grads if name in ("all", "huge") else {each: grads[each] for each in chosen}
        actor.ask(actor.requests.push(mine, params, params))
        world.settle()
    last = Params(actor.session.info.layout)
    actor.ask(actor.requests.fetch(last))
    world.settle()
    return {name: array.tobytes() for name, array in last.items()}


@pytest.mark.parametrize("policy", ["schedule-free collecting", "fasgd", "softsync trimmed"])
def test_factors_of_the_learning_rate_are_those_of_one_server(policy: str) -> None:
    """Of the tensors of each push, of which some are cut."""
    found = []
    for shards in (1, 3):
        given = policy, POLICIES[policy]
        arrays, _receipts, _version = trained(
            shards, *given, lr_factors={"big": 0.5, "w": 0.0, "half": 0.75, "b": 1.0}
        )
        found.append({name: array.tobytes() for name, array in arrays.items()})
    assert found[0] == found[1]
    start = model()
    assert found[0]["w"] == start["w"].tobytes()
    assert found[0]["big"] != start["big"].tobytes()


def read(request: Any) -> Any:
    if request.error is not None:
        return type(request.error), str(request.error)
    got = request.value()
    return got.version, got.staleness, got.mean_staleness, got.vbar, dict(got.vbars), got.used


@functools.cache
def alone(policy: str, groups: str = "", clip: int = 0) -> tuple[dict[str, Any], list[Any], Any]:
    """Return what one server makes of a policy, perhaps clipped, for all numbers of shards."""
    return trained(1, policy, settings_of(policy, groups, clip))


def settings_of(policy: str, groups: str, clip: int) -> dict[str, Any]:
    settings = POLICIES[policy]
    if not clip:
        return settings
    clauses = f"{settings.get('per_tensor', '')} {groups}".strip()
    return {**settings, "clip": clip, "per_tensor": clauses}


# Policies decide and compute, and the number of shards cuts what they compute with.
@pytest.mark.parametrize(("policy", "shards"), by_turns(POLICIES, [2, 7]))
def test_bit_identical(policy: str, shards: int) -> None:
    expected, said, version = alone(policy)
    arrays, receipts, got = trained(shards, policy, POLICIES[policy])
    assert version == got > 0
    assert receipts == said
    for name, array in expected.items():
        assert array.tobytes() == arrays[name].tobytes(), name


CLIPPED = [policy for policy in POLICIES if "clip" in find(policy.split()[0])().patterned]
APART = "clip=3@big clip=0@b clip=2@w,*o*"


# The norm of a group is taken before a policy has the gradient.
@pytest.mark.parametrize(("policy", "limited"), by_turns(CLIPPED, [("", 2), (APART, 4)]), ids=str)
def test_clipped(policy: str, limited: tuple[str, int]) -> None:
    """The norm is of all shards' portions; it may differ by the rounding of a double."""
    groups, shards = limited
    expected, _said, version = alone(policy, groups, 3)
    free, _said, _version = alone(policy)
    arrays, _receipts, got = trained(shards, policy, settings_of(policy, groups, 3))
    assert version == got > 0
    for name, array in expected.items():
        rtol = 1e-2 if array.dtype.itemsize == 2 else 1e-4
        np.testing.assert_allclose(arrays[name], array, rtol=rtol, atol=1e-5)
    assert not np.allclose(free["big"], expected["big"], rtol=1e-3), "it is clipped"


@pytest.mark.slow  # kernels are compiled
@pytest.mark.parametrize("policy", CLIPPED)
def test_groups_are_clipped_by_numba_as_by_numpy(policy: str) -> None:
    settings = settings_of(policy, APART, 3)
    expected, said, _version = trained(2, policy, settings)
    arrays, receipts, _version = trained(2, policy, settings, backend="numba")
    assert receipts == said
    for name, array in expected.items():
        assert array.tobytes() == arrays[name].tobytes(), name


@pytest.mark.parametrize("policy", CLIPPED)
def test_groups_of_whole_tensors_on_one_server_each_are_clipped_to_the_bit(policy: str) -> None:
    """The lead has "double", the follower "w" and "half"; "big", which is cut, has no limit."""
    apart = (
        f"{POLICIES[policy].get('per_tensor', '')} clip=0@* clip=1@double clip=0.5@half clip=2@w"
    )
    settings = {**POLICIES[policy], "per_tensor": apart.strip()}
    expected, said, version = trained(1, policy, settings)
    free, _said, _version = alone(policy)
    arrays, receipts, got = trained(2, policy, settings)
    assert version == got > 0
    assert receipts == said
    for name, array in expected.items():
        assert array.tobytes() == arrays[name].tobytes(), name
    for name in ("double", "half", "w"):
        assert free[name].tobytes() != expected[name].tobytes(), "it is clipped"


@pytest.mark.parametrize(("codecs", "policy"), [((), "dcasgd"), (("int8",), "asgd")])
def test_a_model_that_the_lead_holds_alone(codecs: tuple[str, ...], policy: str) -> None:
    """Nobody else hears of a push or a fetch; and all is what it is on one server."""
    world = World(0, 3, policy, POLICIES[policy], shard_bytes=1 << 20, fetch_codec=codecs)
    said: list[str] = []
    for leash in world.lead.orders:
        order = leash.order
        leash.order = lambda effect, order=order: (said.append(effect.message.kind), order(effect))
    actor = Actor(world, "worker", lambda actor: None)
    actor.done = True
    world.actors = [actor]
    actor.connect()
    world.settle()
    actor.ask(actor.requests.define(model()))
    world.settle()
    assert actor.session.info.layout is not None
    params = Params(actor.session.info.layout)
    grads = {name: np.ones_like(array) for name, array in model().items()}
    for number in range(6):
        request = actor.ask(
            actor.requests.push(grads, params, params) if number else actor.requests.fetch(params)
        )
        world.settle()
        request.value()
    assert params.version == 5
    assert said == ["load_shard", "load_shard"]
    assert [line["behind"] for line in world.lead_brain.report()] == [0, 0, 0]
    assert [line["bytes"] > 0 for line in world.lead_brain.report()] == [True, False, False]
