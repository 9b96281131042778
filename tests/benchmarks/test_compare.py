"""Comparing two reports: what counts as a regression, and what cannot be compared."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from aiops.cli import main
from aiops.errors import UsageError
from benchmarks import compare, report
from benchmarks.compare import Cell, Pair
from tests.rows import each_row

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HERE = {"cpu": "Some Processor", "usable_cores": 2, "packages": {"numpy": "2.0"}}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``aiops bench`` inside this process; return its exit status, output and errors."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", ["aiops", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code, *capsys.readouterr()

    return run


def spread(*values: float) -> dict[str, float]:
    return report.spread(values)


def exchanges(*ratios: float, rate: float = 100.0, **machine: Any) -> dict[str, Any]:
    """A report of our exchanges beside raw sockets, in several rounds, and of a module alone."""
    ours = {"cycles_per_second": spread(rate), "x_raw": spread(*ratios)}
    raw = {"cycles_per_second": spread(50.0), "x_raw": spread(1.0)}
    views = {"cycles_per_second": spread(rate)}
    cell = {"size": 4096, "workers": 2, "peers": {"aiops": ours, "raw": raw, "views": views}}
    return {
        "benchmark": "exchange",
        "machine": {**HERE, **machine},
        "options": {"rounds": len(ratios)},
        "cells": [cell],
    }


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    numbers = iter(range(10))

    def save(content: Any) -> Path:
        path = tmp_path / f"{next(numbers)}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return save


@each_row(
    ("old", "new", "verdict"),
    [
        ((0.9, 1.0, 1.1), (0.9, 1.0, 1.1), ""),
        ((0.9, 1.0, 1.1), (0.6, 0.7, 0.8), "regressed"),
        ((0.9, 1.0, 1.1), (0.6, 0.7, 0.95), ""),  # its best round is as good as an old one
        ((0.9, 1.0, 1.1), (1.2, 1.3, 1.4), "improved"),
        ((0.9, 1.0, 1.1), (0.8, 1.3, 1.4), ""),
    ],
)
def test_a_regression_is_beyond_both_spreads(old: Any, new: Any, verdict: str) -> None:
    cells = [Cell.of("here", "cycles/s", spread(*values)) for values in (old, new)]
    assert Pair(*cells, judged=True).verdict == verdict
    assert Pair(*cells, judged=False).verdict == "not judged"


def test_of_some_figures_less_is_better() -> None:
    old, new = (Cell.of("here", "µs", spread(*v), less=True) for v in ((1.0, 2.0), (3.0, 4.0)))
    assert Pair(old, new, judged=True).verdict == "regressed"
    assert Pair(new, old, judged=True).verdict == "improved"


def test_a_figure_without_rounds_is_uncertain_by_a_tenth() -> None:
    old, near, far = (Cell.once("here", "GB/s", value) for value in (1.0, 0.85, 0.8))
    assert Pair(old, near, judged=True).verdict == ""
    assert Pair(old, far, judged=True).verdict == "regressed"


def test_what_was_measured_beside_a_peer_is_compared_as_a_ratio_to_it(saved: Any) -> None:
    old, new = saved(exchanges(1.0)), saved(exchanges(1.0, rate=10.0))
    pairs = {(pair.old.where, pair.old.beside): pair for pair in compare.compare(old, new)}
    assert set(pairs) == {("4 KiB x 2, aiops", "raw"), ("4 KiB x 2, views", "")}
    assert pairs["4 KiB x 2, aiops", "raw"].ratio == 1.0, "the machine was slower, not the code"
    assert pairs["4 KiB x 2, views", ""].verdict == "regressed"


def test_figures_as_they_stand_are_not_judged_across_machines(saved: Any) -> None:
    pairs = compare.compare(
        saved(exchanges(1.0)), saved(exchanges(0.5, rate=10.0, cpu="Another Processor"))
    )
    assert [pair.verdict for pair in pairs] == ["regressed", "not judged"]


def test_the_exit_status_says_whether_something_regressed(
    saved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old, same = saved(exchanges(1.0, 1.1)), saved(exchanges(1.0, packages={"numpy": "2.1"}))
    worse = saved(exchanges(0.5, 0.6))
    assert compare.main(old, same) == 0
    printed = capsys.readouterr().out
    assert "2 cells in common: 0 regressed, 0 improved" in printed
    assert "version numpy: 2.0 → 2.1" in printed
    assert "setting rounds: 2 → 1" in printed
    assert compare.main(old, worse) == 1
    assert "2 cells in common: 1 regressed" in capsys.readouterr().out
    assert compare.main(worse, old) == 0


@each_row(
    "name",
    ["exchange", "exchange-same-host", "kernels", "codecs", "link", "cluster", "tables"],
)
def test_the_committed_results_can_be_compared(name: str) -> None:
    path = RESULTS / f"{name}.json"
    pairs = compare.compare(path, path)
    assert pairs
    for pair in pairs:
        assert pair.ratio == pytest.approx(1.0)
        assert pair.old.low <= pair.old.median <= pair.old.high
        assert pair.verdict == ""


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(exchanges(1.0)), **changes}


OTHER_SIZE = changed()
OTHER_SIZE["cells"][0]["size"] = 8192


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("no json", "is not JSON"),
        ([], "is not a benchmark's report"),
        ({"benchmark": "exchange"}, "is not a benchmark's report"),
        (changed(benchmark="kernels"), "only reports of one benchmark can be compared"),
        (changed(cells=[{"size": 4}]), "is not a whole report of exchange"),
        (changed(cells=[]), "have measured nothing in common"),
        (OTHER_SIZE, "have measured nothing in common"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence_and_an_error_s_status(
    new: Any, says: str, saved: Any, bench: Any
) -> None:
    old, path = saved(exchanges(1.0)), saved(new)
    with pytest.raises(UsageError, match=says):
        compare.compare(old, path)
    status, printed, errors = bench("--compare", str(old), str(path))
    assert (status, printed) == (64, "")
    assert says in errors


@pytest.mark.parametrize(
    ("benchmark", "says"),
    [("clock", "no figures that could regress"), ("os.path", "no benchmark of ours")],
)
def test_reports_that_nobody_can_read(benchmark: str, says: str, saved: Any) -> None:
    path = saved(changed(benchmark=benchmark))
    with pytest.raises(UsageError, match=says):
        compare.compare(path, path)


class TestFolders:
    def folder(self, path: Path, **reports: Any) -> Path:
        path.mkdir()
        for name, content in reports.items():
            (path / f"{name}.json").write_text(json.dumps(content))
        return path

    def test_they_are_compared_file_by_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        same, better, worse = exchanges(1.0), exchanges(2.0), exchanges(0.5)
        aside = {"experiment": "no benchmark's"}
        old = self.folder(tmp_path / "old", a=same, b=same, c=same, gone=same, other=aside)
        new = self.folder(tmp_path / "new", a=same, b=worse, c=better, fresh=same, other=aside)
        assert compare.main(old, new) == 1
        printed = capsys.readouterr().out
        assert printed.count("cells in common") == 3
        assert f"left out gone.json: only in {old}" in printed
        assert f"left out fresh.json: only in {new}" in printed
        assert f"left out other.json: {old / 'other.json'} is not a benchmark's report" in printed
        assert printed.endswith("3 reports in common; regressed: b.json\n")
        assert compare.main(old, old) == 0
        assert capsys.readouterr().out.endswith("4 reports in common; regressed: none\n")

    def test_folders_that_have_nothing_to_compare(self, tmp_path: Path, bench: Any) -> None:
        old = self.folder(tmp_path / "old", a=exchanges(1.0))
        new = self.folder(tmp_path / "new", b=exchanges(1.0))
        status, _printed, errors = bench("--compare", str(old), str(new))
        assert status == 64
        assert "have no report in common" in errors

    def test_a_folder_and_a_file(self, tmp_path: Path, bench: Any) -> None:
        old = self.folder(tmp_path / "old", a=exchanges(1.0))
        status, _printed, errors = bench("--compare", str(old), str(old / "a.json"))
        assert status == 66
        assert "cannot be read" in errors


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        compare.compare(tmp_path / "a.json", tmp_path / "b.json")


def test_the_command(saved: Any, bench: Any) -> None:
    old, new = str(saved(exchanges(1.0))), str(saved(exchanges(0.5)))
    assert bench("--compare", old, old)[0] == 0
    status, printed, _errors = bench("--compare", old, new)
    assert status == 1
    assert "regressed" in printed
    assert "leave out kernels" in bench("--compare", old, new, "kernels")[2]
    status, printed, _errors = bench()
    assert status == 64
    assert "--compare" in printed
