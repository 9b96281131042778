"""The results of runs: the file, the tables and the figures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from aiops.cli.bandwidth import table
from aiops.errors import UsageError
from aiops.lab.experiments.bandwidth import plots
from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.bandwidth.results import BandwidthResults, Row, total, write_csv
from tests.lab.experiments.conftest import SMALL, made


class TestFile:
    def test_what_has_been_run_is_found_again(self, rows: list[Row], tmp_path: Path) -> None:
        path = tmp_path / "new" / "results.json"
        cases = [BandwidthCase.of(row["case"]) for row in rows]
        results = BandwidthResults(path)
        for case, row in zip(cases, rows, strict=True):
            assert results.find(case) is None
            results.put(case, row)
        again = BandwidthResults(path)
        assert again.of([*cases, BandwidthCase(seed=99)]) == BandwidthResults(path).of(cases)
        assert [row["error"] for row in again.of(cases)] == [0.05, 0.2, 0.1]
        again.put(SMALL, made(SMALL, 1, 0.5))
        assert [row["error"] for row in BandwidthResults(path).of(cases)] == [0.5, 0.2, 0.1]
        assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]

    @pytest.mark.parametrize("content", ["", "[]", '{"runs": [{"case": {"no": 1}}]}', "{}"])
    def test_another_file_of_that_name(self, content: str, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        path.write_text(content)
        with pytest.raises(UsageError, match="holds no results of this experiment"):
            BandwidthResults(path)
        assert path.read_text() == content

    def test_a_place_that_cannot_be_written(self, rows: list[Row], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        results = BandwidthResults(tmp_path / "file" / "results.json")
        with pytest.raises(UsageError, match="cannot be written"):
            results.put(SMALL, rows[0])


def test_a_line_per_run_and_one_per_sample(rows: list[Row], tmp_path: Path) -> None:
    runs, curves = write_csv(rows, tmp_path / "all")
    with runs.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == [row["name"] for row in rows]
    assert lines[0]["pushed"] == "10000"
    assert lines[0]["fetched_payload"] == "440"
    assert lines[1]["gate"] == "periodic:k_push=2"
    with curves.open() as file:
        samples = list(csv.DictReader(file))
    assert len(samples) == 9
    assert [sample["gradients"] for sample in samples[:3]] == ["0", "30", "60"]


def test_the_front_is_what_nobody_beats(rows: list[Row]) -> None:
    assert [row["error"] for row in plots.front(rows)] == [0.1, 0.05]
    assert total(rows[0]) == 20_000


def test_the_table_compares_with_the_first_run(rows: list[Row]) -> None:
    columns = {str(column.header): list(column.cells) for column in table(rows).columns}
    assert columns["less"] == ["÷1.0", "÷2.0", "÷2.5"]
    assert columns["error"] == ["5.0%", "20.0%", "10.0%"]


@pytest.mark.slow
def test_the_figures(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = plots.save(rows, tmp_path / "deep" / "all")
    assert [path.name for path in files] == ["all-pareto.png", "all-time.png", "all-tensors.png"]
    for path in files:
        assert path.read_bytes().startswith(b"\x89PNG")
