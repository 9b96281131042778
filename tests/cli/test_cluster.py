"""``aiops cluster``: what it prints, that it is the same twice, and what it refuses."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from aiops.cli import main
from aiops.cli.cluster import cluster
from aiops.errors import AiopsError
from aiops.lab.workloads import PerceptronWorkload
from tests.rows import each_row

app = typer.Typer()
app.command()(cluster)

SMALL = ("--workers", "3", "--gradients", "12", "--hidden", "4", "--latency", "0.01")


def report(*flags: str) -> dict[str, Any]:
    """Run it, and return its JSON."""
    result = CliRunner().invoke(app, [*SMALL, *flags, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_answers_how_long_how_idle_and_how_stale() -> None:
    found = report("--compute", "0.1")
    assert found["gradients"] == found["version"] == 12
    # Each of 4 mini-batches is computed, and its exchange there and back takes 20 ms.
    assert found["seconds"] == pytest.approx(4 * 0.12)
    assert found["idle"] == pytest.approx(0.02 / 0.12)
    # In the first round the others' updates come between, then always one of each of them.
    assert found["mean_staleness"] == pytest.approx((0 + 1 + 9 * 2 + 2) / 12)
    assert [worker["steps"] for worker in found["workers"]] == [4, 4, 4]
    assert found["samples"][-1]["accuracy"] > 0
    assert report("--compute", "0.1")["digest"] == found["digest"]
    assert report("--compute", "0.1", "--seed", "1")["digest"] != found["digest"]


def test_links_stragglers_and_days_take_longer() -> None:
    plain = report()["seconds"]
    assert report("--server-link", "1Mbit/s")["seconds"] > plain
    assert report("--slow", "0:5")["seconds"] > plain
    assert report("--diurnal", "1:3")["seconds"] > plain
    assert report("--apply", "0.05")["seconds"] > plain
    assert report("--policy", "hardsync", "--silence", "0.1:1:5")["seconds"] > 5


def test_workers_come_and_go() -> None:
    found = report("--gradients", "30", "--kill", "0.15:0", "--join", "0.2:2", "--cut", "0.3:1")
    steps = [worker["steps"] for worker in found["workers"]]
    assert len(steps) == 5
    assert steps[0] < min(steps[1:3])


def test_a_model_of_a_size_learns_nothing() -> None:
    found = report("--model", "40KiB", "--policy", "asgd", "--seconds", "0.5")
    assert found["samples"] == []
    assert found["seconds"] <= 0.5 + 0.2


def test_a_person_is_shown_a_table() -> None:
    result = CliRunner().invoke(app, [*SMALL], catch_exceptions=False)
    assert all(word in result.stdout for word in ("(virtual)", "speed-up", "idle", "staleness"))


def test_seconds_alone_are_an_end() -> None:
    found = report("--model", "4KiB", "--gradients", "1000000", "--seconds", "2")
    assert found["complete"] is True
    assert found["seconds"] == pytest.approx(2)


def test_ctrl_c_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before, train = signal.getsignal(signal.SIGINT), PerceptronWorkload.gradient
    asked = []

    def interrupted(workload: PerceptronWorkload, worker: int, seed: int) -> Any:
        gradient = train(workload, worker, seed)

        def computed(params: Any) -> Any:
            asked.append(worker)
            if len(asked) == 7:
                signal.raise_signal(signal.SIGINT)
            return gradient(params)

        return computed

    monkeypatch.setattr(PerceptronWorkload, "gradient", interrupted)
    result = CliRunner().invoke(app, [*SMALL, "--json"])
    assert result.exit_code == 130
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["complete"] is False
    assert 0 < found["gradients"] < 12
    assert found["samples"][-1]["accuracy"] > 0
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_refused_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = "--workers 3 --policy softsync --set n=9"
    monkeypatch.setattr(sys, "argv", ["aiops", "cluster", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 64
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("aiops: softsync: n = 9 groups")


@each_row(
    ("flags", "says"),
    [
        (("--slow", "x"), "--slow 'x': write WORKER:TIMES"),
        (("--slow", "3:3"), "--slow 3:3: there are workers 0 to 2"),
        (("--join", "1:2", "--slow", "5:3"), "--slow 5:3: there are workers 0 to 4"),
        (("--lr", "0.1", "--set", "lr=1"), "the learning rate is both 0.1"),
        (("--cut", "1"), "--cut '1': write SECONDS:WORKER"),
        (("--silence", "1:2"), "--silence '1:2': write SECONDS:WORKER:DURATION"),
        (("--kill", "2:9"), "--kill 2:9 is of worker 9, and there are workers 0 to 2 by then"),
        (("--join", "3:0"), "--join 3:0 has 0 workers join: give 1 or more"),
        (("--silence", "1.5:1:0"), "--silence 1.5:1:0 lasts 0 s: give a finite number of seconds"),
        (("--model", "5XB"), "--model '5XB' is no size: write a number of bytes, .* such as 64MiB"),
        (("--model", "5MB/s"), "--model '5MB/s' is a rate, and no size: write"),
        (("--workers", "0"), "0 workers cannot train"),
        (("--policy", "softsync", "--set", "n=9"), "n = 9 groups cannot be made of 3 workers"),
        (("--batch-size", "100000"), "mini-batch of 100000 examples"),
        (("--latency", "-1"), "latency is -1 s"),
        (("--link", "fast"), "not a rate"),
    ],
)
def test_refuses_with_a_sentence(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(AiopsError, match=says):
        CliRunner().invoke(app, [*SMALL, *flags], catch_exceptions=False)
