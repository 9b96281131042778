"""Demos as users run them: real processes, real data, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiops.lab.demo.settings import RECIPES
from tests.support import PATIENCE, Process
from tests.zygote import NESTED

FEW = ["--workers", "2", "--no-plot"]

SOON = 2.0
"""Seconds within which Ctrl-C must have ended everything."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@contextmanager
def demo(*flags: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    process = Process("-m", "aiops", "demo", *flags, env={NESTED: "1", **(env or {})})
    try:
        yield process
    finally:
        process.kill()


def run(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    with demo(*flags, env=env) as process:
        return process.end(60)


def until(process: Process, text: str) -> list[str]:
    """Read its lines until one has that text in it."""
    lines = [process.line()]
    while text not in lines[-1]:
        lines.append(process.line())
        assert lines[-1], f"it ended without saying {text!r}: {lines}"
    return lines


class Watched:
    """The children of a process, by handles that stay theirs when they are gone.

    They are those that it started; the process that forks them is none of them.
    """

    def __init__(self, parent: int) -> None:
        listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        commands = {
            int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            for pid in listed
        }
        self.commands = {
            pid: command for pid, command in commands.items() if "tests.zygote" not in command
        }
        self._handles = [os.pidfd_open(pid) for pid in self.commands]

    def worker(self) -> int:
        return next(pid for pid, command in self.commands.items() if '"index": 1' in command)

    def gone(self, patience: float = PATIENCE) -> bool:
        """Wait for all of them to end; return whether they did."""
        for handle in self._handles:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(1000 * patience):
                return False
        return True

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)


@pytest.fixture
def watch() -> Iterator[Any]:
    """Look at the children of a process; close the handles at the end."""
    seen: list[Watched] = []

    def look(process: Process) -> Watched:
        seen.append(Watched(process.popen.pid))
        return seen[-1]

    yield look
    for watched in seen:
        watched.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "setting", "updates"),
    [
        ("fasgd", "gamma=0.9", 600),
        ("hardsync", "admission=reject", 300),
        ("softsync", "n=2", 600),
        ("examples.custom_algorithm:Signum", "beta=0.8", 600),
    ],
)
def test_a_short_demo(policy: str, setting: str, updates: int, tmp_path: Path) -> None:
    """The first as users run it: started, with four workers, a plot and its choice of kernels."""
    few = policy != "fasgd"
    flags = ["--steps", "600", "--policy", policy, "--set", setting, "--seed", "3", "--json"]
    flags += FEW if few else ["--out", str(tmp_path)]
    status, out, err = run(*flags, env={} if few else {"AIOPS_KERNELS": "auto", NESTED: ""})
    assert status == 0, err
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["policy"] == policy
    workers = 2 if few else 4
    assert (found["dataset"], found["workers"], found["seed"]) == ("digits", workers, 3)
    assert found["complete"] is True
    assert found["steps"] == 600
    assert found["version"] == found["updates"] == updates
    assert found["test_accuracy"] > 0.8
    assert 0 <= found["mean_staleness"] <= 600
    model = 4 * (64 * 64 + 64 + 64 * 10 + 10)  # bytes
    assert found["bytes_pushed"] > 600 * model
    assert found["bytes_fetched"] > 150 * model
    assert found["seconds"] > 0
    if few:
        assert found["plot"] is None
    else:
        assert found["plot"] == str(tmp_path / "demo.png")
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for line in ("starting the server", "training aiops://127.0.0.1:", "test accuracy", "done"):
        assert line in err


@pytest.mark.slow
def test_lines_for_people(tmp_path: Path) -> None:
    status, out, err = run("--steps", "100", "--workers", "1", "--no-plot")
    assert (status, err) == (0, "")
    assert "fasgd on digits, 1 workers: done" in out
    assert "100 (" in out
    assert not (tmp_path / "demo.png").exists()


class TestCleanup:
    """Ended however, it leaves no process behind."""

    LONG = ("--steps", "1000000", *FEW)

    @on_linux
    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_soon_with_what_there_is(
        self, number: signal.Signals, watch: Any
    ) -> None:
        with demo(*self.LONG) as process:
            until(process, "accuracy")
            children = watch(process)
            assert len(children.commands) == 3
            process.signal(number)
            status, out, err = process.end(SOON)
            assert children.gone(0)
        assert (status, err) == (128 + number, "")
        assert "stopped early" in out
        assert "test accuracy" in out

    @on_linux
    @pytest.mark.slow
    def test_a_signal_while_everybody_is_starting(self, watch: Any) -> None:
        with demo(*self.LONG) as process:
            until(process, "starting the server")
            children = watch(process)
            process.signal(signal.SIGINT)
            status, out, err = process.end(SOON)
            assert children.gone(0)
        assert (status, err) == (130, "")
        assert "stopped early" in out
        assert "reached" in out

    @on_linux
    @pytest.mark.slow
    @pytest.mark.parametrize("when", ["starting the workers", "accuracy"])
    def test_killed_outright(self, when: str, watch: Any) -> None:
        with demo(*self.LONG) as process:
            until(process, when)
            children = watch(process)
            assert len(children.commands) >= 1
            process.signal(signal.SIGKILL)
            process.popen.wait(PATIENCE)
            assert children.gone()

    @pytest.mark.slow
    def test_interrupted_json_is_json(self) -> None:
        with demo(*self.LONG, "--json") as process:
            assert process.popen.stderr is not None
            while "accuracy" not in process.popen.stderr.readline():
                pass
            process.signal(signal.SIGINT)
            status, out, _err = process.end(SOON)
        assert status == 130
        found = json.loads(out)
        assert found["complete"] is False
        assert found["plot"] is None
        assert found["version"] >= 0

    @on_linux
    @pytest.mark.slow
    def test_a_worker_that_dies_is_named(self, watch: Any) -> None:
        with demo(*self.LONG) as process:
            until(process, "accuracy")
            children = watch(process)
            os.kill(children.worker(), signal.SIGKILL)
            status, out, err = process.end()
            assert children.gone(0)
        assert status == 1
        assert err == "aiops: worker-2 was ended by signal 9\n", out

    @pytest.mark.slow
    def test_a_server_that_does_not_start(self) -> None:
        status, _out, err = run("--no-plot", env={"AIOPS_KERNELS": "nmba"})
        assert status == 1
        assert "did you mean 'numba'?" in err.splitlines()[0]
        assert err.splitlines()[-1] == "aiops: the server ended with status 64"

    @pytest.mark.slow
    def test_a_run_that_diverges_says_so(self) -> None:
        flags = ("--policy", "asgd", "--lr", "1e30", "--no-plot", "--workers", "2")
        status, _out, err = run(*flags, "--steps", str(RECIPES["digits"].steps))
        assert status == 1
        assert "must be finite" in err
        assert "ended with status 1" in err.splitlines()[-1]
