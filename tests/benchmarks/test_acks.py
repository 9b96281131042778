"""The acks benchmark: a server with a state beside one without, checked, its journal read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import acks
from benchmarks.acks import Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "states", tmp_path / "out.json"
    folder.mkdir()
    line = "--sizes 256B --workers 1 --codecs raw --acks durable --rounds 2 --seconds 0.001"
    acks.main([*line.split(), f"--folder={folder}", f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("256 B", "durable", "x none", "p99 µs", "journal B", "fdatasync", str(folder)):
        assert word in printed
    found = json.loads(file.read_text())
    assert found["disk"]["folder"] == str(folder)
    assert found["disk"]["file_system"] in printed
    assert found["disk"]["fdatasync_ms"].keys() == {"256", "4096"}
    (cell,) = found["cells"]
    none, durable = cell["contenders"]["none"], cell["contenders"]["durable"]
    for figures in (none, durable):
        assert figures["failed"] is None
        assert figures["mib_per_second"]["median"] > 0
    for one, other in zip(durable["rounds"], none["rounds"], strict=True):
        assert one["x_none"] == one["cycles_per_second"] / other["cycles_per_second"]
    assert "journal_bytes" not in none
    assert 1 <= durable["journal_rows"] <= 2, "one for a steady exchange; else a push, an update"
    assert 256 < durable["journal_bytes"] < 1024, "its gradient, and one row or two"
    assert [each.beside for each in acks.cells(found)] == ["", "no state", ""]
    assert list(folder.iterdir()) == [], "the states are removed"


def report(**changed: Any) -> dict[str, Any]:
    """Return a report of two levels, of which one has the changed figures."""

    def rounds(rate: float) -> dict[str, Any]:
        one = {"cycles_per_second": rate, "x_none": rate / 100, "x_applied": rate / 80}
        spreads = {key: dict.fromkeys(("median", "min", "max"), one[key]) for key in one}
        return {"failed": None, "rounds": [one], "p50_us": 1.0, "p99_us": 2.0, **spreads}

    contenders = {"none": rounds(100), "applied": rounds(80), "durable": rounds(50) | changed}
    cell = {"cell": "c", "size": 4096, "workers": 4, "codec": "raw", "contenders": contenders}
    options = {"acks": ["applied", "durable"], "codecs": ["raw"], "rounds": 1}
    return {"benchmark": "acks", "options": options, "cells": [cell]}


def test_the_figure_has_a_row_for_each_level() -> None:
    (panel,) = acks.figure(report()).panels
    assert list(panel.ticks) == ["applied", "durable"]
    (line,) = panel.lines
    assert [list(ys) for ys in line.ys] == [[0.8, 0.5]]


def test_a_level_that_failed_is_shown_without_figures() -> None:
    failed = {"failed": "its server ended", "rounds": []}
    result = report()
    result["cells"][0]["contenders"]["durable"] = failed
    assert acks.table(result).row_count == 3
    assert {each.where for each in acks.cells(result)} == {"c, none", "c, applied"}
    assert acks.figure(result).panels


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    lines = ("/dev/a / ext4 rw 0 0", "/dev/b /data xfs rw 0 0", "none /data/fast tmpfs rw 0 0")
    mounts.write_text("\n".join(lines))
    places = ("/home", "/data", "/database", "/data/x/y", "/data/fast/z")
    kinds = [acks.file_system(Path(place), mounts) for place in places]
    assert kinds == ["ext4", "xfs", "ext4", "xfs", "tmpfs"]
    assert acks.file_system(tmp_path, tmp_path / "nothing") == "unknown"


@each_row(
    ("wrong", "says"),
    [
        ({"acks": ("writen",)}, "no level of --acks is 'writen'; did you mean 'written'"),
        ({"codecs": ("int7",)}, "int7"),
        ({"workers": (0,)}, "positive"),
        ({"sizes": ()}, "are needed"),
        ({"folder": "/no/such/folder"}, "there is no such folder"),
        ({"rounds": 0}, "positive"),
    ],
)
def test_what_cannot_be_measured(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        acks.run(replace(Options(), **wrong))


def test_a_folder_without_a_state_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the --state of a server"):
        acks.journalled(tmp_path)
