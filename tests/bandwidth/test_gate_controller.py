"""The controller of the gates' constants, against a small model of workers that flip coins."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.bandwidth.gate_controller import BudgetSample, GateController
from aiops.bandwidth.gates import BFASGD
from aiops.bandwidth.token_bucket import USABLE
from aiops.state.plain import pack, unpack
from tests.rows import each_row

MB = 1_000_000
DT, LOOK = 0.002, 0.1
Of = Callable[[float], float]  # what changes with time


@dataclass
class Worker:
    """It computes, flips a coin per way, and waits for what it transmits; then it hears c and v̄."""

    number: int
    ready: float | None  # when its next step is done; None: it waits
    gate: tuple[float, ...] = ()
    vbar: float = 1.0
    waits: int = 0


@dataclass
class Look:
    """What there was to see of a tenth of a second."""

    time: float
    use: float  # share of the budget
    depth: float
    c: float


@dataclass
class Model:
    """Workers under a budget: a closed loop, as theirs is."""

    controller: GateController
    budget: int = MB
    size: float = 200_000.0
    step: float = 0.01  # seconds
    crew: Of = lambda now: 4
    vbar: Of = lambda now: 1.0
    seed: int = 0
    looks: list[Look] = field(default_factory=list)

    def run(self, seconds: float) -> list[Look]:
        dice, line = random.Random(self.seed), deque[list[float]]()
        workers: dict[int, Worker] = {}
        now, crossed, steps = 0.0, 0.0, 0
        while now < seconds:
            count = round(self.crew(now))
            for number in range(count):
                if number not in workers:
                    gate = self.controller.constants(self.vbar(now))
                    first = now + self.step * dice.random()
                    workers[number] = Worker(number, first, gate, self.vbar(now))
            workers = {number: w for number, w in workers.items() if number < count}
            line = deque(item for item in line if item[0] in workers)
            for worker in workers.values():
                self._compute(worker, now, dice, line)
            limited = bool(line)
            crossed += self._cross(now, workers, dice, line)
            now, steps = now + DT, steps + 1
            if steps % round(LOOK / DT) == 0:
                backlog, busy = sum(item[1] for item in line), len({item[0] for item in line})
                seen = BudgetSample(now, round(crossed), 0, 0, round(backlog), busy, limited)
                self.controller.paced(seen, count)
                use = crossed / (self.budget * LOOK)
                c, _fetch = self.controller.constants(self.vbar(now))
                self.looks.append(Look(now, use, self.controller.depth, c))
                crossed = 0.0
        return self.looks

    def _compute(
        self, worker: Worker, now: float, dice: random.Random, line: deque[list[float]]
    ) -> None:
        while worker.ready is not None and worker.ready <= now:
            ways = [c for c in worker.gate if dice.random() < 1 / (1 + c / worker.vbar)]
            worker.waits = len(ways)
            line.extend([worker.number, self.size] for _ in ways)
            next_ = worker.ready + self.step * (0.5 + dice.random())
            worker.ready = None if ways else next_

    def _cross(
        self,
        now: float,
        workers: dict[int, Worker],
        dice: random.Random,
        line: deque[list[float]],
    ) -> float:
        left = USABLE * self.budget * DT
        crossed = 0.0
        while line and left > 1e-9:
            count = min(left, line[0][1])
            line[0][1] -= count
            left -= count
            crossed += count
            if line[0][1] < 1e-6:
                worker = workers[round(line.popleft()[0])]
                self.controller.transmitted(worker.number, 0)
                worker.gate = self.controller.constants(self.vbar(now))
                worker.vbar = self.vbar(now)
                worker.waits -= 1
                if not worker.waits:
                    worker.ready = now + self.step * (0.5 + dice.random())
        return crossed


def use(looks: list[Look], since: float, until: float) -> float:
    kept = [look.use for look in looks if since <= look.time < until]
    return sum(kept) / len(kept)


def spread(looks: list[Look], since: float, until: float) -> float:
    """Return by what factor 1 + c / v̄ (that is 1/p) varied around its middle."""
    depths = [look.depth for look in looks if since <= look.time < until]
    return float(2.718281828 ** ((max(depths) - min(depths)) / 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [0.0, 2.0, 6.0, 7.0], ids=["c=0", "c=6", "c=400", "c=1100"])
def test_it_settles_from_afar(depth: float, seed: int) -> None:
    """The right c is about 60: from far too small a one, and from far too large a one."""
    looks = Model(GateController(MB, depth=depth), seed=seed).run(40.0)
    assert 0.9 <= use(looks, 12.0, 40.0) <= 1.0
    assert spread(looks, 15.0, 40.0) <= 2.0
    assert 20 < looks[-1].c < 200


@pytest.mark.parametrize(("size", "step"), [(2e3, 0.001), (2e4, 0.01), (2e5, 0.1), (1e6, 0.05)])
def test_it_settles_whatever_the_sizes(size: float, step: float) -> None:
    looks = Model(GateController(MB), size=size, step=step).run(90.0)
    assert 0.9 <= use(looks, 30.0, 90.0) <= 1.0
    assert spread(looks, 60.0, 90.0) <= 2.0


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_workers_that_join_and_leave(seed: int) -> None:
    def crew(now: float) -> float:
        return 4 if now < 15 else 16 if now < 45 else 2

    looks = Model(GateController(MB), crew=crew, seed=seed).run(75.0)
    for since, until in ((5, 15), (15, 45), (53, 75)):
        assert 0.9 <= use(looks, since, until) <= 1.0
    for since, until in ((10, 15), (38, 45), (60, 75)):
        assert spread(looks, since, until) <= 2.0
    few, many = looks[149].depth, looks[449].depth
    assert many > few + 1.0  # four times the workers: each is let through less than half as often
    assert looks[-1].depth < many - 1.0


def test_it_follows_a_falling_v_at_once() -> None:
    """c falls with v̄, and the share that is let through stays what it was."""

    def vbar(now: float) -> float:
        return 1.0 if now < 15 else max(0.01, 10 ** (-(now - 15) / 2))

    looks = Model(GateController(MB), vbar=vbar).run(40.0)
    assert 0.9 <= use(looks, 15.0, 40.0) <= 1.0
    assert spread(looks, 12.0, 40.0) <= 2.0
    assert looks[-1].c == pytest.approx(0.01 * looks[149].c, rel=0.7)


def test_no_gate_closes_while_the_budget_is_not_needed() -> None:
    looks = Model(GateController(MB, depth=1.0), size=1000.0, step=0.1).run(6.0)
    assert all(look.c == 0.0 for look in looks[30:])


def test_a_single_worker_is_not_throttled_far() -> None:
    looks = Model(GateController(MB), crew=lambda now: 1).run(30.0)
    assert use(looks, 5.0, 30.0) >= 0.85


def test_workers_that_have_no_gate_wind_nothing_up() -> None:
    controller = GateController(MB)
    for look in range(1, 10_000):
        controller.transmitted(1, 0)
        controller.paced(BudgetSample(look * LOOK, 96_000, 0, 0, 10 * MB, 16, True), 16)
    assert controller.constants(1.0)[0] <= 1e4
    for look in range(10_000, 10_300):
        controller.paced(BudgetSample(look * LOOK, 0, 0, 0, 0, 0, False), 16)
    assert controller.constants(1.0) == (0.0, 0.0)


def test_the_constants_keep_their_ratio_and_follow_the_statistic() -> None:
    controller = GateController(MB, ratio=2.0, depth=1.0)
    push, fetch = controller.constants(0.5)
    assert fetch == 2 * push
    assert controller.constants(0.25) == (push / 2, fetch / 2)


def test_it_begins_where_the_gate_says() -> None:
    gate = {"kind": "bfasgd", "c_push": 0.08, "c_fetch": 0.12, "eps": 1e-4, "floor": 0.01}
    gate["relative"] = False
    controller = GateController.for_gate(gate, MB, None)
    assert controller is not None
    assert controller.constants(1.01) == pytest.approx((0.08, 0.12))
    push, _fetch = controller.constants(0.11)  # a tenth above the floor: the same probability
    assert push == pytest.approx(0.008, rel=1e-2)


def test_constants_of_a_relative_gate_are_in_units_of_the_level() -> None:
    gate = BFASGD(c_push=7, c_fetch=3.5, relative=True).plan(find("fasgd").make({}))["gate"]
    controller = GateController.for_gate(gate, MB, None)
    assert controller is not None
    for vbar in (1.0, 1e-6):
        assert controller.constants(vbar) == pytest.approx((7, 3.5))
    assert controller.report(0.5)["c_push"] == pytest.approx(7)


@pytest.mark.parametrize("gate", [None, {"kind": "periodic"}])
def test_without_a_gate_that_can_be_steered_there_are_no_constants(gate: Any) -> None:
    controller = GateController.for_gate(gate, MB, None)
    assert controller is not None
    assert controller.constants(1.0) == ()
    assert controller.report(1.0)["c_push"] is None


def test_without_a_budget_there_is_no_controller() -> None:
    assert GateController.for_gate({"kind": "bfasgd"}, None, None) is None


def test_budgets_per_worker_are_a_budget_too() -> None:
    """The gates keep to what the workers' budgets come to, where that is the less."""
    several = GateController(MB, 100_000)
    for look in range(1, 200):
        for worker in range(4):
            several.transmitted(worker, 0)
        several.paced(BudgetSample(look * LOOK, 38_400, 0, 0, 4 * 200_000, 4, True), 4)
    assert several.depth > 0.5


def test_who_has_not_transmitted_for_long_weighs_more() -> None:
    controller = GateController(MB)
    for peer in (1, 2, 3):
        controller.transmitted(peer, 10)
    assert controller.shares(11, 2) == ()
    controller.transmitted(1, 14)
    assert controller.shares(14, 2) == ((2, 3.0), (3, 3.0))
    assert controller.shares(14, 2) == ()  # only what has changed is told
    controller.transmitted(2, 100)
    controller.left(3)
    assert controller.shares(100, 2) == ((1, 4.0), (2, 1.0))


def test_what_a_client_is_to_allow_for_grows_with_the_workers() -> None:
    controller = GateController(MB, 500_000)
    assert controller.seconds_per_byte(1) == pytest.approx(8 / (USABLE * 500_000))
    assert controller.seconds_per_byte(10) == pytest.approx(80 / (USABLE * MB))


@each_row("seed", range(5))
def test_a_restored_controller_steers_alike(seed: int) -> None:
    gate = {"kind": "bfasgd", "c_push": 0.1, "c_fetch": 0.02, "eps": 1e-3, "floor": 0.0}
    gate["relative"] = False
    rng = random.Random(seed)
    live = GateController.for_gate(gate, MB, None)
    assert live is not None
    for step in range(1, 60):
        restored = GateController.for_gate(gate, MB, None)
        assert restored is not None
        restored.restore(unpack(pack(live.state()), "x"))
        again = rng.getrandbits(32)
        said = [_steer(controller, random.Random(again), step) for controller in (live, restored)]
        assert said[0] == said[1]


def _steer(controller: GateController, rng: random.Random, step: int) -> Any:
    for _ in range(rng.randrange(4)):
        controller.transmitted(rng.randrange(5), step)
    if rng.random() < 0.1:
        controller.left(rng.randrange(5))
    nbytes, busy = rng.randrange(200_000), rng.randrange(5)
    controller.paced(BudgetSample(step * LOOK, nbytes, 1, 2, 3, busy, rng.random() < 0.7), 4)
    return controller.shares(step, 4), controller.report(0.3), controller.state()
