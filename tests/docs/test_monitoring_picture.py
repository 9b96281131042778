"""The picture of docs/guide-monitoring.md is drawn from a recorded run, as the board draws one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aiops.lab import drawing
from docs._tools.metrics import recording
from docs._tools.metrics.picture import RecordedRun, figure

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "results" / "monitoring.json").read_text())
BOARD = json.loads((ROOT / "deploy" / "grafana" / "aiops.json").read_text())
PAGE = (ROOT / "docs" / "guide-monitoring.md").read_text(encoding="utf-8")


def test_its_panels_are_the_boards() -> None:
    titles = {panel["title"] for panel in BOARD["panels"]}
    drawn = [panel.title for panel in figure(RECORD).panels]
    assert len(drawn) == len(set(drawn)) == 6
    assert set(drawn) <= titles


def test_it_is_drawn_from_the_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    [made] = drawing.save(figure(RECORD), tmp_path / "run", (".png",))
    assert made.read_bytes().startswith(b"\x89PNG")
    assert "](monitoring.png)" in PAGE
    assert (ROOT / "docs" / "monitoring.png").read_bytes().startswith(b"\x89PNG")


def test_the_record_shows_what_the_page_says() -> None:
    run = RecordedRun(RECORD)
    ready = run.line("aiops_ready")
    assert (max(ready), ready[-1]) == (1, 0), "pushes are paused at the end"
    pushes = run.lines("aiops_worker_pushes_total")
    assert set(pushes) == {f"worker-{number}" for number in range(4)}
    last = [number for number, value in enumerate(pushes["worker-0"]) if not math.isnan(value)][-1]
    assert 0.5 < run.times[last] / run.times[-1] < 0.7, "the fastest leaves at 60 %"
    updates = run.line("aiops_updates_total")
    assert updates == sorted(updates)
    assert updates[-1] > 1000


def test_rates_and_quantiles() -> None:
    times = [0.0, 1.0, 2.0, 3.0]
    buckets = {"1.0": [0, 5, 10, 20], "2.0": [0, 10, 20, 40], "+Inf": [0, 10, 20, 40]}
    series = {f'h_bucket{{le="{bound}"}}': values for bound, values in buckets.items()}
    run = RecordedRun({"times": times, "series": {**series, "n": [0, 3, 6, 9]}})
    assert run.rate(run.line("n"))[1:] == [3.0, 3.0, 3.0]
    assert run.quantile("h", 0.5)[1:] == [1.0, 1.0, 1.0]
    assert run.quantile("h", 0.75)[1:] == [1.5, 1.5, 1.5]
    assert math.isnan(run.quantile("h", 0.5)[0])
    with pytest.raises(AssertionError, match="not in the record"):
        run.lines("m")


@pytest.mark.slow
def test_a_run_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    found = recording.record(seconds=5.0, interval=0.25)
    assert "takes no pushes" in capsys.readouterr().out
    run = RecordedRun(json.loads(json.dumps(found)))
    assert len(run.times) >= 4
    assert run.line("aiops_ready")[-1] == 0
    assert run.line("aiops_updates_total")[-1] > 0
    assert len(figure(found).panels) == 6
