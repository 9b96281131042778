"""``aiops experiment`` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiops.cli.main import main
from aiops.lab.experiments.catalog import EXPERIMENTS
from tests.peers import eventually
from tests.zygote import ForkedPopen

FEW = ["softsync-staleness", "--iterations", "50", "--seeds", "1", "--jobs", "2"]


def aiops(
    *arguments: str, capsys: pytest.CaptureFixture[str], command: str = "experiment"
) -> tuple[int, str, str]:
    """Run the command line here; return its status and what it has said."""
    before, path = sys.argv, list(sys.path)
    sys.argv = ["aiops", command, *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv, sys.path[:] = before, path
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _err = aiops("list", capsys=capsys)
    assert status == 0
    for experiment in EXPERIMENTS.values():
        assert experiment.name in out
    status, out, _err = aiops("list", "--json", capsys=capsys)
    assert [row["name"] for row in json.loads(out)] == list(EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["bfasgd-cion"], "no experiment is called 'bfasgd-cion'; did you mean 'bfasgd-coin'"),
        (["b-staleness", "--seeds", "0"], "--seeds must be 1 to 1,000, not 0"),
        (["b-staleness", "--jobs", "-1"], "--jobs must be 0 or more, not -1"),
        (["b-staleness", "--with", "order=random"], "b-staleness has no knob 'order'"),
        (["fasgd-staleness", "--with", "initial=hee"], "initial cannot be 'hee'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    arguments: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = aiops("run", *arguments, capsys=capsys)
    assert (status, out) == (64, "")
    assert why in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_experiments_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text('{"experiment": "b-staleness", "format": 1}')
    status, _out, err = aiops("run", *FEW, "--out", str(tmp_path), capsys=capsys)
    assert status == 64
    assert "holds the results of b-staleness, not of softsync-staleness" in err
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.json"]


@pytest.mark.slow
def test_a_run_and_its_rerun(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    status, said, _err = aiops("run", *FEW, "--out", out, capsys=capsys)
    assert status == 0
    assert "1-softsync" in said
    assert EXPERIMENTS[FEW[0]].claim in said
    assert "agree: " in said
    files = {path.name for path in Path(out).iterdir()}
    assert files == {
        *("curves.csv", "summary.json", "figure.png", "figure.svg"),
        *("experiment.json", "runs", "runs.jsonl.gz"),
    }
    summary = (Path(out) / "summary.json").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in Path(out, "runs").iterdir()}
    assert len(times) == 12
    status, said, _err = aiops("run", *FEW, "--out", out, "--json", capsys=capsys)
    assert status == 0
    assert json.loads(said) == json.loads(summary)
    assert {path: path.stat().st_mtime_ns for path in Path(out, "runs").iterdir()} == times
    assert (Path(out) / "summary.json").read_bytes() == summary
    archive, elsewhere = str(Path(out, "runs.jsonl.gz")), str(tmp_path / "elsewhere")
    status, said, err = aiops(
        "run", *FEW, "--out", elsewhere, "--from", archive, "--json", capsys=capsys
    )
    assert json.loads(said) == json.loads(summary)
    assert "--from has 12 of the 12 runs that are wanted so far\n" in err
    others = (*FEW, "--iterations", "7", "--out", str(tmp_path / "others"))
    _status, _said, err = aiops("run", *others, "--from", archive, "--estimate", capsys=capsys)
    assert "--from has 0 of the 12 runs that are wanted so far: its runs are of another" in err
    one = next(iter(times))
    one.write_text(json.dumps({**json.loads(one.read_text()), "versions": {"numpy": "1.0"}}))
    _status, _said, err = aiops("run", *FEW, "--out", out, "--estimate", capsys=capsys)
    assert "kept runs made with numpy 1.0, not " in err
    assert "runs, about" not in err
    _status, _said, err = aiops("run", *FEW, "--out", out, "--estimate", "--rerun", capsys=capsys)
    assert "kept runs" not in err
    assert "1 runs, about " in err


@pytest.mark.slow
def test_an_estimate_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, said, err = aiops("run", *FEW, "--estimate", "--out", str(out), capsys=capsys)
    assert (status, said) == (0, "")
    assert "12 runs, about " in err
    assert list((out / "runs").iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "aiops", "experiment", "run", FEW[0], "--jobs", "1"]
    many = [*command, "--seeds", "100", "--iterations", "20", "--out", str(out)]
    with ForkedPopen(many, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        try:
            eventually(lambda: [*out.glob("runs/*.json")] or running.poll(), "a run is finished")
            os.kill(running.pid, signal.SIGINT)
            said, _nothing = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 130
    assert b"runs are missing: the same command goes on" in said
    assert not (out / "figure.png").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["complete"]
    assert 1 <= len(summary["runs"]) == len(list(out.glob("runs/*.json"))) < 1200
