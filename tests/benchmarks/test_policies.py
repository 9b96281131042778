"""The policies benchmark: every policy that a worker can drive alone takes every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.errors import UsageError
from aiops.lab.processes import ProcessFailed
from aiops.serving.config import Config
from benchmarks import policies
from benchmarks.peers import policy
from benchmarks.peers.base import Job
from benchmarks.peers.team import Team
from benchmarks.policies import Options
from tests.rows import each_row


def test_every_policy_is_measured_or_left_out_with_a_reason():
    assert set(BUILT_IN) <= {*policy.policies(), *policy.LEFT_OUT}
    assert not set(policy.policies()) & set(policy.LEFT_OUT)
    assert policy.policies()[0] == "asgd"


@each_row("name", policy.policies())
def test_its_settings_are_some_that_it_has(name):
    settings = Config(set=list(policy.EVERY_STEP.get(name, ()))).settings()
    find(name).make(settings).check(workers=1)


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    line = "--sizes 256B --policies easgd,fasgd --same-host --rounds 2 --seconds 0.001"
    policies.main([*line.split(), f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("256 B", "easgd", "p=1", "x asgd", "in shared memory"):
        assert word in printed
    found = json.loads(file.read_text())
    (cell,) = found["cells"]
    assert list(cell["contenders"]) == ["asgd", "easgd", "fasgd"]
    assert found["settings"]["easgd"] == ["p=1"]
    first = cell["contenders"]["asgd"]
    for figures in cell["contenders"].values():
        assert figures["failed"] is None
        for one, other in zip(figures["rounds"], first["rounds"], strict=True):
            assert one["x_asgd"] == one["cycles_per_second"] / other["cycles_per_second"]
    assert [cell.beside for cell in policies.cells(found)] == ["", "asgd", "asgd"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_policy_that_does_not_step_every_time_is_found_out():
    """Downpour with its defaults pushes in every fifth step."""
    name = "benchmarks.peers.policy"
    team = Team(Job(name, 64, 1, {**policy.SETTINGS, "policy": "downpour"}), 60.0, {})
    other = Team(Job("tests.benchmarks.lazy", 64, 1, team.job.settings), 60.0, {}, "downpour")
    try:
        for one in (team, other):
            one.launch()
        for one in (team, other):
            one.connect()
            one.run(3)
        assert team.finish() == "whole"
        with pytest.raises(ProcessFailed, match="downpour's"):
            other.finish()
    finally:
        for one in (team, other):
            one.kill()


@each_row(
    ("wrong", "says"),
    [
        ({"policies": ("asdg",)}, "did you mean 'asgd'"),
        ({"policies": ("average",)}, "average cannot be measured here"),
        ({"rounds": 0}, "positive"),
    ],
)
def test_what_cannot_be_measured(wrong, says):
    with pytest.raises(UsageError, match=says):
        policies.run(Options(**wrong))


def test_a_wrong_command_line_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        policies.main(["--sizes", "3"])
    assert caught.value.code == 2
    assert "multiple of 4 bytes" in capsys.readouterr().err
