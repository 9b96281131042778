"""Policies beside a straggler, and how far apart workers are: what is measured and said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.errors import UsageError
from aiops.lab.experiments.catalog import EXPERIMENTS
from aiops.lab.experiments.cluster_simulation import StragglerSimulation, mean_reached, reached
from aiops.lab.experiments.curves import interpolated
from aiops.lab.experiments.execution import TransformerStraggler
from aiops.lab.experiments.papers import all_policies, model_average_straggler, no_delay_discrepancy
from aiops.lab.experiments.papers.all_policies import AllPoliciesScale
from aiops.lab.experiments.papers.model_average_straggler import StragglerScale
from aiops.lab.experiments.papers.no_delay_discrepancy import DiscrepancyScale, ParameterDistances
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Runs
from aiops.serving.config import settings_of
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.small_experiment import TINY

TASK = replace(TINY, iterations=60)


def on_progress(_done: int) -> None:
    pass


def run_of(case: PlannedRun, errors: list[float], seconds: float, **more: Any) -> FinishedRun:
    """Return a run as if it had been made, with a sample at each of equal times."""
    step = seconds / (len(errors) - 1)
    curve = [
        {
            "iteration": 10 * n,
            "seconds": n * step,
            "bytes": 100 * n,
            "error": error,
            "cost": 4 * error,
        }
        for n, error in enumerate(errors)
    ]
    made = {"digest": "d", "diverged": None, "seconds": seconds, "curve": curve, "idle": 0.5}
    return FinishedRun(case, {**made, "mean_staleness": 1.0, **more})


class TestRace:
    @pytest.mark.parametrize("policy", ["asgd", "average"])
    def test_the_straggler_is_slower_and_the_rest_goes_on(self, policy: str) -> None:
        race = StragglerSimulation(TASK, policy, times=3.0, sigma=0.0)
        found = race(on_progress)
        slow, *others = found["steps"]
        assert sum(found["steps"]) == TASK.iterations
        assert min(others) > 2.5 * slow
        assert found["idle"] < 0.05
        assert race(on_progress)["digest"] == found["digest"]
        assert [sample["seconds"] for sample in found["curve"]] == sorted(
            sample["seconds"] for sample in found["curve"]
        )

    def test_at_a_barrier_all_are_as_slow(self) -> None:
        found = StragglerSimulation(TASK, "hardsync", times=3.0, sigma=0.0)(on_progress)
        assert found["steps"] == [20, 20, 20]
        assert found["seconds"] == pytest.approx(20 * 3 * 0.05, rel=0.01)

    def test_its_time_is_estimated_in_turns(self) -> None:
        """Turns know nothing of averages; but those are as much work as plain SGD."""
        assert StragglerSimulation(TASK, "average", ("interval=0.2",)).simulation == replace(
            TASK, policy="asgd"
        )
        softsync = StragglerSimulation(TASK, "softsync", ("n=2",)).simulation
        assert softsync == replace(TASK, policy="softsync", set=("n=2",))
        with pytest.raises(UsageError, match="interval"):
            _ = StragglerSimulation(TASK, "average", ("interval=-1",)).simulation

    def test_when_a_target_is_reached(self) -> None:
        case = PlannedRun("panel", "curve", 0, TASK)
        run, other = run_of(case, [0.9, 0.2, 0.1], 4.0), run_of(case, [0.9, 0.1, 0.1], 8.0)
        assert reached(run, 0.2) == 2.0
        assert reached(run, 0.05) == math.inf
        assert mean_reached([run, other], 0.2) == 3.0
        assert mean_reached([], 0.2) == math.inf

    def test_seeds_of_different_lengths_in_one_line(self) -> None:
        case = PlannedRun("panel", "curve", 0, TASK)
        runs = [run_of(case, [0.9, 0.1], 4.0), run_of(case, [0.5, 0.1], 8.0)]
        line = interpolated("label", runs, "seconds", points=3)
        assert line.x == [0.0, 2.0, 4.0]
        assert line.ys[0] == pytest.approx([90, 50, 10])
        assert line.ys[1] == pytest.approx([50, 40, 30])


class TestEverything:
    scale = all_policies.QUICK

    def runs(self, seconds: Callable[[str], float]) -> Runs:
        runs = Runs()
        for case in all_policies.cases(self.scale, runs):
            took = seconds(case.curve)
            runs.add(case.key, run_of(case, [0.9, 0.05, 0.04], took).result)
        return runs

    def test_every_policy_is_in_it(self) -> None:
        for scale in (all_policies.QUICK, all_policies.FULL):
            found = list(all_policies.cases(scale, Runs()))
            assert {case.curve for case in found} == set(BUILT_IN)
            works = [case.work for case in found if isinstance(case.work, StragglerSimulation)]
            assert {work.policy for work in works} == set(BUILT_IN)
            assert {(work.times, work.task.clients) for work in works} == {(3.0, 8)}
            assert len(works) == scale.seeds * len(BUILT_IN)

    @pytest.mark.parametrize(("hardsync", "agrees"), [(9.0, True), (1.0, False)])
    def test_verdicts(self, hardsync: float, agrees: bool) -> None:
        runs = self.runs(lambda policy: hardsync if policy == "hardsync" else 3.0)
        findings = all_policies.EXPERIMENT.judge(self.scale, runs)
        assert [verdict.agrees for verdict in findings.verdicts] == [agrees, agrees]
        first = findings.table[0 if hardsync < 3 else -1]["policy"]
        assert first == "hardsync", "who reaches the target first comes first"

    def test_a_target_that_nobody_reaches(self) -> None:
        scale: AllPoliciesScale = replace(self.scale, target=0.001)
        findings = all_policies.EXPERIMENT.judge(scale, self.runs(lambda policy: 3.0))
        assert findings.verdicts[1].agrees is None
        assert {row["seconds to 0.1 %"] for row in findings.table} == {"–"}


class TestEveryPolicyOnTheTransformer:
    scale = all_policies.EXPERIMENT.scale(full=True, seeds=1, knobs=["network=transformer"])

    def test_every_policy_takes_its_settings_at_each_rate(self) -> None:
        assert isinstance(self.scale, AllPoliciesScale)
        found = [case.work for case in all_policies.cases(self.scale, Runs())]
        assert {work.policy for work in found if isinstance(work, TransformerStraggler)} == set(
            BUILT_IN
        )
        for work in found:
            assert isinstance(work, TransformerStraggler)
            assert work.simulation.iterations == 600
            assert find(work.policy).make(settings_of(work.settings, None)).plan(8) is not None

    def test_the_best_rate_counts(self) -> None:
        assert isinstance(self.scale, AllPoliciesScale)
        runs = Runs()
        for case in all_policies.cases(self.scale, runs):
            best = case.curve == "asgd lr=0.001"
            runs.add(case.key, run_of(case, [0.9, 0.6 if best else 0.64], 3.0).result)
        table = all_policies.EXPERIMENT.judge(self.scale, runs).table
        assert len(table) == len(BUILT_IN)
        assert table[0]["policy"] == "asgd lr=0.001"
        assert (table[0]["error %"], table[0]["nats"]) == ("60.00", "2.400")
        (softsync,) = [row["policy"] for row in table if row["policy"].startswith("softsync")]
        assert softsync == "softsync n=2 lr=0.0003"

    def test_a_run(self) -> None:
        pytest.importorskip("torch")
        task = replace(TASK, iterations=6, samples=1, batch_size=2)
        found = TransformerStraggler(task, "asgd", ("lr=0.03",))(lambda done: None)
        assert found["curve"][-1]["iteration"] == 6
        assert 3 < found["curve"][-1]["cost"] < found["curve"][0]["cost"]


class TestStraggler:
    scale: StragglerScale = replace(model_average_straggler.QUICK, times=(1.0, 5.0))

    @pytest.mark.parametrize(
        ("ours", "theirs", "agrees"), [(19, 5, True), (10, 5, False), (20, 20, False)]
    )
    def test_whose_pace_is_kept(self, ours: int, theirs: int, agrees: bool) -> None:
        runs = Runs()
        beside = {"model average": ours, "synchronous": theirs, "parameter server": 20}
        for case in model_average_straggler.cases(self.scale, runs):
            steps = 20 if case.panel == "all alike" else beside[case.curve]
            made = run_of(case, [0.9, 0.1], 10.0, steps=[steps // 5, steps, steps])
            runs.add(case.key, made.result)
        pace, errors = model_average_straggler.EXPERIMENT.judge(self.scale, runs).verdicts
        assert pace.agrees is agrees
        assert f"{5 * ours}% (model average)" in pace.text
        assert errors.agrees is True

    def test_an_average_that_learns_less(self) -> None:
        runs = Runs()
        for case in model_average_straggler.cases(self.scale, runs):
            error = 0.12 if case.curve == "model average" else 0.1
            runs.add(case.key, run_of(case, [0.9, error], 10.0, steps=[4, 20, 20]).result)
        _pace, errors = model_average_straggler.EXPERIMENT.judge(self.scale, runs).verdicts
        assert errors.agrees is False


class TestDiscrepancy:
    scale: DiscrepancyScale = replace(no_delay_discrepancy.QUICK, seeds=1)

    def verdicts(self, distance: Callable[[Simulation, int], float]) -> list[bool | None]:
        runs = Runs()
        for case in no_delay_discrepancy.cases(self.scale, runs):
            assert isinstance(case.work, ParameterDistances)
            found = distance(case.simulation, case.work.cycle)
            curve = [{"iteration": 1, "distance": found, "relative": found / 10}]
            runs.add(case.key, {"digest": "d", "diverged": None, "curve": curve})
        findings = no_delay_discrepancy.EXPERIMENT.judge(self.scale, runs)
        return [verdict.agrees for verdict in findings.verdicts]

    def test_as_claimed(self) -> None:
        def distance(run: Simulation, limit: int) -> float:
            return float(run.clients if run.policy == "asgd" else limit)

        assert self.verdicts(distance) == [True, True, True, True]

    def test_otherwise(self) -> None:
        def distance(run: Simulation, limit: int) -> float:
            return math.sqrt(limit * run.clients)

        assert self.verdicts(distance) == [False, False, False, False]

    def test_both_rules_take_steps_of_one_rate(self) -> None:
        found = list(no_delay_discrepancy.cases(self.scale, Runs()))
        assert {case.simulation.lr for case in found} == {0.02}
        for case in found:
            run = case.simulation
            steps = run.iterations // (run.clients if run.policy == "no-delay" else 1)
            assert steps == self.scale.steps, "the models have come equally far"

    def test_a_run(self) -> None:
        """In step and on the same mini-batches' number, workers part within a cycle."""
        run = replace(
            TINY, policy="no-delay", set=("tau_max=4", "variant=2"), selection="round-robin"
        )
        found = ParameterDistances(replace(run, iterations=60), cycle=4, looks=3)(on_progress)
        assert [sample["iteration"] for sample in found["curve"]] == [18, 39, 60]
        assert min(sample["distance"] for sample in found["curve"]) > 0
        for sample in found["curve"]:
            assert sample["relative"] < sample["distance"], "the model's norm is above 1"

    def test_one_step_with_gradient_delay(self) -> None:
        """Two in turn hold the last two versions: they are one step apart, whatever the rate."""
        run = replace(TINY, policy="asgd", clients=2, selection="round-robin", iterations=2)
        one, two = (
            ParameterDistances(replace(run, lr=rate), cycle=1, looks=1)(on_progress)["curve"][0][
                "distance"
            ]
            for rate in (0.001, 0.002)
        )
        assert two == pytest.approx(2 * one, rel=0.05)


def test_they_are_in_the_catalogue() -> None:
    names = {"no-delay-discrepancy", "model-average-straggler", "everything"}
    assert names <= set(EXPERIMENTS)
