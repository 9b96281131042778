"""The snapshots benchmark: training beside snapshots, and restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.state.directory import PART
from benchmarks import snapshots
from benchmarks.snapshots import Options, Watch
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "states", tmp_path / "out.json"
    folder.mkdir()
    sizes = "--size 1MiB --rows 3000 --width 16 --model 4KiB"
    line = f"{sizes} --every 0.2 --seconds 0.6 --load 0.3 --rounds 1"
    snapshots.main([*line.split(), f"--folder={folder}", f"--json={file}"])
    printed = capsys.readouterr().out
    for word in (
        "beside a snapshot",
        "memory for snapshots",
        "to the first push",
        "with 4 KiB",
        "killed follower",
    ):
        assert word in printed
    found = json.loads(file.read_text())
    assert found["dense"]["snapshots"] > 0
    assert found["dense"]["capture_bytes"] == 4 << 20  # three arrays of state, and a version
    assert found["dense"]["state_bytes"] == 4 << 20
    assert found["table"]["snapshots"] > 0
    assert found["table"]["capture_bytes"] >= found["table"]["state_bytes"] == 3000 * 16 * 8
    (restart,) = found["restart"]["rounds"]
    assert 0 < restart["url"] < restart["push"]
    assert restart["version"] > 1
    (wait,) = found["follower"]["rounds"]
    assert min(wait, found["follower"]["usual"]) > 0
    assert len([*snapshots.cells(found)]) == 6
    assert snapshots.figure(found).panels
    assert list(folder.iterdir()) == [], "the states are removed"


def test_each_snapshot_is_noticed_once(tmp_path: Path) -> None:
    """Also one that is written between two looks."""
    (tmp_path / "snapshot-1").touch()
    watch, part = Watch(tmp_path, 1), tmp_path / f"snapshot-2{PART}"
    watch.look(1.0)
    part.touch()
    watch.look(2.0)
    watch.look(3.0)
    part.rename(tmp_path / "snapshot-2")
    watch.look(4.0)
    watch.look(5.0)
    (tmp_path / "snapshot-3").touch()
    (tmp_path / "snapshot-1").unlink()
    watch.look(6.0)
    watch.look(7.0)
    assert watch.spans == [(2.0, 4.0), (5.0, 6.0)]


def summed(**changed: Any) -> dict[str, Any]:
    """The figures of ten steps of a second, of which two take longer beside a snapshot."""
    watch = Watch(Path("x"), 1, most=150)
    watch.spans.append((4.5, 6.0))
    steps = [(float(n), n + 1.0) for n in range(4)] + [(4.0, 6.0), (6.0, 7.0)]
    state = {"capture_seconds": 0.25, "capture_bytes": 60, **changed}
    return snapshots.summary(replace(Options(), every=10.0), steps, watch, 100, state)


def test_a_step_that_overlaps_a_snapshot_is_beside_it() -> None:
    found = summed()
    assert found["steps_alone"] == 1.0
    assert found["steps_beside"] == 1 / 2.0
    assert found["beside"] == 0.5
    assert found["ratio"] == 1 - 1.0 / 10  # one of ten seconds is lost
    assert found["usual"] == pytest.approx(1 - 1.0 / 30)
    assert found["longest_beside"] == 2.0
    assert found["longest_alone"] == 1.0
    assert found["memory"] == 50


def test_a_snapshot_begins_with_its_capture() -> None:
    assert summed(capture_seconds=1.0)["steps_beside"] == 2 / 3.0


def test_without_a_snapshot_there_is_no_figure() -> None:
    steps, state = [(0.0, 1.0)], {"capture_seconds": 0.0}
    with pytest.raises(RuntimeError, match="there was no snapshot"):
        snapshots.summary(Options(), steps, Watch(Path("x"), 1), 0, state)


@each_row(
    ("wrong", "says"),
    [
        ({"rounds": 0}, "positive"),
        ({"seconds": 15.0}, "two of --every"),
        ({"folder": "/no/such/folder"}, "there is no such folder"),
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        snapshots.run(replace(Options(), **wrong))
