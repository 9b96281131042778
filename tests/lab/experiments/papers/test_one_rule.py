"""One rule beside its rivals: the protocol, and what is made of runs as if they had been made."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from aiops.errors import UsageError
from aiops.lab.experiments import click_tables, run_planning
from aiops.lab.experiments.catalog import EXPERIMENTS
from aiops.lab.experiments.execution import LSTMSimulation, TaskSimulation
from aiops.lab.experiments.experiment import Findings
from aiops.lab.experiments.papers import one_rule_rivals
from aiops.lab.experiments.papers.one_rule import OneRuleScale
from aiops.lab.experiments.papers.one_rule_rivals import (
    BARRIER,
    OURS,
    RIVALS,
    RULES,
    TIMES,
    TRIAL_SEED,
    TUNED,
    mini_batches,
    simulation,
)
from aiops.lab.experiments.papers.one_rule_tasks import OF_FULL, TASKS, Measure
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Fixed, Straggler
from aiops.sim.cluster.run import simulate
from aiops.sim.cluster.spec import Cluster
from aiops.sim.cluster.workload import Deadweight
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.small_experiment import TINY, result

EXPERIMENT = EXPERIMENTS["one-rule"]
NAMES = {rule.name: rule for rule in RULES}
ASGD, SYNC = NAMES["asgd, AdamW, cosine"], NAMES["hardsync, AdamW, cosine"]

Error = Callable[[PlannedRun], float]


def scale_of(*knobs: str, full: bool = True) -> OneRuleScale:
    scale = EXPERIMENT.scale(full=full, knobs=knobs)
    assert isinstance(scale, OneRuleScale)
    return scale


def run_of(case: PlannedRun) -> Simulation:
    return case.work if isinstance(case.work, Simulation) else case.work.simulation


def judged(scale: OneRuleScale, error: Error) -> tuple[list[PlannedRun], Findings]:
    """Return all cases, and what comes of runs with such errors."""
    runs = Runs()
    for _stage in range(2):
        for case in EXPERIMENT.cases(scale, runs):
            runs.add(case.key, result(error(case)))
    return list(EXPERIMENT.cases(scale, runs)), EXPERIMENT.judge(scale, runs)


def test_the_examples_in_docstrings() -> None:
    found = doctest.testmod(one_rule_rivals)
    assert found.attempted
    assert not found.failed


class TestProtocol:
    def test_each_rival_has_as_many_trials_and_ours_none(self) -> None:
        scale = scale_of("task=mnist")
        for rule in RULES:
            assert len(scale.trials(rule, 16)) == (0 if rule is OURS else 4)

    def test_trials_have_a_seed_that_is_not_reported(self) -> None:
        cases, _findings = judged(scale_of(full=False), lambda case: 0.1)
        pool = {case.seed for case in cases if case.role == "pool"}
        assert pool == {TRIAL_SEED}
        assert {case.seed for case in cases if case.role == "reported"} == {0, 1, 2}

    def test_the_trials_choose_and_not_the_reported_runs(self) -> None:
        scale = scale_of(full=False)
        rates = ASGD.rates(scale.task, 4)

        def error(case: PlannedRun) -> float:
            lowest = rates[0] if case.role == "pool" else rates[3]
            return 0.1 if run_of(case).lr == lowest else 0.2

        cases, _findings = judged(scale, error)
        ran = [run_of(case) for case in cases if case.role == "reported"]
        chosen = {run.lr for run in ran if (run.policy, run.clients) == ("asgd", 4)}
        assert rates[0] in chosen
        assert rates[3] not in chosen

    def test_a_trial_that_diverges_is_not_chosen(self) -> None:
        scale = scale_of(full=False)
        _cases, findings = judged(
            scale, lambda c: math.nan if c.role == "pool" and (run_of(c).lr or 0) > 0.01 else 0.1
        )
        row = next(r for r in findings.table if (r["rule"], r["workers"]) == (SYNC.name, "1"))
        assert float(row["rate"].split()[0]) <= 0.01

    def test_alone_there_is_neither_barrier_nor_staleness(self) -> None:
        alone = {rule.name for rule in RULES if rule.runs_with(1)}
        assert OURS.name in alone
        assert SYNC.name in alone
        assert not {ASGD.name, BARRIER.name} & alone

    def test_a_cosine_ends_with_the_run(self) -> None:
        task = TASKS["lstm"]
        run = simulation(task, SYNC, 4, 0.01, 0, unequal=False)
        assert "schedule=warmup:15,cosine:150" in run.set
        late = simulation(task, SYNC, 4, 0.01, 0, unequal=True)
        assert "schedule=warmup:15,cosine:60" in late.set
        run = simulation(task, ASGD, 4, 0.01, 0, unequal=True)
        assert "schedule=warmup:60,cosine:600" in run.set

    def test_a_barrier_is_one_worker_with_all_examples(self) -> None:
        run = simulation(TASKS["lstm"], BARRIER, 4, 0.008, 0, unequal=False)
        assert (run.clients, run.batch_size, run.iterations) == (1, 64, 150)
        assert run.set == ("schedule=warmup:6",)

    def test_every_rule_is_one_that_a_server_takes(self) -> None:
        task = TASKS["digits"]
        for rule in RULES:
            for unequal in (False, True):
                simulation(task, rule, 4, 0.01, 0, unequal=unequal).engine()

    def test_a_tasks_own_row_is_no_rival_and_changes_the_rate_of_its_tables_alone(self) -> None:
        scale = scale_of("task=tables")
        (own,) = set(scale.rules) - set(RULES)
        assert own.name not in {rule.name for rule in RIVALS}
        assert scale_of("task=lstm").rules == RULES
        algorithm = simulation(scale.task, own, 4, 0.008, 0, unequal=False).engine().algorithm
        usual = simulation(scale.task, OURS, 4, 0.008, 0, unequal=False).engine().algorithm
        for name, shape in click_tables._shapes().items():
            times = 2 if name.startswith("table") else 1
            rate = algorithm.lr * algorithm.rate_factor(name, shape)
            assert rate == pytest.approx(times * usual.lr * usual.rate_factor(name, shape))


class TestTime:
    @pytest.mark.parametrize("workers", [2, 4, 16])
    def test_a_barrier_waits_for_the_slow_worker(self, workers: int) -> None:
        """In its time the fast workers alone make three rounds' mini-batches for one of its."""
        sync = mini_batches(6000, workers, barrier=True, unequal=True)
        rounds = sync // workers
        assert 3 * rounds * (workers - 1) + rounds == pytest.approx(6000, abs=3 * workers)
        assert mini_batches(6000, workers, barrier=True, unequal=False) == 6000

    @pytest.mark.parametrize(("policy", "barrier"), [("asgd", False), ("hardsync", True)])
    def test_a_cluster_in_virtual_time_does_as_much(self, policy: str, barrier: bool) -> None:
        count, workers = 600, 4
        found = simulate(
            Cluster(
                server=Config(policy=policy),
                workers=workers,
                workload=Deadweight(400),
                computing=Straggler(Fixed(1.0), TIMES),
                seconds=count / (workers - 1 + 1 / TIMES) + 0.5,  # the last ones arrive
            )
        )
        expected = mini_batches(count, workers, barrier=barrier, unequal=True)
        assert found.gradients == pytest.approx(expected, abs=workers)

    def test_turns_come_as_workers_finish(self) -> None:
        run = simulation(TASKS["digits"], ASGD, 4, 0.01, 0, unequal=True)
        assert run.selection == "paced:times=3"
        assert simulation(TASKS["digits"], SYNC, 4, 0.01, 0, unequal=True).selection != (
            run.selection
        )

    def test_one_alone_waits_for_none(self) -> None:
        assert 1 in scale_of("task=lstm").workers
        assert 1 not in scale_of("task=lstm", "speeds=unequal").workers


class TestTasks:
    @pytest.mark.parametrize("name", OF_FULL)
    def test_each_is_planned_and_can_be_asked_to_be_shorter(self, name: str) -> None:
        scale = EXPERIMENT.scale(full=True, iterations=64, seeds=1, knobs=[f"task={name}"])
        cases = run_planning.planned(EXPERIMENT, scale, Runs())
        assert {run_of(c).iterations for c in cases if run_of(c).policy == "asgd"} == {64}
        assert all(run_of(case).samples for case in cases)

    def test_a_default_length_is_the_tasks(self) -> None:
        assert scale_of("task=mnist").base == TASKS["mnist"].base
        assert scale_of().base == TASKS["transformer"].base

    @pytest.mark.parametrize(("budget", "count"), [("0.25", 150), ("1", 600), ("4", 2400)])
    def test_a_budget_is_of_mini_batches(self, budget: str, count: int) -> None:
        scale = scale_of("task=transformer", f"budget={budget}")
        assert scale.base.iterations == count
        title = EXPERIMENT.figure(scale, RunGroups((), Runs())).title
        assert ("times the mini-batches" in title) == (budget != "1")

    def test_another_task_is_not_quick(self) -> None:
        with pytest.raises(UsageError, match="give --full for task=lstm"):
            scale_of("task=lstm", full=False)

    def test_mini_batches_shrink_as_workers_become_more(self) -> None:
        task = TASKS["mnist"]
        assert [task.batch_size(n) for n in (4, 128, 512)] == [32, 1, 1]
        assert TASKS["lstm"].batch_size(16) == TASKS["lstm"].base.batch_size

    def test_rates_of_a_barrier_rise_and_those_of_stale_gradients_fall(self) -> None:
        task = TASKS["lstm"]
        assert SYNC.rates(task, 16)[1] == pytest.approx(4 * SYNC.rates(task, 1)[1], rel=0.01)
        assert ASGD.rates(task, 16)[1] == pytest.approx(ASGD.rates(task, 1)[1] / 2, rel=0.01)
        assert SYNC.rates(TASKS["mnist"], 128) == SYNC.rates(TASKS["mnist"], 4)

    def test_the_work_is_the_tasks(self) -> None:
        planned = scale_of("task=lstm").planned(OURS, 4, 0.008, 0)
        assert isinstance(planned.work, LSTMSimulation)
        assert isinstance(planned.work, TaskSimulation)


class TestFindings:
    def verdicts(self, error: Error, *knobs: str) -> list[bool | None]:
        scale = scale_of(*knobs, full=False)
        return [verdict.agrees for verdict in judged(scale, error)[1].verdicts]

    def test_ours_ahead(self) -> None:
        def error(case: PlannedRun) -> float:
            return 0.1 if case.curve.startswith("schedule-free at") else 0.2

        assert self.verdicts(error) == [True] * 5
        assert self.verdicts(error, "speeds=unequal") == [True] * 4

    def test_ours_behind_one_rival_that_knows_the_horizon(self) -> None:
        def error(case: PlannedRun) -> float:
            known = case.curve.startswith(ASGD.name) and run_of(case).clients == 16
            return 0.05 if known else 0.1

        assert self.verdicts(error) == [False, True, True, True, False]

    def test_ours_behind_itself_at_another_rate(self) -> None:
        def error(case: PlannedRun) -> float:
            return 0.05 if case.curve.startswith(TUNED.name) else 0.1

        assert self.verdicts(error) == [True, True, False, True, True]

    def test_ours_behind_its_own_barrier(self) -> None:
        def error(case: PlannedRun) -> float:
            return 0.05 if case.curve.startswith(BARRIER.name) else 0.1

        assert self.verdicts(error) == [True, True, True, False, True]

    def test_rows_say_how_far_a_rule_is_from_ours(self) -> None:
        def error(case: PlannedRun) -> float:
            first = {OURS.name: 0.1, "fasgd": 0.05}.get(case.curve.partition(" at")[0], 0.2)
            return first + 0.001 * case.seed if case.role == "reported" else first

        _cases, findings = judged(scale_of(full=False), error)
        rows = {(row["workers"], row["rule"]): row for row in findings.table}
        assert len(rows) == 2 * len(RULES) + sum(rule.runs_with(1) for rule in RULES)
        sasgd, fasgd, ours = (rows["4", name] for name in ("sasgd", "fasgd", OURS.name))
        assert sasgd["minus ours"] == "+10.000"
        assert (sasgd["beside ours"], fasgd["beside ours"]) == ("behind", "ahead")
        assert ours["of the seeds"] == "10.000 to 10.200"
        assert ours["rate"] == "0.008"
        assert sasgd["rate"].endswith("(the least)")  # all are equal

    def test_a_run_that_diverged_is_named_so(self) -> None:
        _cases, findings = judged(
            scale_of(full=False), lambda c: math.nan if run_of(c).policy == "sasgd" else 0.1
        )
        row = next(row for row in findings.table if row["rule"] == "sasgd")
        assert (row["% wrong"], row["minus ours"]) == ("diverged", "–")
        assert findings.verdicts[0].agrees

    @pytest.mark.parametrize("task", ["mnist", "crowd"])
    def test_where_nothing_is_to_compare_no_price_is_named(self, task: str) -> None:
        """Mini-batches differ, or there is one number of workers alone."""
        scale = replace(scale_of(f"task={task}"), seeds=1)
        found = judged(scale, lambda case: 0.1)[1].verdicts
        assert len(found) == 4

    def test_rivals_alone_do_not_make_a_verdict(self) -> None:
        scale, runs = scale_of(full=False), Runs()
        for rule in RIVALS:
            for case in scale.trials(rule, 4).values():
                runs.add(case.key, result(0.2))
        found = EXPERIMENT.judge(scale, runs)
        assert [verdict.agrees for verdict in found.verdicts] == [None]


def test_a_measure_of_a_run_that_diverged_is_infinite() -> None:
    case, measure = PlannedRun("p", "c", 0, TINY), Measure("cost", "nats", 1.0, 0.02)
    assert measure.of(FinishedRun(case, result(0.5))) == 1.0
    assert measure.of(FinishedRun(case, result(0.5, diverged="a NaN"))) == math.inf
    lost = result(0.5)
    lost["curve"][-1]["cost"] = None  # as JSON has what is not finite
    assert measure.of(FinishedRun(case, lost)) == math.inf
