"""Schedule-free learning beside its equations, written plainly in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aiops.algorithms.schedulefree import ScheduleFree
from aiops.errors import UsageError
from tests.inline import Inline
from tests.rows import each_row


class Plain:
    """The equations of the page, with z and x as they are."""

    def __init__(self, settings: ScheduleFree, start: Any) -> None:
        self.settings = settings
        self.z = self.x = self.sent = np.array(start, float)
        self.s = np.zeros_like(self.z)
        self.t = 0
        self.gain, self.mean = 1.0, 0.0

    def step(self, g: Any, staleness: float) -> Any:
        a, p = self.settings, self.settings.power
        self.t += 1
        scheduled = a.lr * min(1, self.t / 5)
        pace = self.gain / math.sqrt(1 + staleness)
        rate = scheduled * pace
        self.s = a.beta2 * self.s + (1 - a.beta2) * g * g
        root = np.sqrt(self.s / (1 - a.beta2**self.t))
        e = g / (root + a.eps)
        d = rate * (e + a.weight_decay * self.sent)
        bound = (1.4 + 0.5 * staleness) * math.sqrt(self.gain)
        straight = (e @ (self.x - self.z)) / a.lr - bound * pace * (e @ e)
        self.z = self.z - d
        c = min(1, (p + 1) / (self.t + p))
        self.x = self.x + c * (self.z - self.x)
        c = min(1, (p + 1) / (self.t + 1 + p))
        y = (1 - a.beta) * self.z + a.beta * self.x
        move = a.beta * c * (self.z - self.x) - (1 - a.beta) * d
        self.sent = y + a.ahead * staleness / (1 + staleness / 16) * move
        self.mean += (straight - self.mean) / 16
        if self.t > 16:
            steps = 16 * math.log2(self.gain) + (1 if self.mean > 0 else -1)
            self.gain = 2 ** (min(max(steps, 0), math.floor(16 * math.log2(a.rise))) / 16)
        return self.sent


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"ahead": 0.0}, {"weight_decay": 0.1, "beta": 0.9}])
def test_it_follows_its_equations(settings: dict[str, Any], staleness: int) -> None:
    """Through an engine, with gradients that are all as stale."""
    assert follow(settings, staleness, updates=40, straight=0.0) == 1


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("rise", "reached"), [(8.0, 8.0), (2.0, 2.0), (1.0, 1.0)])
def test_the_rate_rises_where_steps_go_straight_on(
    rise: float, reached: float, staleness: int
) -> None:
    gain = follow({"rise": rise}, staleness, updates=300, straight=1.0)
    assert gain == pytest.approx(reached)


def test_the_rate_falls_again_where_they_turn() -> None:
    assert 1 < follow({}, 0, updates=40, straight=1.0) < 8
    assert follow({}, 0, updates=900, straight=1.0, turns=40) == 1


def test_the_rate_rises_where_steps_are_directions_of_the_rate_that_was_set() -> None:
    assert ScheduleFree(rise=4).most_gain == 4
    assert ScheduleFree(rise=4, orthogonal=False).most_gain == 1
    assert ScheduleFree(rise=4, scale_lr=True).most_gain == 1


def test_tensors_that_keep_their_values_do_not_hold_the_rate_back() -> None:
    assert _gain_beside({}) < 4
    assert _gain_beside({"per_tensor": "lr=0@kept"}) == 8


def _gain_beside(settings: dict[str, Any]) -> float:
    """Return the gain of steps that go straight on beside a tensor whose gradients are noise."""
    inline = Inline("schedule-free", {"lr": 0.02, "schedule": "warmup:5", **settings})
    rng = np.random.default_rng(0)
    inline.define({"kept": rng.normal(size=60), "w": rng.normal(size=6)})
    inline.join(1)
    for version in range(300):
        straight = rng.normal(size=6) + 1
        inline.push(1, {"kept": rng.normal(size=60), "w": straight}, version)
    return inline.engine.report()["rate_gain"]


def follow(
    settings: dict[str, Any],
    staleness: int,
    *,
    updates: int,
    straight: float,
    turns: int | None = None,
) -> float:
    """Compare an engine with the equations; return the gain at the end.

    ``straight``: the mean of gradients, until update ``turns``.
    """
    chosen = {"lr": 0.02, "schedule": "warmup:5", **settings}
    inline, rng = Inline("schedule-free", chosen), np.random.default_rng(0)
    start = rng.normal(size=6)
    inline.define({"w": start})
    peers = [inline.join(peer) for peer in range(1, staleness + 2)]
    plain = Plain(ScheduleFree(**chosen), start)
    versions = [0] * len(peers)
    lag = 0.0
    for update in range(updates):
        turn = update % len(peers)
        g = rng.normal(size=6) + (straight if turns is None or update < turns else 0.0)
        behind = update - versions[turn]
        inline.push(turn + 1, {"w": g}, versions[turn])
        wanted = plain.step(g, lag)
        lag += (behind - lag) / min(update + 1, 64)
        versions[turn] = update + 1
        np.testing.assert_allclose(inline.params()["w"], wanted, rtol=1e-8, atol=1e-11)
    return plain.gain


def test_workers_are_told_to_orthogonalise() -> None:
    assert ScheduleFree(momentum=0.5).plan(None)["orthogonal"] == 0.5
    assert "orthogonal" not in ScheduleFree(orthogonal=False).plan(None)


def test_rows_take_their_steps_without_an_average() -> None:
    algorithm = ScheduleFree(beta2=0.75)
    rule = algorithm.rule()
    given = algorithm.row_scalars(1) + algorithm.tensor_scalars("table")
    numbers = {**dict(zip(rule.scalars, given, strict=True)), **rule.constants}
    w, s, u, o, _gauge = rule.function(w=1.0, g=4.0, s=0.0, u=0.0, o=0.0, step=0.5, **numbers)
    assert (float(w), float(s), float(u), float(o)) == (pytest.approx(0.5), 4.0, 0.0, 0.0)


@each_row(
    ("setting", "value"),
    [("beta", 1.0), ("beta2", 1.0), ("power", -1.0), ("ahead", 11.0), ("eps", 0.0), ("rise", 0.5)],
)
def test_settings_out_of_range(setting: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"schedule-free: {setting} must be"):
        ScheduleFree(**{setting: value})


def test_the_rate_of_a_matrix_falls_with_its_longer_side() -> None:
    algorithm = ScheduleFree(lr=0.01, per_tensor="lr=0.02@head")
    assert algorithm.rate_factor("w", (64, 256)) == 0.5
    assert algorithm.rate_factor("head", (256, 64)) == 1.0
    assert algorithm.rate_factor("bias", (256,)) == 1.0
    assert ScheduleFree(orthogonal=False).rate_factor("w", (64, 256)) == 1.0


def test_decay_may_differ_between_tensors() -> None:
    algorithm = ScheduleFree(weight_decay=0.1, per_tensor="weight_decay=0@*bias")
    assert algorithm.tensor_scalars("bias")[0] == 0.0
    assert algorithm.tensor_scalars("w")[0] == 0.1


@each_row(
    ("settings", "workers", "gathered"),
    [
        ({}, None, 1),
        ({}, 1, 1),
        ({}, 31, 1),
        ({}, 32, 2),
        ({}, 1000, 62),
        ({"collect": 3}, None, 3),
        ({"collect": 1}, 1000, 1),
        ({"orthogonal": False}, 64, 4),
    ],
)
def test_of_many_workers_gradients_are_collected(
    settings: dict[str, Any], workers: int | None, gathered: int
) -> None:
    """The directions are made where the gradients of a step are."""
    algorithm = ScheduleFree(**settings)
    assert algorithm.gathered(workers) == gathered
    policy = algorithm.policy(workers)
    divided = [policy.push(worker, 0).divide for worker in range(2 * gathered)]
    assert divided == [*[None] * (gathered - 1), gathered] * 2
    pushed, made = "orthogonal" in algorithm.plan(workers), algorithm.sum_momentum(workers)
    assert pushed == (algorithm.orthogonal and gathered == 1)
    assert made == (0.7 if algorithm.orthogonal and gathered > 1 else None)


def test_a_schedule_counts_the_gradients_that_are_collected() -> None:
    schedule = "warmup:10,linear:100"
    one, two = (ScheduleFree(schedule=schedule, collect=n).rates(None) for n in (1, 2))
    assert callable(one)
    assert callable(two)
    assert [two(n) for n in range(40)] == [one(2 * n) for n in range(40)]
    seconds = ScheduleFree(schedule=schedule, schedule_unit="seconds", collect=2).rates(None)
    assert callable(seconds)
    assert seconds(7.0) == one(7.0)
    start = ScheduleFree(schedule=schedule, schedule_start=50, collect=2).rates(None)
    assert callable(start)
    assert start(10) == one(70)
    assert ScheduleFree(schedule="constant", collect=2).rates(None) == 0.008


def test_steps_of_a_server_that_collects_are_directions_of_the_mean() -> None:
    """All that the mean points along gets a step of one length; of one gradient, that one alone."""
    settings = {"collect": 2, "beta2": 0.0, "beta": 0.0, "ahead": 0.0, "schedule": "constant"}
    inline = Inline("schedule-free", settings)
    inline.define({"w": np.zeros((4, 6), np.float32)})
    inline.join(1)
    for row, size in ((0, 1.0), (1, 0.2)):
        gradient = np.zeros((4, 6), np.float32)
        gradient[row] = size * np.arange(1, 7) * (-1) ** (row * np.arange(6))
        inline.push(1, {"w": gradient}, 0)
        assert inline.version == row
    moved = inline.params()["w"]
    lengths = np.linalg.norm(moved, axis=1)
    assert 0 < lengths[0] == pytest.approx(lengths[1], rel=0.2)
    assert not lengths[2:].any()
