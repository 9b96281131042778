"""Missing runs are run, finished ones are kept, and a failure is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aiops.errors import AiopsError, UsageError
from aiops.lab.experiments import run_planning
from aiops.lab.experiments.experiment import Scale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import RunFolder
from aiops.lab.experiments.scheduler import ExperimentScheduler
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.small_experiment import SMALL, TINY, Here, Seen, Told, here


def course(
    tmp_path: Path, scale: Scale = SMALL.quick, seen: Seen | None = None
) -> ExperimentScheduler:
    return ExperimentScheduler(SMALL, scale, RunFolder(tmp_path / "out", "small"), seen or Seen())


def test_stage_follows_stage_until_nothing_is_missing(tmp_path: Path) -> None:
    pool, seen = Here(), Seen()
    ours = course(tmp_path, seen=seen)
    assert len(ours.wanted()) == 2
    assert len(ours.unfinished()) == 3
    ours.run(2, here(pool))
    assert [case.curve for case in pool.ran] == ["slow", "fast", "again"]
    assert ours.missing() == ours.unfinished() == []
    assert seen.shares == sorted(seen.shares)
    assert seen.shares[-1] == 1.0


def test_a_rerun_does_only_what_is_missing(tmp_path: Path) -> None:
    course(tmp_path).run(1, here(Here()))
    pool = Here()
    course(tmp_path).run(1, here(pool))
    assert pool.ran == []
    course(tmp_path, replace(SMALL.quick, seeds=2)).run(1, here(pool))
    assert [(case.curve, case.seed) for case in pool.ran] == [("slow", 1), ("fast", 1)]


def test_what_is_finished_survives_ctrl_c(tmp_path: Path) -> None:
    def stop(case: PlannedRun) -> None:
        if case.curve == "fast":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        course(tmp_path).run(1, here(Here(stop)))
    pool = Here()
    course(tmp_path).run(1, here(pool))
    assert [case.curve for case in pool.ran] == ["fast", "again"]


def test_the_failure_of_one_run_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    def stop(case: PlannedRun) -> None:
        if case.curve == "slow":
            object.__setattr__(case, "work", Told(fails="sentence"))

    pool, seen = Here(stop), Seen()
    ours = course(tmp_path, seen=seen)
    slow = ours.wanted()[0]
    key = slow.key
    ours.run(1, here(pool))
    assert seen.failures == [("panel, slow, seed 0", "this run cannot work")]
    assert [case.curve for case in pool.ran] == ["slow", "fast", "again"]
    assert key in {case.key for case in pool.ran}
    again = Here()
    course(tmp_path).run(1, here(again))
    assert [case.curve for case in again.ran] == ["slow"], "a failure is not kept"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch_size": 5000}, "mini-batches of 5000: the data has"),
        ({"policy": "softsync", "set": ("n=9",)}, "n"),
        ({"gate": "bfasgd:c_psh=1"}, "c_push"),
        ({"selection": "unifrom"}, "uniform"),
        ({"dataset": "digit"}, "digits"),
        ({"order": "backwards"}, "order"),
    ],
)
def test_impossible_settings_are_told_before_anything_is_run(
    tmp_path: Path, change: dict[str, object], why: str
) -> None:
    pool = Here()
    base: Simulation = replace(TINY, **change)  # type: ignore[arg-type]
    ours = course(tmp_path, Scale(base=base, seeds=1))
    with pytest.raises(UsageError, match=why):
        ours.run(1, here(pool))
    assert pool.ran == []


def test_a_missing_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AIOPS_DATA", str(tmp_path))
    monkeypatch.setattr("aiops.lab.workloads.mnist.MIRRORS", ("http://127.0.0.1:9/",))
    ours = course(tmp_path, Scale(base=replace(TINY, dataset="mnist"), seeds=1))
    with pytest.raises(AiopsError, match="data set 'mnist'"):
        ours.run(1, here(Here()))


def test_no_clients_at_all() -> None:
    with pytest.raises(UsageError, match="clients must be 1 or more, not 0"):
        replace(TINY, clients=0)


class TestEstimate:
    def test_a_rehearsal_knows_what_is_real(self, tmp_path: Path) -> None:
        ours = course(tmp_path)
        rehearsal = run_planning.AssumedRuns(ours.folder.runs)
        (first, second) = ours.wanted()
        assert rehearsal.find(first).tail() != rehearsal.find(second).tail()
        ours.run(1, here(Here()))
        real = ours.folder.runs.find(first)
        assert real is not None
        assert rehearsal.find(first).result == real.result

    def test_memory_grows_with_clients_until_there_are_more_than_versions(self) -> None:
        sizes = [
            run_planning.memory(PlannedRun("p", "c", 0, replace(TINY, clients=clients)))
            for clients in (1, 11, 20, 1000)
        ]
        model = 4 * (64 * 4 + 4 + 4 * 10 + 10)
        assert sizes[1] - sizes[0] == 10 * model
        assert sizes[2] == sizes[3]

    def test_two_processes_take_half_as_long_and_never_less_than_the_longest_run(self) -> None:
        cases = [PlannedRun("p", "c", seed, replace(TINY, seed=seed)) for seed in range(40)]
        assert run_planning.seconds(cases, 40) <= run_planning.seconds(cases, 1)
        assert run_planning.seconds([], 2) > 0
