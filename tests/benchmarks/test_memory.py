"""The memory benchmark: what is counted, what the bound is, a tiny run of it."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from aiops import Client
from aiops.errors import UsageError
from aiops.model.shared_memory import Segment, attached
from benchmarks import footprint, memory
from benchmarks.footprint import Sample, Watch
from benchmarks.memory import Options
from benchmarks.sizes import GIB, MIB
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_own_memory_is_counted_when_it_is_touched():
    before = footprint.held(os.getpid())
    pages = mmap.mmap(-1, 32 * MIB)
    reserved = footprint.held(os.getpid())
    np.frombuffer(pages, np.uint8)[:] = 1
    after = footprint.held(os.getpid())
    assert reserved.own - before.own < 8 * MIB
    assert 24 * MIB < after.own - before.own < 40 * MIB
    assert after.segments == before.segments


def test_a_segment_counts_once_and_in_full():
    before = footprint.held(os.getpid())
    segment = Segment(16 * MIB)
    segment.data[:] = 1
    again = attached(os.dup(segment.fd), 16 * MIB, private=False)
    assert again.sum() == 16 * MIB
    after = footprint.held(os.getpid())
    assert after.segments - before.segments == 16 * MIB
    assert after.total == after.own + after.segments


def test_nobody_is_watched_who_is_not_there():
    with Watch([os.getpid()], "aiops://127.0.0.1:1", 0.01, timeout=0.01) as watch:
        pass
    assert watch.samples == []


def test_a_server_is_asked_now_and_then_only(monkeypatch):
    calls = []

    class Told(Client):
        def stats(self, *args, **options):
            calls.append(1)
            return super().stats(*args, **options)

    found, turns, enough = footprint.held(os.getpid()), itertools.count(), threading.Event()

    def held(*_pids):
        if next(turns) == 12:
            enough.set()
        return found

    monkeypatch.setattr(footprint, "held", held)
    monkeypatch.setattr("aiops.Client", Told)
    with ServerThread() as server, Watch([os.getpid()], server.url, 0.001, asked=5) as watch:
        assert enough.wait(PATIENCE), "twelve samples"
    assert len(calls) == 1 + (len(watch.samples) - 1) // 5
    assert {sample.alive for sample in watch.samples} == {0}


def test_the_bound_and_the_drift():
    options = Options(size=100, workers=6, policy="fasgd")
    held = [1000, 1000, 900, 1200, 1100, 1400, 1500, 1500]
    samples = [Sample(float(n), total - 300, 300, 2 + (n == 3), 1) for n, total in enumerate(held)]
    found = memory._figures(options, 50, samples)
    assert (found["state_bytes"], found["buffer_bytes"]) == (300, 400)
    assert (found["versions_alive"], found["versions_spare"]) == (3, 1)
    assert found["bound_bytes"] == 50 + 100 + 3 * 100 + 300 + 400
    assert found["peak_of_bound"] == 1500 / found["bound_bytes"]
    assert found["drift"] == 0.5
    assert len(found["samples"]) == len(held)


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "out.json", tmp_path / "out.svg"
    line = "--size 64KiB --workers 1 --seconds 0.05 --interval 0.01 --transports views,shards"
    memory.main([*line.split(), f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("64 KiB of parameters", "peak / bound", "drift", "views", "shards"):
        assert word in printed
    found = json.loads(file.read_text())
    views, shards = found["cells"]
    for cell in found["cells"]:
        assert cell["failed"] is None
        assert cell["cycles"] > 0
        assert cell["peak_of_bound"] > 0
        totals = [sample["own"] + sample["segments"] for sample in cell["samples"]]
        assert max(totals) == cell["peak_bytes"] > 64 << 10
    assert all(not sample["segments"] for sample in shards["samples"])
    assert all(sample["segments"] for sample in views["samples"])
    assert shards["program_bytes"] > 1.2 * views["program_bytes"], "two processes are counted"
    assert [cell.beside for cell in memory.cells(found)] == ["bound", "bound"]
    assert "<svg" in plot.read_text()


@each_row(
    ("wrong", "says"),
    [
        ({"workers": 0}, "positive"),
        ({"transports": ("udp",)}, "no transport is called 'udp'"),
        ({"policy": "fasdg"}, "did you mean 'fasgd'"),
        ({"policy": "average"}, "average cannot be measured here"),
        ({"policy": "easgd"}, "workers train by themselves"),
        ({"policy": "hardsync"}, "wait for each other"),
        ({"size": GIB * GIB}, "choose a smaller --size"),
    ],
)
def test_what_cannot_be_measured(wrong, says):
    with pytest.raises(UsageError, match=says):
        memory.run(Options(**wrong))


def test_a_wrong_command_line_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        memory.main(["--size", "3"])
    assert caught.value.code == 2
    assert "multiple of 4 bytes" in capsys.readouterr().err
