"""Finished runs, and the folder in which they are found again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from aiops.common.jsonable import plain
from aiops.errors import UsageError
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import MARKER, FinishedRun, RunFolder, RunGroups, Runs, unique
from aiops.lab.run_record import versions
from tests.lab.experiments.small_experiment import TINY, Told, result

CASE = PlannedRun("panel", "curve", 0, TINY)


class TestCase:
    def test_the_key_is_the_works_and_not_the_names(self) -> None:
        assert replace(CASE, panel="other", curve="other", seed=7, role="pool").key == CASE.key
        assert replace(CASE, work=replace(TINY, lr=0.5)).key != CASE.key
        assert replace(CASE, work=Told()).key != replace(CASE, work=Told(0.4)).key

    def test_another_versions_runs_are_not_mistaken_for_ours(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours = replace(CASE).key
        monkeypatch.setattr("aiops.__version__", "99.0")
        assert replace(CASE).key != ours

    def test_it_says_what_it_trains(self) -> None:
        assert CASE.simulation == replace(CASE, work=Told()).simulation == TINY

    def test_what_cannot_be_written_is_refused(self) -> None:
        assert plain({"a": (1, 2.5, None), "b": float("nan")}) == {"a": [1, 2.5, None], "b": None}
        with pytest.raises(TypeError, match="cannot be written"):
            plain(object())

    def test_equal_work_is_done_once(self) -> None:
        other = replace(CASE, work=Told())
        again = replace(CASE, curve="the same by another name")
        assert unique([CASE, other, again]) == [CASE, other]


class TestFinished:
    def test_the_tail_is_the_mean_of_the_last_tenth(self) -> None:
        curve = [{"iteration": n, "error": n / 100} for n in range(0, 101, 5)]
        run = FinishedRun(CASE, {"curve": curve})
        assert run.tail() == pytest.approx((0.95 + 1.0) / 2)
        assert run.tail(share=0.5) == pytest.approx(sum(range(55, 101, 5)) / 1000)
        assert run.series("error")[:2] == [0.0, 0.05]

    def test_one_that_diverged_is_the_worst(self) -> None:
        run = FinishedRun(CASE, result(0.1, diverged="a gradient is not finite"))
        assert run.diverged
        assert run.tail() == math.inf

    def test_a_cost_that_is_no_number(self) -> None:
        curve = [{"iteration": 0, "cost": 1.0}, {"iteration": 9, "cost": None}]
        run = FinishedRun(CASE, {"curve": curve})
        assert run.tail("cost") == math.inf
        assert math.isnan(run.series("cost")[1])

    def test_the_seeds_of_a_curve_are_together(self) -> None:
        cases = [replace(CASE, seed=seed) for seed in range(3)]
        runs = Runs({CASE.key: result(0.1)})
        groups = RunGroups([*cases, replace(CASE, curve="tried", role="pool")], runs)
        assert list(groups) == [("panel", "curve")]
        assert [run.case.seed for run in groups["panel", "curve"]] == [0, 1, 2]
        assert list(groups.panel("panel")) == ["curve"]
        assert groups["panel", "another"] == ()


class TestRuns:
    def test_a_failed_run_is_settled_and_has_no_result(self) -> None:
        runs, other = Runs(), replace(CASE, work=Told())
        runs.add(CASE.key, result(0.25))
        assert not runs.settled([CASE, other])
        runs.failed[other.key] = "it broke"
        assert runs.settled([CASE, other])
        assert [run.case for run in runs.of([CASE, other])] == [CASE]
        assert (runs.tail(CASE), runs.tail(other)) == (0.25, math.inf)


class TestFolder:
    def test_what_was_put_is_found_again(self, tmp_path: Path) -> None:
        RunFolder(tmp_path / "out", "small").put(CASE, result(0.25))
        again = RunFolder(tmp_path / "out", "small")
        found = again.runs.find(CASE)
        assert found is not None
        assert found.result == result(0.25)
        (file,) = (tmp_path / "out" / "runs").iterdir()
        row = json.loads(file.read_text())
        assert file.stem == CASE.key
        assert row["settings"]["dataset"] == "digits"
        assert row["versions"] == versions()

    def test_runs_of_other_versions_are_named_and_can_be_made_anew(self, tmp_path: Path) -> None:
        folder, other = RunFolder(tmp_path, "small"), replace(CASE, work=Told())
        folder.put(CASE, result(0.25))
        folder.put(other, result(0.5))
        path = tmp_path / "runs" / f"{CASE.key}.json"
        row = json.loads(path.read_text())
        row["versions"]["sources"] = "0123456789ab"
        path.write_text(json.dumps(row))
        kept = RunFolder(tmp_path, "small")
        assert kept.runs.settled([CASE, other])
        what = f"sources 0123456789ab, not {versions()['sources']}"
        assert kept.foreign([CASE, other, CASE]) == {what: 1}
        assert kept.foreign([other]) == {}
        rerun = RunFolder(tmp_path, "small", rerun=True)
        assert [run.case for run in rerun.runs.of([CASE, other])] == [other]
        assert rerun.foreign([CASE, other]) == {}
        rerun.put(CASE, result(0.75))
        assert json.loads(path.read_text())["versions"] == versions()

    def test_another_experiments_folder_is_refused(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, "other")
        before = (tmp_path / MARKER).read_text()
        with pytest.raises(UsageError, match="holds the results of other, not of small"):
            RunFolder(tmp_path, "small")
        assert (tmp_path / MARKER).read_text() == before

    def test_so_is_one_that_holds_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UsageError, match="holds other files"):
            RunFolder(tmp_path, "small")
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_and_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("")
        with pytest.raises(UsageError, match="is a file"):
            RunFolder(tmp_path / "out", "small")

    @pytest.mark.parametrize("text", ["{", "[]", '{"experiment": "small"}'])
    def test_a_damaged_marker(self, tmp_path: Path, text: str) -> None:
        (tmp_path / MARKER).write_text(text)
        with pytest.raises(UsageError, match="is damaged"):
            RunFolder(tmp_path, "small")

    def test_a_marker_of_another_time(self, tmp_path: Path) -> None:
        (tmp_path / MARKER).write_text('{"experiment": "small", "format": 99}')
        with pytest.raises(UsageError, match="another version of aiops"):
            RunFolder(tmp_path, "small")

    def test_a_damaged_run_is_named(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, "small").put(CASE, result(0.25))
        path = tmp_path / "runs" / f"{CASE.key}.json"
        path.write_text(path.read_text()[:40])
        with pytest.raises(UsageError, match=f"{CASE.key}.json is damaged"):
            RunFolder(tmp_path, "small")

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="Not a directory"):
            RunFolder(tmp_path / "file" / "out", "small")
