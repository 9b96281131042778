"""``aiops simulate``: one command, one JSON object."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from aiops.cli import main
from aiops.serving.safetensors_io import read_model
from aiops.sim.turns.dispatcher import Dispatcher
from aiops.sim.turns.run import Run, simulate
from tests.sim.turns.cases import TASK, simulation

SMALL = "--dataset digits --hidden 8 --clients 4 --iterations 60 --samples 2 --kernels numpy"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``aiops simulate`` with the small task; return its status and what it said."""

    def run(arguments: str = "", *more: str) -> tuple[int, str, str]:
        words = ["aiops", "simulate", *SMALL.split(), *arguments.split(), *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main.main()
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


class TestCheckpoint:
    def test_goes_on_where_it_was(self, command: Any, tmp_path: Path) -> None:
        path = str(tmp_path / "run.ckpt")
        status, out, _err = command("--json --seed 3 --iterations 25 --checkpoint", path)
        assert status == 0
        assert json.loads(out)["iterations"] == 25
        status, out, _err = command("--json --checkpoint", path, "--resume", path)
        report = json.loads(out)
        assert report["iterations"] == 60, "it is on the command line"
        assert report["simulation"]["seed"] == 3, "it is not, and so as it was"
        assert report["digest"] == simulate(simulation(seed=3), TASK).digest

    def test_another_simulation_s(self, command: Any, tmp_path: Path) -> None:
        path = str(tmp_path / "run.ckpt")
        assert command("--checkpoint", path)[0] == 0
        before = (tmp_path / "run.ckpt").read_bytes()
        status, out, err = command("--seed 4 --resume", path)
        assert (status, out) == (64, "")
        assert "is of another simulation: its seed is 0, not 4" in err
        status, out, err = command("--seed 4 --checkpoint", path)
        assert (status, out) == (64, "")
        assert "is there already, and nothing is overwritten" in err
        assert (tmp_path / "run.ckpt").read_bytes() == before

    def test_nowhere_to_write_it(self, command: Any, tmp_path: Path) -> None:
        _status, _out, err = command("--checkpoint", str(tmp_path / "none" / "run.ckpt"))
        assert "there is no folder" in err
        _status, _out, err = command("--resume", str(tmp_path / "none.ckpt"))
        assert "cannot read the checkpoint" in err

    def test_ctrl_c_keeps_what_there_is(
        self, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, turn = signal.getsignal(signal.SIGINT), Dispatcher.turn

        def interrupted(dispatcher: Dispatcher) -> int:
            if dispatcher.iteration == 10:
                signal.raise_signal(signal.SIGINT)
            return turn(dispatcher)

        monkeypatch.setattr(Dispatcher, "turn", interrupted)
        path = tmp_path / "run.ckpt"
        status, out, _err = command("--json --checkpoint", str(path))
        assert status == 130
        report = json.loads(out.splitlines()[-1])
        assert (report["complete"], report["iterations"]) == (False, 11), "not within a turn"
        assert signal.getsignal(signal.SIGINT) is before
        monkeypatch.undo()
        with Run.load(path, TASK) as run:
            assert run.outcome().digest == report["digest"]
            assert run.execute().digest == simulate(simulation(), TASK).digest

    def test_a_record_that_ends_keeps_what_there_is(self, command: Any, tmp_path: Path) -> None:
        (tmp_path / "turns.txt").write_text("0 1 2 3 " * 5)
        flags = "--json --jobs 1 --selection", f"recorded:{tmp_path / 'turns.txt'}", "--checkpoint"
        status, out, err = command(*flags, str(tmp_path / "run.ckpt"))
        assert (status, out) == (64, "")
        assert "turns.txt ends after 20 turns" in err
        with Run.load(tmp_path / "run.ckpt", TASK) as run:
            assert run.iteration == 20

    def test_a_second_ctrl_c_ends_it_at_once(
        self, command: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(dispatcher: Dispatcher) -> int:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it went on")

        monkeypatch.setattr(Dispatcher, "turn", interrupted)
        status, out, _err = command("--json")
        assert (status, out) == (130, "")

    def test_a_rule_that_remembers_is_refused_before_the_first_turn(
        self, command: Any, tmp_path: Path
    ) -> None:
        rule = "--selection", "softmax:change=tests.sim.turns.cases:counting"
        status, out, err = command(*rule, "--checkpoint", str(tmp_path / "run.ckpt"))
        assert (status, out) == (64, "")
        assert "cannot keep what its change of a priority remembers" in err
        assert not list(tmp_path.iterdir())
        assert command(*rule)[0] == 0


class TestTurns:
    @pytest.mark.parametrize("policy", ["fasgd", "ssp"])  # which passes over who waits
    def test_what_was_recorded_is_repeated(self, command: Any, tmp_path: Path, policy: str) -> None:
        path = tmp_path / "turns.txt"
        flags = f"--json --policy {policy}"
        kept = "--record-turns", str(path), "--checkpoint", str(tmp_path / "run.ckpt")
        _status, out, _err = command(flags, *kept)
        again = command(f"{flags} --jobs 2 --selection", f"recorded:{path}")
        assert digest(again[1]) == digest(out)
        assert digest(command(f"{flags} --selection round-robin")[1]) != digest(out)

    def test_a_run_that_goes_on_has_no_beginning(self, command: Any, tmp_path: Path) -> None:
        status, _out, err = command("--record-turns x --resume", str(tmp_path / "run.ckpt"))
        assert (status, err.count("\n")) == (64, 1)
        assert "--record-turns needs a run's beginning" in err

    def test_there_must_be_a_folder(self, command: Any, tmp_path: Path) -> None:
        _status, _out, err = command("--record-turns", str(tmp_path / "none" / "turns.txt"))
        assert "there is no folder" in err


def digest(out: str) -> str:
    """Return the digest in a report."""
    found: str = json.loads(out.splitlines()[-1])["digest"]
    return found


def test_what_the_server_warns_of_is_on_standard_error(command: Any) -> None:
    status, out, err = command("--json --set eps=0.9")
    assert status == 0
    assert "warning: at version 0: v̄ is 1, within 10 % of its floor" in err
    [text] = json.loads(out.splitlines()[-1])["warnings"]
    assert f"warning: {text}" in err


def test_one_that_diverges_says_what_it_came_to(command: Any, tmp_path: Path) -> None:
    flags = "--json --policy asgd --lr 1e30 --save", str(tmp_path / "model.safetensors")
    status, out, err = command(*flags)
    assert status == 64
    assert "training diverged in iteration" in err
    report = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert report["iterations"] < 60
    assert not report["complete"]
    assert "every value must be finite" in report["diverged"]
    assert (tmp_path / "model.safetensors").exists()


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
    assert status == (73 if "--save" in arguments else 64)
    assert out == ""
    assert err.startswith("aiops: ")
    assert text in err
    assert err.count("\n") == 1
