"""The pipelining benchmark: requests under way at once, each answered and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.lab.processes import ProcessFailed
from benchmarks import pipelining
from benchmarks.peers.base import Job
from benchmarks.peers.lanes import SETTINGS, WAYS
from benchmarks.peers.team import Team
from benchmarks.pipelining import Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    line = "--size 256B --in-flight 1,3 --ways exchange --transports same-host --rounds 2"
    pipelining.main([*line.split(), "--seconds=0.001", f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("same-host", "exchange", "in flight", "x 1", "p99.9 µs"):
        assert word in printed
    found = json.loads(file.read_text())
    assert found["options"]["size"] == 256
    (cell,) = found["cells"]
    assert (cell["way"], cell["transport"]) == ("exchange", "same-host")
    assert list(cell["contenders"]) == ["1", "3"]
    alone, three = cell["contenders"].values()
    for figures in (alone, three):
        assert figures["failed"] is None
        assert figures["reads"] == "whole"
        assert len(figures["rounds"]) == 2
    assert alone["x_1"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    for one, other in zip(three["rounds"], alone["rounds"], strict=True):
        assert one["x_1"] == one["cycles_per_second"] / other["cycles_per_second"]
    assert [cell.beside for cell in pipelining.cells(found)] == ["", "1 in flight"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path not in (file, plot)] == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_request_is_made_and_checked(way: str) -> None:
    job = Job("benchmarks.peers.lanes", 64, 1, {**SETTINGS, "way": way, "lanes": 3})
    team = Team(job, 60.0, {}, name="three lanes")
    try:
        team.launch()
        team.connect()
        for cycles in (7, 2):
            (lap,) = team.run(cycles)
            assert len(lap.seconds) == cycles
            assert all(lap.seconds > 0)
            assert lap.start < lap.end
        if way != "fetch":
            team.total += 1
            with pytest.raises(ProcessFailed, match="three lanes's worker 0"):
                team.finish()
            team.total -= 1
        assert team.finish() == "whole"
    finally:
        team.kill()


@each_row(
    ("wrong", "says"),
    [
        ({"in_flight": (2, 4)}, "1 among them"),
        ({"in_flight": (1, 0)}, "positive"),
        ({"ways": ("pull",)}, "no request is called 'pull'"),
        ({"transports": ("udp",)}, "no transport is called 'udp'"),
        ({"rounds": 0}, "positive"),
    ],
)
def test_what_cannot_be_measured(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pipelining.run(Options(**wrong))


@each_row("line", ["--in-flight one", "--in-flight=", "--size 3", "--ways pull", "--seconds x"])
def test_a_wrong_command_line_exits_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        pipelining.main(line.split())
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "error:" in said
    assert "parse" not in said
