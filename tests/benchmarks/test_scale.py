"""The scale benchmark: several numbers of workers and shards, all checked, all processes ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.net.process_tree import session
from benchmarks import report, scale
from benchmarks.scale import Options
from tests.benchmarks.test_exchange import ended
from tests.peers import eventually
from tests.rows import each_row

TINY = "--sizes 256B --workers 1,2 --shards 1,2 --shard-workers 1 --peers raw --rounds 2 --seconds"


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    scale.main([*TINY.split(), "0.001", f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("256 B, by workers", "256 B, by shards", "p99 / p50", "p99 within 3 times"):
        assert word in printed
    found = json.loads(file.read_text())
    by_workers, by_shards = found["cells"]
    assert (by_workers["by"], by_workers["beside"]) == ("workers", 1)
    for cell in (by_workers, by_shards):
        assert list(cell["contenders"]) == ["1", "2"]
        for figures in cell["contenders"].values():
            assert figures["failed"] is None
            assert figures["reads"] == "whole"
            assert figures["x_1"]["median"] > 0
            assert figures["tail"]["min"] >= 1
    assert by_workers["peers"] == {}
    assert by_shards["peers"]["raw"]["failed"] is None
    assert by_shards["peers"]["raw"]["cycles_per_second"]["median"] > 0
    level = scale.figure(found).panels[-1].lines[-1]
    assert level.label == "raw, one server"
    assert list(level.x) == [0, 1]
    assert all(ys[0] == ys[1] > 0 for ys in level.ys)
    found_cells = [(cell.what, cell.beside) for cell in scale.cells(found)]
    assert found_cells[:4] == [
        ("cycles/s", ""),
        ("p99", "p50"),
        ("cycles/s", "1 workers"),
        ("p99", "p50"),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def contender(rate: float, tail: float) -> dict[str, object]:
    ratio = {name: report.spread([value]) for name, value in (("x_4", rate), ("tail", tail))}
    return {"failed": None, "cycles_per_second": report.spread([rate]), **ratio}


def test_the_goals_are_told():
    cell = {"by": "workers", "beside": 4, "size": 4096, "cell": "4 KiB, by workers"}
    crowds = {"4": contender(1.0, 2.0), "64": contender(0.95, 3.5)}
    said = list(scale.notes({"cells": [{**cell, "contenders": crowds}]}))
    assert said == [
        "64 workers beside 4: 0.95 at 4 KiB (asked: 0.9)",
        "p99 within 3 times the median in 1 of 2 cells, at most 3.5 times",
    ]


@pytest.mark.slow
def test_an_interrupt_ends_it_and_leaves_no_process():
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale", *TINY.split(), "600", "--workers", "none"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert running.stderr is not None
    try:
        assert "measuring" in running.stderr.readline()
        eventually(lambda: len(processes(running.pid)) > 5, "both servers and workers run")
        started = processes(running.pid)
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(60) == 130
    finally:
        running.kill()
        running.wait()
        running.stderr.close()
    assert said == "interrupted; all processes are ended\n"
    eventually(lambda: all(map(ended, started)), "they are gone")


def processes(pid: int) -> list[int]:
    """All that descend from a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(stat.parent.name)
            found += {child, *session(child), *processes(child)}
    return found


@each_row(
    ("wrong", "says"),
    [
        ({"workers": (0,)}, "positive"),
        ({"shards": (0,)}, "positive"),
        ({"shard_workers": 0}, "positive"),
        ({"sizes": (8,)}, "at least one float32 for every shard"),
        ({"seconds": 0}, "positive"),
        ({"peers": ("rai",)}, "unknown peer 'rai'; did you mean 'ray'"),
    ],
)
def test_what_cannot_be_measured(wrong, says):
    with pytest.raises(UsageError, match=says):
        scale.run(Options(**wrong))


@each_row("line", ["--workers one", "--sizes 3", "--shards 1,none"])
def test_a_wrong_command_line_exits_with_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        scale.main(line.split())
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
