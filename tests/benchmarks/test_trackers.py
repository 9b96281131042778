"""The trackers benchmark: every way to be watched, on real servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import trackers
from benchmarks.trackers import Options
from tests.rows import each_row

for _package in ("torch", "tensorboard", "opentelemetry.exporter.otlp.proto.http"):
    pytest.importorskip(_package)


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tiny = tmp_path / "out.json", ["--width", "8", "--blocks", "1", "--batch", "2"]
    short = ["--seconds", "0.05", "--rounds", "1", "--every", "0.02", "--warm", "0.01"]
    trackers.main([*tiny, *short, f"--json={file}"])
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [cell["cell"] for cell in found["cells"]] == list(trackers.WAYS)
    for cell in found["cells"]:
        assert cell["cell"] in printed
        assert cell["ms"]["median"] > 0
        assert len(cell["rounds"]) == 1
    assert found["cells"][0]["x_none"]["median"] == 1
    assert [cell.less for cell in trackers.cells(found)] == [True] * 4
    assert trackers.figure(found).panels[0].ticks == list(trackers.WAYS)
    assert "AIOPS_TRACE" not in os.environ


@each_row(
    "wrong",
    [
        {"width": 12},
        {"blocks": 0},
        {"batch": 0},
        {"rounds": 0},
        {"seconds": 0.0},
        {"every": 0.0},
        {"warm": 0.0},
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        trackers.run(Options(**wrong))
