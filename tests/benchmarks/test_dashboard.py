"""The dashboard benchmark: exchanges at real servers, with and without a viewer of the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aiops.errors import UsageError
from benchmarks import dashboard, page_viewers
from benchmarks.dashboard import Options
from tests.rows import each_row

pytest.importorskip("prometheus_client")


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_viewers, "SETTLE", 0.0)
    file = tmp_path / "out.json"
    line = "--workers 2 --tensors 4 --rounds 1 --seconds 0.05 --watch 0"
    dashboard.main([*line.split(), f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("without the page", "no viewer", "a viewer reads"):
        assert word in printed
    [cell] = json.loads(file.read_text())["cells"]
    ways = {"without", "again", "unseen", "seen"}
    for key in ("exchanges_per_second", "processor_us", "idle_percent"):
        assert set(cell[key]) == ways
    assert set(cell["more_percent"]) == ways - {"without"}
    assert all(each["median"] > 0 for each in cell["processor_us"].values())
    assert cell["whole_bytes"] > 500
    assert cell["browser"] is None
    assert dashboard.figure({"cells": [cell]}).panels
    script = {"median": 1.0, "p99": 2.0, "most": 3.0, "count": 9}
    seen = {"first_paint_ms": 90.0, "load_most_ms": 9.0, "script_ms": script, "over_a_frame": 0}
    assert dashboard.table({"cells": [{**cell, "browser": seen}]}).row_count == 9


def test_figures_are_beside_those_of_the_same_round() -> None:
    """The machine is twice as slow in the second round, and busy with something else."""
    costs = {"without": 10.0, "again": 10.0, "unseen": 10.1, "seen": 10.2}
    laps = {
        way: [dashboard._Lap(1e3 * slow, cost * slow * 1e-6) for slow in (1.0, 2.0, 1.0)]
        for way, cost in costs.items()
    }
    found = dashboard._compared(laps)
    for way, more in {"again": 0.0, "unseen": 1.0, "seen": 2.0}.items():
        for key in ("median", "min", "max", "low", "high"):
            assert found["more_percent"][way][key] == pytest.approx(more)
    assert found["viewer_percent"]["median"] == pytest.approx(100 * (10.2 / 10.1 - 1))
    assert found["processor_us"]["seen"]["median"] == pytest.approx(10.2)


def test_what_the_page_takes_of_an_idle_server_is_beside_one_at_the_same_time() -> None:
    slow = [(3.0, 3.1, 4.0), (6.0, 6.1, 7.0)]  # the machine, in the second round
    found = dashboard._compared_idle({"unseen": slow, "seen": [(3.0, 3.1, 5.0), (6.0, 6.1, 8.0)]})
    assert found["idle_more_percent"]["unseen"]["max"] == pytest.approx(1.0)
    assert found["idle_more_percent"]["seen"]["min"] == pytest.approx(2.0)
    assert found["idle_percent"]["again"]["median"] == pytest.approx(4.6)


def test_the_processor_time_is_that_of_the_other_process() -> None:
    """It is counted from its start on, and only while it runs."""
    text = "print(flush=True); input(); sum(range(3_000_000)); print(flush=True); input()"
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = dashboard._used(process.pid)
        sum(range(3_000_000))  # what this process does is not counted
        own = dashboard._used(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = dashboard._used(process.pid)
        process.stdin.write(b"\n")
    assert 0 < before <= own < after
    assert own - before < (after - own) / 2


@each_row("wrong", [{"workers": 0}, {"seconds": 0.0}, {"watch": -1.0}])
def test_options_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="are positive"):
        dashboard.run(replace(Options(), **wrong))  # type: ignore[arg-type]
