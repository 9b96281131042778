"""Every experiment by name, from its declaration to its figure, at a toy's size."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.lab import drawing, figure_style
from aiops.lab.experiments import report, run_planning
from aiops.lab.experiments.catalog import EXPERIMENTS, find
from aiops.lab.experiments.cluster_simulation import ThroughputSimulation
from aiops.lab.experiments.execution import (
    ConvNetSimulation,
    InitializedSimulation,
    TransformerSimulation,
)
from aiops.lab.experiments.experiment import Experiment
from aiops.lab.experiments.papers import (
    gated_runs,
    no_delay_scaling,
    policy_comparison,
    softsync_cifar10,
    softsync_speedup,
)
from aiops.lab.experiments.papers.bfasgd_budget import BudgetScale
from aiops.lab.experiments.papers.bfasgd_coin import CoinScale
from aiops.lab.experiments.papers.fasgd_clients import lead_verdict
from aiops.lab.experiments.papers.no_delay_scaling import ScalingScale
from aiops.lab.experiments.papers.one_rule import OneRuleScale
from aiops.lab.experiments.papers.one_rule_tasks import TASKS
from aiops.lab.experiments.papers.poisoned_workers import PoisonScale
from aiops.lab.experiments.papers.policy_comparison import PolicyComparison
from aiops.lab.experiments.papers.softsync_cifar10 import ProtocolScale
from aiops.lab.experiments.papers.softsync_speedup import SpeedupScale
from aiops.lab.experiments.papers.which_policy import WhichPolicyScale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunFolder, RunGroups, Runs
from aiops.lab.experiments.scheduler import ExperimentScheduler
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.small_experiment import Here, Seen, here, result

ALL = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
STALENESS = EXPERIMENTS["fasgd-staleness"]
CLIENTS = EXPERIMENTS["fasgd-clients"]


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(UsageError, match=r"no experiment is called 'fasgd-stalenes'.*staleness"):
        find("fasgd-stalenes")


@ALL
@pytest.mark.parametrize("full", [False, True])
def test_the_declarations_can_be_run(experiment: Experiment, full: bool) -> None:
    scale = experiment.scale(full=full)
    cases = run_planning.planned(experiment, scale, Runs())
    assert len({case.key for case in cases}) == len(cases)
    reported = [case for case in cases if case.role == "reported"]
    assert {case.seed for case in reported} == set(range(scale.seeds))
    assert not {case.seed for case in cases if case.role == "pool"} & set(range(scale.seeds))
    for case in cases[:3]:
        assert pickle.loads(pickle.dumps(case.work)) == case.work
    again = run_planning.planned(experiment, scale, Runs())
    assert [case.key for case in again] == [case.key for case in cases]


@ALL
def test_quick_ones_train_on_what_ships_with_the_package(experiment: Experiment) -> None:
    assert experiment.quick.base.dataset == "digits"
    run_planning.check(run_planning.planned(experiment, experiment.quick, Runs()))


@ALL
def test_of_nothing_nothing_is_claimed(experiment: Experiment) -> None:
    findings = experiment.judge(experiment.quick, Runs())
    assert findings.verdicts
    assert {verdict.agrees for verdict in findings.verdicts} == {None}
    assert experiment.draw(experiment.quick, Runs()).panels


@ALL
@pytest.mark.slow
def test_from_the_first_run_to_the_figure(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is drawn is an experiment's; the formats of its file and its layout are test_report's.
    monkeypatch.setattr(drawing, "save", partial(drawing.save, suffixes=(".svg",)))
    monkeypatch.setattr(figure_style, "_lay_out", lambda made: made.set_layout_engine(None))
    scale = experiment.scale(full=False, iterations=20, seeds=2)
    base = replace(scale.base, hidden=4, samples=5, kernels="numpy")
    scale = replace(scale, base=base)
    if isinstance(scale, BudgetScale):
        scale = replace(scale, budgets=(0.4,))
    if isinstance(scale, PolicyComparison):
        scale = replace(scale, panels=((4, 2), (2, 4)))
    if isinstance(scale, SpeedupScale):
        scale = replace(
            scale, learners=(1, 3), sigmas=(0.2,), base=replace(scale.base, iterations=4)
        )
    if isinstance(scale, ScalingScale):
        scale = replace(scale, steps=4)
    if isinstance(scale, PoisonScale):
        base = replace(scale.base, iterations=12, clients=6)
        scale = replace(scale, shares=(1 / 3,), seeds=1, base=base)
    if isinstance(scale, OneRuleScale):
        task = TASKS[scale.task_name]
        monkeypatch.setitem(TASKS, scale.task_name, replace(task, workers=(1, 4)))
        scale = replace(scale, seeds=1)
    if isinstance(scale, WhichPolicyScale):
        few = {name: replace(place, rules=place.rules[::7]) for name, place in scale.places.items()}
        scale = replace(scale, places=few)
    folder, seen = RunFolder(tmp_path / "out", experiment.name), Seen()
    ExperimentScheduler(experiment, scale, folder, seen).run(1, here(Here()))
    assert seen.failures == []
    findings = experiment.judge(scale, folder.runs)
    assert findings.table
    assert all(verdict.text for verdict in findings.verdicts)
    report.save(experiment, scale, folder, findings, "the command")
    found = json.loads((folder.path / "summary.json").read_text())
    assert found["complete"]
    assert (folder.path / "figure.svg").exists()
    figure = experiment.draw(scale, folder.runs)
    assert all(panel.lines for panel in figure.panels)
    assert any(line.ys and line.x for panel in figure.panels for line in panel.lines)


def runs_of(scale: PolicyComparison, errors: Any) -> Runs:
    """Return all runs of a duel, as if they had been made, with errors that a function says."""
    runs = Runs()
    for _stage in range(3):
        for case in policy_comparison.cases(scale, runs):
            runs.add(case.key, result(errors(case)))
    return runs


class TestDuel:
    def verdicts(self, errors: Any) -> list[bool | None]:
        assert isinstance(STALENESS.quick, PolicyComparison)
        runs = runs_of(STALENESS.quick, errors)
        return [verdict.agrees for verdict in STALENESS.judge(STALENESS.quick, runs).verdicts]

    def test_ahead_in_all_panels(self) -> None:
        ahead = {"fasgd": 0.1, "sasgd": 0.2}
        assert self.verdicts(lambda c: ahead[c.simulation.policy]) == [True, True, True]

    def test_behind_in_one(self) -> None:
        def errors(case: PlannedRun) -> float:
            slow = case.simulation.policy == "fasgd" and case.simulation.clients == 4
            return 0.3 if slow else {"fasgd": 0.1, "sasgd": 0.2}[case.simulation.policy]

        assert self.verdicts(errors) == [False, False, False]

    def test_seeds_that_overlap_tell_nothing(self) -> None:
        assert self.verdicts(lambda c: 0.1 + 0.01 * c.seed) == [None, None, None]

    def test_each_protocol_has_its_rates(self) -> None:
        """The lower a rate the better for few clients, the higher for many, and 0.01 for all."""

        def errors(case: PlannedRun) -> float:
            rate, clients = case.simulation.lr or 0, case.simulation.clients
            best = {4: 0.00125, 16: 0.0025, 32: 0.02, 128: 0.04}[clients]
            return 0.1 + 0.01 * (rate != 0.01) * (rate != best) - 0.005 * (rate == best)

        assert isinstance(STALENESS.quick, PolicyComparison)
        scale = STALENESS.quick
        runs = runs_of(scale, errors)
        groups = RunGroups(policy_comparison.cases(scale, runs), runs)

        def rates(policy: str, protocol: str) -> list[float | None]:
            found = (
                policy_comparison.seeds(groups, panel, policy, protocol) for panel in scale.named
            )
            return [group[0].case.simulation.lr for group in found]

        assert rates("fasgd", "printed") == [0.005] * 4
        assert rates("sasgd", "printed") == [0.04] * 4
        assert {
            type(run.case.work)
            for run in policy_comparison.seeds(groups, next(iter(scale.named)), "fasgd", "paper")
        } == {InitializedSimulation}
        assert rates("fasgd", "fair") == [0.04, 0.02, 0.0025, 0.00125]
        numbers = policy_comparison.robustness(scale, runs)["fasgd"]
        assert numbers["once"] == 0.01
        assert numbers["best rates differ by a factor of"] == 32
        assert numbers["points lost by one rate for all"] == pytest.approx(0.5)

    @pytest.mark.parametrize(
        ("factors", "agrees"),
        [((1.1, 1.2, 1.5, 2), True), ((2, 1, 1, 1), False), ((1, 3, 2, 2), None)],
    )
    def test_a_lead_that_grows(self, factors: tuple[float, ...], agrees: bool | None) -> None:
        scale = EXPERIMENTS["fasgd-clients"].quick
        assert isinstance(scale, PolicyComparison)
        of = dict(zip((clients for clients, _batch in scale.panels), factors, strict=True))

        def errors(case: PlannedRun) -> float:
            run = case.simulation
            return 0.1 * (of[run.clients] if run.policy == "sasgd" else 1)

        runs = runs_of(scale, errors)
        groups = RunGroups(policy_comparison.cases(scale, runs), runs)
        assert lead_verdict(scale, groups, "printed").agrees is agrees

    def test_knobs_change_the_runs(self) -> None:
        scale = STALENESS.scale(
            full=False, knobs=["initial=small", "sasgd=inverse-plus-one", "order=sequential"]
        )
        cases = list(policy_comparison.cases(scale, Runs()))  # type: ignore[arg-type]
        assert {type(case.work).__name__ for case in cases} == {"InitializedSimulation"}
        assert {case.simulation.order for case in cases} == {"sequential"}
        sets = {case.simulation.policy: case.simulation.set for case in cases}
        assert sets == {"fasgd": (), "sasgd": ("modulate=inverse-plus-one",)}

    def test_printed_rates_alone(self) -> None:
        scale = STALENESS.scale(full=False, knobs=["rates=printed"])
        assert isinstance(scale, PolicyComparison)
        cases = list(policy_comparison.cases(scale, Runs()))  # type: ignore[arg-type]
        assert len(cases) == 2 * 2 * len(scale.panels) * scale.seeds
        assert {case.simulation.lr for case in cases} == set(policy_comparison.PRINTED.values())
        found = STALENESS.judge(scale, runs_of(scale, lambda case: case.simulation.lr))
        assert {row["rates"] for row in found.table} == {"paper", "printed"}
        assert [verdict.agrees for verdict in found.verdicts] == [True, True]

    def test_chosen_rates_alone(self) -> None:
        scale = CLIENTS.scale(full=False, knobs=["rates=chosen"])
        assert isinstance(scale, PolicyComparison)
        runs = runs_of(scale, lambda case: case.simulation.lr)
        cases = list(policy_comparison.cases(scale, runs))
        reported = [case for case in cases if case.role == "reported"]
        assert len(reported) == 2 * len(scale.panels) * scale.seeds
        assert {case.curve for case in reported} == {"fasgd, fair", "sasgd, fair"}
        # The error of these runs is their rate: the least of each pool is the best.
        least = {min(scale.pool.of(policy)) for policy in policy_comparison.POLICIES}
        assert {case.simulation.lr for case in reported} == least
        found = CLIENTS.judge(scale, runs)
        assert {row["rates"] for row in found.table} == {"fair"}
        assert [verdict.agrees for verdict in found.verdicts] == [True, False]
        panels = CLIENTS.draw(scale, runs).panels
        assert len(panels) == len(scale.panels)


class TestGated:
    def group(self, *errors: float) -> list[FinishedRun]:
        case = next(iter(policy_comparison.cases(STALENESS.quick, Runs())))  # type: ignore[arg-type]
        return [FinishedRun(replace(case, seed=n), result(e)) for n, e in enumerate(errors)]

    def test_the_first_fetches_do_not_count(self) -> None:
        (run,) = self.group(0.1)
        assert gated_runs.counted(run, "fetches")[0] == 0
        assert gated_runs.share([run], "fetches") == 0.5
        assert gated_runs.share([run], "pushes") == 1

    def test_three_tenths_of_a_point_are_no_loss(self) -> None:
        base = self.group(0.1, 0.1, 0.1)
        assert gated_runs.keeps(self.group(0.1029, 0.1029, 0.1029), base, "it").agrees is True
        assert gated_runs.keeps(self.group(0.11, 0.12, 0.13), base, "it").agrees is False
        assert gated_runs.keeps(self.group(0.09, 0.11, 0.14), base, "it").agrees is None
        assert gated_runs.fails(self.group(0.11, 0.12, 0.13), base, "it").agrees is True
        assert gated_runs.fails(self.group(0.1, 0.1, 0.1), base, "it").agrees is False

    def test_constants_are_approached_in_trials(self) -> None:
        def sent(run: FinishedRun) -> dict[str, float]:
            """Return shares as a gate would send them whose v̄ is 0.02."""
            c = float(run.case.simulation.gate.removeprefix("c="))
            return {"push": 0.02 / (0.02 + c)}

        runs, scale = Runs(), EXPERIMENTS["bfasgd-coin"].quick
        assert isinstance(scale, CoinScale)
        trials = gated_runs.Trials(scale, "panel", "label", lambda c: f"c={c['push']:g}", sent)
        cases, constants = trials.approach({"push": 0.5}, {"push": 0.1}, runs)
        assert (len(cases), constants) == (1, None)
        assert cases[0].role == "pool"
        assert cases[0].seed >= scale.seeds
        runs.add(cases[0].key, result(0.1))
        cases, constants = trials.approach({"push": 0.5}, {"push": 0.1}, runs)
        assert (len(cases), constants) == (2, None)
        runs.add(cases[1].key, result(0.1))
        cases, constants = trials.approach({"push": 0.5}, {"push": 0.1}, runs)
        assert constants == {"push": pytest.approx(0.18)}


class TestSoftsync:
    @pytest.mark.parametrize(
        ("staleness", "agrees"),
        [
            ({"0": 1, "1": 99}, True),
            ({"0": 50, "1": 50}, False),  # the mean is too small
            ({"0": 10, "1": 85, "3": 5}, False),  # the mean is right, and some are too stale
        ],
    )
    def test_verdicts(self, staleness: dict[str, int], agrees: bool) -> None:
        experiment = EXPERIMENTS["softsync-staleness"]
        runs = Runs()
        for case in experiment.cases(experiment.quick, runs):
            n = int(case.panel.partition("-")[0])
            scaled = {str(int(tau) * n): count for tau, count in staleness.items()}
            runs.add(case.key, result(0.1, staleness=scaled))
        findings = experiment.judge(experiment.quick, runs)
        assert {verdict.agrees for verdict in findings.verdicts} == {agrees}


class TestSoftsyncErrors:
    def verdicts(self, errors: Any) -> list[bool | None]:
        scale, runs = EXPERIMENTS["softsync-cifar10"].quick, Runs()
        assert isinstance(scale, ProtocolScale)
        for case in softsync_cifar10.cases(scale, runs):
            runs.add(case.key, result(errors(case.panel, case.curve)))
        return [
            verdict.agrees for verdict in softsync_cifar10.EXPERIMENT.judge(scale, runs).verdicts
        ]

    def test_as_the_paper_has_it(self) -> None:
        def errors(panel: str, curve: str) -> float:
            fails = panel == softsync_cifar10.PLAIN and curve in ("15-softsync", "30-softsync")
            return 0.9 if fails else 0.18

        assert self.verdicts(errors) == [True, True]

    def test_more_than_a_point_apart(self) -> None:
        assert self.verdicts(lambda _panel, curve: 0.3 if curve == "30-softsync" else 0.18) == [
            False,
            False,
        ]

    def test_the_rate_falls_at_the_same_share_of_all_runs(self) -> None:
        scale = EXPERIMENTS["softsync-cifar10"].full
        assert isinstance(scale, ProtocolScale)
        found = {case.curve: case for case in softsync_cifar10.cases(scale, Runs())}
        drops = {name: case.simulation.set[-1] for name, case in found.items()}
        assert drops["hardsync"] == drops["1-softsync"] == "schedule=step:0.1:7143:7738"
        assert drops["30-softsync"] == "schedule=step:0.1:214286:232143"
        assert {type(case.work) for case in found.values()} == {ConvNetSimulation}

    def test_the_papers_length_is_seven_times_as_long(self) -> None:
        scale = EXPERIMENTS["softsync-cifar10"].scale(full=True, knobs=["epochs=140"])
        cases = softsync_cifar10.cases(scale, Runs())  # type: ignore[arg-type]
        assert {case.simulation.iterations for case in cases} == {1_750_000}


class TestGatesOfATransformer:
    @pytest.mark.parametrize("way", ["coin", "push", "fetch", "budget"])
    def test_all_runs_train_it_behind_gates_without_a_scale(self, way: str) -> None:
        experiment, runs = EXPERIMENTS[f"bfasgd-{way}"], Runs()
        scale = experiment.scale(full=True, seeds=1, knobs=["network=transformer"])
        for _stage in range(5):  # more are named once the first are known
            for case in run_planning.planned(experiment, scale, runs):
                made = result(0.6)
                for sample in made["curve"]:
                    sample |= {"pushed": sample["pushes"], "fetched": sample["fetches"]}
                runs.add(case.key, made)
        cases = run_planning.planned(experiment, scale, runs)
        assert {type(case.work) for case in cases} == {TransformerSimulation}
        gates = {case.simulation.gate for case in cases} - {""}
        assert any(gate.startswith("bfasgd") for gate in gates)
        assert all("relative=true" in gate or gate.startswith("constant") for gate in gates)
        assert {case.simulation.set for case in cases} == {("relative=0.01",)}
        table = experiment.judge(scale, runs).table
        assert {row["nats"] for row in table} == {"1.200"}
        assert {row["error %"] for row in table} == {"60.00"}

    @pytest.mark.parametrize("way", ["coin", "push", "fetch", "budget"])
    def test_the_perceptron_is_the_default(self, way: str) -> None:
        experiment = EXPERIMENTS[f"bfasgd-{way}"]
        scale = experiment.scale(full=True)
        assert scale.base == experiment.full.base
        cases = run_planning.planned(experiment, scale, Runs())
        assert {type(case.work) for case in cases} == {Simulation}
        assert not any("relative" in case.simulation.gate for case in cases)


class TestSpeedup:
    def verdicts(self, hardsync: float, softsync: float) -> list[bool | None]:
        scale, runs = EXPERIMENTS["softsync-speedup"].quick, Runs()
        assert isinstance(scale, SpeedupScale)
        for case in softsync_speedup.cases(scale, runs):
            speedup = hardsync if case.simulation.policy == "hardsync" else softsync
            end = {"iteration": 9, "speedup": speedup, "idle": 0.0, "tau": 0.0}
            runs.add(case.key, {"digest": "d", "diverged": None, "curve": [end]})
        return [
            verdict.agrees for verdict in softsync_speedup.EXPERIMENT.judge(scale, runs).verdicts
        ]

    def test_verdicts(self) -> None:
        assert self.verdicts(18, 27) == [True, True]
        assert self.verdicts(26, 27) == [True, False]
        assert self.verdicts(10, 15) == [False, True]


class TestNoDelay:
    def verdicts(self, idle: float, error: Any) -> list[bool | None]:
        scale, runs = EXPERIMENTS["no-delay-scaling"].quick, Runs()
        assert isinstance(scale, ScalingScale)
        for case in no_delay_scaling.cases(scale, runs):
            if isinstance(case.work, ThroughputSimulation):
                speedup = case.simulation.clients * (1 - idle)
                end = {"iteration": 9, "speedup": speedup, "idle": idle, "tau": 0.0}
                runs.add(case.key, {"digest": "d", "diverged": None, "curve": [end]})
            else:
                runs.add(case.key, result(error(case.simulation.clients)))
        return [
            verdict.agrees for verdict in no_delay_scaling.EXPERIMENT.judge(scale, runs).verdicts
        ]

    def test_verdicts(self) -> None:
        assert self.verdicts(0.0, lambda workers: 0.1) == [True] * 6
        assert self.verdicts(0.5, lambda workers: 0.1 * workers) == [False] * 6
        assert self.verdicts(0.0, lambda workers: 0.1 * workers) == [True] * 4 + [False] * 2

    def test_rates_are_scaled_but_for_asgd(self) -> None:
        scale = EXPERIMENTS["no-delay-scaling"].quick
        assert isinstance(scale, ScalingScale)
        for rule, workers in no_delay_scaling.LEARNERS:
            settings = no_delay_scaling.learning_run(scale, rule, workers, 0).simulation.set
            assert ("scale_lr=true" in settings) is (rule != "asgd" and workers > 1)
