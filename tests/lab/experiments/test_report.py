"""The files of an experiment, and its figure."""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.lab import drawing
from aiops.lab.experiments import report
from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.experiment import Experiment, Scale, Verdict
from aiops.lab.experiments.runs import FinishedRun, RunFolder, Runs, versions
from aiops.lab.experiments.scheduler import ExperimentScheduler
from aiops.lab.figures import Figure, Panel, Series
from tests.lab.experiments.small_experiment import SMALL, Here, Seen, here, result


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of an experiment that has been run."""
    made = RunFolder(tmp_path / "out", "small")
    ExperimentScheduler(SMALL, SMALL.quick, made, Seen()).run(1, here(Here()))
    return made


def save(folder: RunFolder, experiment: Experiment = SMALL) -> list[Path]:
    findings = experiment.judge(experiment.quick, folder.runs)
    return report.save(experiment, experiment.quick, folder, findings, "aiops experiment run small")


def test_the_files(folder: RunFolder) -> None:
    names = [path.name for path in save(folder)]
    assert names == ["summary.json", "curves.csv", "runs.jsonl.gz", "figure.png", "figure.svg"]
    assert (folder.path / "figure.png").read_bytes().startswith(b"\x89PNG")
    text = (folder.path / "figure.svg").read_text()
    assert "<svg" in text
    assert "<dc:date>" not in text


def test_the_summary(folder: RunFolder) -> None:
    save(folder)
    found = json.loads((folder.path / "summary.json").read_text())
    assert found["command"] == "aiops experiment run small"
    assert found["complete"]
    assert found["verdicts"] == [{"word": "agrees", "agrees": True, "text": "3 runs"}]
    assert found["versions"] == [versions()]
    assert found["seeds"] == [0]
    assert [run["curve"] for run in found["runs"]] == ["slow", "fast", "again"]
    for run in found["runs"]:
        assert len(run["digest"]) == 64
        assert run["settings"]["kind"] == "Simulation"
        assert (folder.path / "runs" / f"{run['key']}.json").exists()


def test_the_curves(folder: RunFolder) -> None:
    save(folder)
    with (folder.path / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3
    assert [row["iteration"] for row in rows[:3]] == ["0", "10", "20"]
    assert {row["curve"] for row in rows} == {"slow", "fast", "again"}
    assert {row["role"] for row in rows} == {"reported"}
    assert 0 <= float(rows[0]["error"]) <= 1


def test_what_is_missing_and_what_failed_is_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out", "small")
    slow, fast = SMALL.cases(SMALL.quick, folder.runs)
    folder.put(slow, result(0.5))
    folder.runs.failed[fast.key] = "it broke"
    save(folder)
    found = json.loads((folder.path / "summary.json").read_text())
    assert not found["complete"]
    assert found["failed"] == [{"name": fast.name, "why": "it broke"}]
    assert found["verdicts"][0]["word"] == "cannot be told"


def test_without_matplotlib_the_figures_are_kept(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="figures need matplotlib"):
        save(folder)
    assert (folder.path / "summary.json").exists()
    assert (folder.path / "curves.csv").exists()


class TestDrawing:
    @pytest.mark.parametrize("kind", ["line", "bars", "points"])
    def test_every_kind_and_what_is_not_there(self, tmp_path: Path, kind: str) -> None:
        lines = [
            Series("two seeds", [1, 2, 3], [[1, 2, 3], [2, 3, math.nan]], kind),
            Series("one of them", [1, 2, 3], [[1, math.nan, 3]], kind),
            Series("nothing", [], [], kind),
        ]
        panels = [
            Panel("plain", "x", "y", lines, bottom=0, top=10),
            Panel("logarithmic", "x", "y", lines, log="xy"),
            Panel("named", "x", "y", lines, ticks=["a", "b"]),
            Panel("narrow", "x", "y", [Series("one point", [100.0], [[101.0], [102.0]])], log="xy"),
            Panel("wide", "x", "y", [Series("decades", [1, 2], [[1e-6, 1e6]])], log="y"),
            Panel("empty", "x", "y", [], log="xy"),
        ]
        png, svg = drawing.save(Figure("All", panels, 2), tmp_path / "figure")
        assert png.stat().st_size > 1000
        assert "two seeds" in svg.read_text() or svg.stat().st_size > 1000

    def test_long_axes_are_numbered_in_thousands_and_millions(self, tmp_path: Path) -> None:
        line = Series("a", [0, 500_000, 1_000_000], [[0, 200_000, 400_000]])
        _png, svg = drawing.save(Figure("Long", [Panel("p", "x", "y", [line])], 1), tmp_path / "f")
        said = svg.read_text(encoding="utf-8")
        assert all(f"<!-- {number} -->" in said for number in ("0", "250k", "500k", "1M", "400k"))

    def test_rows_say_who_has_no_value(self, tmp_path: Path) -> None:
        """And what is infinite, such as a time at which nothing happened, is none."""
        lines = [
            Series("those", [0, 2], [[1, math.inf], [2, 3]], "rows"),
            Series("these", [1, 3], [[math.inf, 5], [math.inf, 6]], "rows"),
        ]
        names = ["first", "second", "third", "fourth"]
        panels = [
            Panel("linear", "seconds", "", lines, bottom=0, ticks=names),
            Panel("logarithmic", "bytes", "", lines, "x", ticks=names),
        ]
        seen: list[Any] = []
        drawn = drawing._rows

        def rows(line: Series, axes: Any, colour: str, mark: str) -> None:
            seen.append(axes)
            drawn(line, axes, colour, mark)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing, "_rows", rows)
            drawing.save(Figure("Rows", panels, 2), tmp_path / "figure")
        left, right = dict.fromkeys(seen)
        for axes in (left, right):
            assert {(text.get_text(), text.xy[1]) for text in axes.texts} == {
                ("1 of 2", 2),
                ("–", 1),
            }
            tops = axes.get_ylim()
            assert tops[0] > tops[1], "the first row is on top"
        assert [text.get_text() for text in left.get_yticklabels()] == names
        assert (left.get_xscale(), right.get_xscale()) == ("linear", "log")
        assert left.get_xlim()[0] == 0

    def test_equal_figures_are_equal_files(self, tmp_path: Path) -> None:
        figure = Figure("All", [Panel("p", "x", "y", [Series("l", [1, 2], [[1, 2]])])], 1)
        files = [drawing.save(figure, tmp_path / name)[1].read_bytes() for name in "ab"]
        assert files[0] == files[1]

    def test_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "no").touch()
        with pytest.raises(UsageError, match="cannot be written"):
            drawing.save(Figure("All", [Panel("p", "x", "y", [])], 1), tmp_path / "no" / "figure")

    def test_curves_of_unequal_length_end_where_they_end(self) -> None:
        case = next(iter(SMALL.cases(SMALL.quick, Runs())))
        short = [{"iteration": 0, "error": 0.9}]
        runs = [FinishedRun(case, result(0.5)), FinishedRun(case, result(0.5, curve=short))]
        line = curve("label", runs, "error", times=100)
        assert len(line.ys[1]) == len(line.x) == 11
        assert line.ys[1][0] == 90
        assert all(map(math.isnan, line.ys[1][1:]))


class TestScale:
    def test_a_users_wishes(self) -> None:
        scale = SMALL.scale(full=True, seeds=5, iterations=7, knobs=["order=sequential"])
        assert scale == Scale(
            base=replace(SMALL.full.base, iterations=7), seeds=5, knobs={"order": "sequential"}
        )
        assert SMALL.scale(full=False).knobs == {"order": "random"}

    @pytest.mark.parametrize(
        ("wish", "why"),
        [
            ({"seeds": 0}, "--seeds must be 1 to 1,000, not 0"),
            ({"seeds": 1001}, "not 1,001"),
            ({"iterations": 0}, "iterations must be 1 or more, not 0"),
            ({"knobs": ["odrer=random"]}, "order"),
            ({"knobs": ["order=sequental"]}, "sequential"),
            ({"knobs": ["order"]}, "cannot be ''"),
        ],
    )
    def test_wishes_that_cannot_come_true(self, wish: dict[str, object], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            SMALL.scale(full=False, **wish)  # type: ignore[arg-type]

    def test_an_experiment_without_knobs(self) -> None:
        with pytest.raises(UsageError, match="it has none"):
            replace(SMALL, knobs={}).scale(full=False, knobs=["order=random"])


def test_verdicts_in_words() -> None:
    words = [Verdict(agrees, "").word for agrees in (True, False, None)]
    assert words == ["agrees", "does not agree", "cannot be told"]
