"""``aiops simulate``: one command, one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from aiops import cli
from aiops.files import read_model
from aiops.sim.simulation import simulate
from tests.sim.cases import TASK, simulation

SMALL = "--dataset digits --hidden 8 --clients 4 --iterations 60 --samples 2 --kernels numpy"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``aiops simulate`` with the small task; return its status and what it said."""

    def run(arguments: str = "", *more: str) -> tuple[int, str, str]:
        words = ["aiops", "simulate", *SMALL.split(), *arguments.split(), *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int | None)
        return ended.value.code or 0, said.out, said.err

    return run


def test_json_is_the_last_line(command: Any) -> None:
    status, out, _err = command("--json --jobs 2 --seed 7 --lr 0.01 --set gamma=0.9")
    assert status == 0
    report = json.loads(out.splitlines()[-1])
    same = simulation(seed=7, lr=0.01, set=("gamma=0.9",))
    assert report["digest"] == simulate(same, TASK).digest
    for key in ("validation_error", "validation_cost", "iterations_per_second"):
        assert report[key] > 0
    assert (report["pushes"], report["fetches"], report["iterations"]) == (60, 64, 60)
    assert report["bytes"] > 60 * 2 * 600 * 4
    assert report["complete"] is True


def test_table(command: Any) -> None:
    status, out, _err = command("--gate bfasgd:c_fetch=0.1 --push-codec int8 --fetch-codec int8")
    assert status == 0
    for text in ("fasgd, 4 clients, batches of 8, seed 0", "60 in", "error", "digest"):
        assert text in out


def test_saves_the_model(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    status, out, _err = command("--json --save", str(path))
    assert status == 0
    model = read_model(path)
    assert set(model) == set(TASK.model.shapes)
    report = json.loads(out)
    cost, error = TASK.validate(model)
    assert (cost, error) == (report["validation_cost"], report["validation_error"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--clients 0", "clients must be 1 or more, not 0"),
        ("--policy softsync --set n=9", "n = 9 groups cannot be made of 4 workers"),
        ("--batch-size 99999", "mini-batches of 99999: the data has 1198 examples"),
        ("--dataset mnits", "mnits"),
        ("--iterations -1", "iterations must be 1 or more"),
        ("--jobs -1", "--jobs must be 0 or more, not -1"),
        ("--fetch-lag -1", "fetch"),
        ("--selection softmax:add=inf", "write key=number"),
        ("--set lr", "write key=value"),
        ("--kernels cuda", "kernels"),
        ("--save pyproject.toml/model.safetensors", "cannot write the model to pyproject.toml"),
    ],
)
def test_bad_input_is_one_sentence(command: Any, arguments: str, text: str) -> None:
    status, out, err = command(arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("aiops: ")
    assert text in err
    assert err.count("\n") == 1
