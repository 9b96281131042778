"""The dashboard benchmark: exchanges at real servers, with and without a viewer of the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aiops.errors import UsageError
from benchmarks import dashboard
from benchmarks.dashboard import Options

pytest.importorskip("prometheus_client")


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "_SETTLE", 0.0)
    file = tmp_path / "out.json"
    line = "--workers 2 --tensors 4 --rounds 1 --seconds 0.05 --watch 0"
    dashboard.main([*line.split(), f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("without the page", "no viewer", "a viewer reads"):
        assert word in printed
    [cell] = json.loads(file.read_text())["cells"]
    assert set(cell["exchanges_per_second"]) == {"without", "unseen", "seen"}
    assert cell["whole_bytes"] > 500
    assert cell["browser"] is None
    assert dashboard.figure({"cells": [cell]}).panels
    script = {"median": 1.0, "p99": 2.0, "most": 3.0, "count": 9}
    seen = {"first_paint_ms": 90.0, "load_most_ms": 9.0, "script_ms": script, "over_a_frame": 0}
    assert dashboard.table({"cells": [{**cell, "browser": seen}]}).row_count == 7


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"seconds": 0.0}, {"watch": -1.0}])
def test_options_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="are positive"):
        dashboard.run(replace(Options(), **wrong))  # type: ignore[arg-type]
