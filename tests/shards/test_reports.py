"""What followers report: what is right is taken, all else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms.asgd import ASGD
from aiops.durable.standby import StandbyPosition, goes_on
from aiops.errors import RemoteProtocolError, refusal
from aiops.kernels import STATISTIC_CAP, Rule
from aiops.model.layout import Layout
from aiops.model.parts import LARGEST, Part
from aiops.model.placement import RAW, Placement
from aiops.shards.collecting import Collecting
from aiops.shards.counting import TrafficCount
from aiops.shards.reports import (
    check_largest,
    check_squares,
    check_state,
    check_statistic,
    is_small,
    read_fault,
    read_sums,
)
from aiops.shards.snapshot_sets import SnapshotSets
from aiops.store.finite_guard import refusal as refused_update
from aiops.wire.handshake import generation_proof
from aiops.wire.messages import PROTOCOL
from aiops.wire.server_messages import ShardState, TrafficCounted
from aiops.wire.standby_messages import StandbyWelcome
from tests.rows import each_row
from tests.shards.test_filtered import run, servers

refused = pytest.raises(RemoteProtocolError)


def state(**holds: Any) -> ShardState:
    return ShardState(0, True, "run", 1, 2, 5, 9, False, holds)


def test_a_state_that_is_right() -> None:
    check_state(state())
    check_state(
        state(
            portions=(1, LARGEST),
            versions=((7, True), (8, False)),
            snapshots=(),
            history=((1, 0), (3, 60)),
            reached=80,
            place=5,
            generation=6,
        )
    )


@each_row("largest", [-1e-9, 1.1e18, np.inf, -np.inf, np.nan])
def test_a_largest_magnitude_that_no_push_has(largest: float) -> None:
    """An infinite one would be in the norm filter's medians."""
    check_largest(0.0, 1)
    check_largest(1e18, 1)
    with pytest.raises(RemoteProtocolError, match="shard 1 has a largest magnitude of"):
        check_largest(largest, 1)


@each_row(
    "holds",
    [
        {"portions": 5},
        {"portions": ((),)},
        {"portions": (-1,)},
        {"snapshots": (True,)},
        {"snapshots": (1 << 60,)},
        {"versions": ((1, 1),)},
        {"versions": ((1,),)},
        {"history": ((1, 2, 3),)},
        {"history": ((1, True),)},
        {"history": None},
        {"reached": "x"},
        {"reached": -1},
        {"place": 1 << 63},
        {"generation": 1.0},
    ],
    ids=str,
)
def test_a_state_that_is_not(holds: dict[str, Any]) -> None:
    with refused:
        check_state(state(**holds))


def test_sums() -> None:
    assert read_sums(np.array([1, -2]).tobytes(), 1).tolist() == [1, -2]
    with refused:
        read_sums(b"1234567", 1)


def test_a_statistic_is_not_taken_for_the_refusal_of_an_update_that_was_made() -> None:
    """It may be below 0: a rule may report any array of its state."""
    sizes, cap = np.array([3, 1]), int(STATISTIC_CAP)
    check_statistic(np.array([0, cap]), sizes, 1)
    check_statistic(np.array([-3 * cap, -1]), sizes, 1)
    check_statistic(np.zeros(0, np.int64), sizes, 1)
    most = 3 * cap
    for sums in (refused_update(1), np.array([0, cap + 1]), np.array([-most - 1, 0])):
        with refused:
            check_statistic(sums, sizes, 1)


class Direction(ASGD):
    """Reports the mean of its gradients, which may be below 0."""

    name = "direction"

    def rule(self) -> Rule:
        return Rule(averaged, {"m": 0.0}, statistic="m")


def averaged(w: Any, g: Any, m: Any, step: Any) -> tuple[Any, ...]:
    m = 0.5 * m + 0.5 * g
    return w - step * g, m


def test_a_statistic_below_0_is_that_of_one_server() -> None:
    one, two = (servers(shards, "off", f"{__name__}:Direction") for shards in (1, 2))
    assert run(one, 20) == run(two, 20)
    sums = one.stores[0].sums
    assert sums.min() < 0 < sums.max()
    assert two.stores[0].sums.tolist() == sums.tolist()


def test_the_statistic_of_a_follower_is_as_large_as_its_part_of_each_tensor_allows() -> None:
    rows = (("a", "float32", (8,)), ("b", "float32", (6,)), ("c", "float32", (10,)))
    placement, all = Placement.even(Layout(rows), 2), np.arange(3)
    assert placement.sizes(0, all).tolist() == [8, 4]
    assert placement.sizes(1, all).tolist() == [2, 10]
    assert placement.sizes(1, np.array([0, 2])).tolist() == [10]


@each_row("squares", [-1.0, np.nan, np.inf])
def test_a_norm_that_is_none(squares: float) -> None:
    check_squares(np.array([4.0]).view(np.int64), 1)
    with refused:
        check_squares(np.array([squares]).view(np.int64), 1)


def test_details_of_a_fault_have_any_names_and_are_small() -> None:
    """They travel on to clients, as arguments of an error."""
    fault = read_fault({"code": "bad-push", "text": "no", "details": {"text": 1, "self": 2}})
    assert fault is not None
    assert fault.details == {"text": 1, "self": 2}
    assert refusal("bad-push", "no", {"text": 1, "self": 2}).details == fault.details
    long = read_fault({"code": "bad-push", "details": {"x": "x" * 5000}})
    assert long is not None
    assert long.details == {}


def test_what_clients_are_told_is_small() -> None:
    assert is_small({"acks": "durable", "rows": 7, "standbys": ({"name": "a", "lag": 0.5},)})
    deep = {"a": {"b": {"c": {"d": 1}}}}
    for value in (deep, {"x": "x" * 5000}, {"x": (0,) * 2000}, {"x": 1 << 63}):
        assert not is_small(value)
    count = TrafficCount(1)
    with refused:
        count._missing = {1}
        count.counted(1, TrafficCounted(0, {}, deep, {}))


def test_a_server_has_so_many_snapshots_and_no_more() -> None:
    """A follower may say without an end that it has another one."""
    sets = SnapshotSets()
    sets.servers = (0, 1)
    for cut in range(5000):
        sets.saved(1, cut, well=True)
    sets.holds(0, range(5000))
    assert len(sets._cuts[0]) == len(sets._cuts[1]) < 2000
    assert sets.whole == (4998, 4999)


class TestCollecting:
    """A portion that lacks some of its bytes would be saved as zeros, without a word."""

    @pytest.fixture
    def collecting(self) -> Collecting:
        placement = Placement.even(Layout((("w", "float32", (1024,)),)), 2, 1)
        self.low, self.high = placement.edges[1:3]
        found = Collecting.__new__(Collecting)
        found._placement, found.rows, found.missing = placement, None, {1}
        found.on_change, found.failure = lambda: None, ""
        return found

    def part(self, start: int, stop: int, codec: str = RAW) -> Part:
        return Part(start, stop, codec, stop - start, 3)

    def test_all_of_it(self, collecting: Collecting) -> None:
        middle = self.low + 64
        parts = self.part(self.low, middle), self.part(middle, self.high)
        assert collecting.came(1, parts)

    def test_less_or_more(self, collecting: Collecting) -> None:
        low, high = self.low, self.high
        for parts in (
            (),
            (self.part(low, high - 4),),
            (self.part(low + 4, high),),
            (self.part(low, low + 4), self.part(low + 8, high)),
            (self.part(0, high),),
            (self.part(low, high, "int8"),),
            (self.part(low, high), self.part(0, low)),  # the lead's own bytes behind the right ones
            (self.part(low, high), self.part(low, high)),
        ):
            with refused:
                collecting.came(1, parts)
            with refused:
                collecting.sink(1, parts)
        assert collecting.missing == {1}


class TestGenerations:
    """A standby proves to others that the generation has begun which its primary says it is of."""

    secret = b"s" * 32

    def welcome(self, secret: bytes, proof: bytes) -> StandbyWelcome:
        given = {"secret": secret, "generation_proof": proof}
        return StandbyWelcome(0, PROTOCOL, b"", "run", 7, 5, 0, {}, **given)

    def test_with_a_proof(self) -> None:
        held = StandbyPosition("run", 6, 5, b"", self.secret)
        proof = generation_proof(self.secret, "run", 7)
        assert goes_on(held, self.welcome(self.secret, proof), "p")
        assert not goes_on(StandbyPosition(), self.welcome(self.secret, proof), "p")

    def test_without(self) -> None:
        held, other = StandbyPosition("run", 6, 5, b"", self.secret), b"o" * 32
        for welcome in (
            self.welcome(self.secret, b""),
            self.welcome(self.secret, generation_proof(self.secret, "run", 8)),
            self.welcome(other, generation_proof(other, "run", 7)),
        ):
            with refused:
                goes_on(held, welcome, "p")
        with refused:
            goes_on(StandbyPosition(), self.welcome(self.secret, b""), "p")
