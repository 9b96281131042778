"""Training for a stated time: the cluster that it is, and the search for a rule's rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.common.jsonable import plain
from aiops.errors import UsageError
from aiops.lab.experiments.papers import which_policy
from aiops.lab.experiments.papers.which_policy import FULL, GRID, QUICK, PanelMachines, TimedRule
from aiops.lab.experiments.runs import RunGroups, Runs
from aiops.lab.experiments.timed_training import TimedTraining
from aiops.serving.config import settings_of
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.small_experiment import result

TINY = Simulation(
    policy="asgd",
    lr=0.05,
    dataset="digits",
    hidden=4,
    clients=2,
    batch_size=4,
    iterations=20,
    samples=2,
    kernels="numpy",
)


def test_it_ends_when_the_time_is_over() -> None:
    work = TimedTraining(TINY, median=0.05, sigma=0.0)
    assert work.seconds == 0.5
    found = work(lambda done: None)
    assert found["seconds"] == pytest.approx(0.5)
    assert found["curve"][-1]["iteration"] == sum(found["steps"])
    assert 18 <= sum(found["steps"]) <= 20
    assert found["curve"][-1]["cost"] < found["curve"][0]["cost"]


def test_a_slow_worker_makes_fewer_steps_and_directions_take_time() -> None:
    slow, other = TimedTraining(TINY, sigma=0.0, times=3.0)(lambda done: None)["steps"]
    assert slow <= other / 2
    beside = TimedTraining(TINY, sigma=0.0, beside=1.0)(lambda done: None)
    assert sum(beside["steps"]) <= 10


def test_exchanges_beside_computing_make_more_steps_on_a_slow_link() -> None:
    links = StarTopology(worker="1Mbit/s")  # the perceptron has 1.2 kB: 20 ms both ways
    waits = TimedTraining(replace(TINY, iterations=80), median=0.02, sigma=0.0, links=links)
    steps = [sum(replace(waits, overlap=n)(lambda done: None)["steps"]) for n in (0, 1)]
    assert steps[1] > 1.3 * steps[0]


def test_settings_codecs_and_those_in_seconds_reach_the_server() -> None:
    run = replace(TINY, set=("momentum=0.5",), push_codec=("int8",), fetch_codec=("int8",))
    more = ("schedule_unit=seconds", "schedule=cosine:2")
    server = TimedTraining(run, in_seconds=more).cluster.server
    assert server.set == ["momentum=0.5", *more]
    assert (server.push_codec, server.fetch_codec) == (["int8"], ["int8"])


def test_no_such_network() -> None:
    with pytest.raises(UsageError, match=r"no network is called 'convnett'.*convnet"):
        TimedTraining(TINY, network="convnett")


class TestSearch:
    """A rule's rates are widened until the best is at no edge."""

    def rates(self, cost: Callable[[float], float]) -> set[float]:
        rule = TimedRule("a rule", "asgd", (0.001, 0.003))
        place = PanelMachines(StarTopology(), (rule,))
        scale = replace(QUICK, places={"here": place})
        runs = Runs()
        for _stage in GRID:
            for case in which_policy.cases(scale, runs):
                end: dict[str, Any] = {**result(0.1)}
                rate = float(case.curve.rpartition(" ")[2])
                end["curve"] = [{**sample, "cost": cost(rate)} for sample in end["curve"]]
                end = plain(end)  # as a run's is, in which NaN is None
                runs.add(case.key, end)
        groups = RunGroups(which_policy.cases(scale, runs), runs)
        chosen = which_policy.best(groups, "here", rule)
        assert chosen is not None
        rates = {float(curve.rpartition(" ")[2]) for _panel, curve in groups}
        sound = [rate for rate in rates if not math.isnan(cost(rate))]
        assert chosen[0] == f"{min(sound, key=cost):g}"
        return rates

    def test_within(self) -> None:
        assert self.rates(lambda rate: abs(rate - 0.003)) == {0.001, 0.003, 0.01}

    def test_far_above(self) -> None:
        assert self.rates(lambda rate: -rate) == set(GRID[2:])

    def test_far_below(self) -> None:
        assert self.rates(lambda rate: rate) == set(GRID[:4])

    def test_one_that_diverges_is_never_best(self) -> None:
        found = self.rates(lambda rate: math.nan if rate > 0.003 else -rate)
        assert found == {0.001, 0.003, 0.01}


def test_every_rule_can_start_on_every_place() -> None:
    for place in FULL.places.values():
        for rule in place.rules:
            assert set(rule.rates) <= set(GRID) or len(rule.rates) == 1
            assert len({each.name for each in place.rules}) == len(place.rules)


def test_knobs_choose_panels() -> None:
    chosen = which_policy.EXPERIMENT.scale(full=True, knobs=["links=slow", "workers=unequal"])
    assert isinstance(chosen, which_policy.WhichPolicyScale)
    assert list(chosen.panels) == ["20 Mbit/s, one slow"]
    assert list(FULL.panels) == list(which_policy.PLACES)
    settings = which_policy.EXPERIMENT.scale(full=True, knobs=["rules=settings"])
    assert isinstance(settings, which_policy.WhichPolicyScale)
    (place,) = settings.panels.values()
    assert place.rules == which_policy.SETTINGS
    for rule in place.rules:
        assert find(rule.policy).make(settings_of(rule.settings, rule.rates[0]))
