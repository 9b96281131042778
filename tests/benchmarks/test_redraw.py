"""Figures of reports: every committed one can be drawn, and what cannot is a sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.lab.figures import Figure
from benchmarks import compare, redraw
from tests.rows import each_row

RESULTS = Path(__file__).parents[2] / "docs" / "results"
REPORTS = sorted(
    path for path in RESULTS.glob("*.json") if "benchmark" in json.loads(path.read_text())
)
DRAWN_APART = {"algorithms"}  # they have several figures of their own


def test_there_are_reports() -> None:
    assert len(REPORTS) > 10


@each_row("file", REPORTS, ids=lambda path: path.stem)
def test_every_committed_report_has_a_figure_with_something_in_every_panel(file: Path) -> None:
    result = compare.read(file)
    module = compare.benchmark(result, file)
    if result["benchmark"] in DRAWN_APART:
        assert callable(module.draw)
        return
    figure = module.figure(result)
    assert isinstance(figure, Figure)
    assert figure.panels
    assert 1 <= figure.columns <= 4
    for panel in figure.panels:
        assert panel.xlabel
        values = [value for line in panel.lines for ys in line.ys for value in ys]
        assert any(math.isfinite(value) for value in values), panel.title
        assert panel.ylabel or all(line.kind == "rows" for line in panel.lines)


def test_every_committed_report_is_drawn_where_it_is_shown() -> None:
    page = (RESULTS / "README.md").read_text()
    for file in REPORTS:
        if file.stem not in DRAWN_APART and not file.stem.endswith("-tuning"):
            assert file.with_suffix(".png").exists(), file
            assert f"]({file.stem}.png)" in page, file


@pytest.mark.slow
def test_it_is_drawn_beside_the_report_or_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "mine.json"
    report.write_bytes((RESULTS / "cluster.json").read_bytes())
    redraw.main([str(report)])
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "folder"
    folder.mkdir()
    redraw.main([str(report), "--out", str(folder), "--svg"])
    assert "<svg" in (folder / "mine.svg").read_text()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(tmp_path / "mine.png"), str(folder / "mine.svg")]


def test_what_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "half.json"
    file.write_text(json.dumps({"benchmark": "cluster", "machine": {}, "options": {}}))
    with pytest.raises(UsageError, match="not a whole report of cluster"):
        redraw.draw(file)
    with pytest.raises(SystemExit) as caught:
        redraw.main([str(tmp_path / "nothing.json")])
    assert caught.value.code == 2
    assert "cannot be read" in capsys.readouterr().err
