"""``aiops run``: real servers, real workers, and what happens when some of them die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from aiops.net.process_tree import having
from tests.peers import eventually
from tests.support import PATIENCE
from tests.zygote import NESTED, ForkedPopen
from tests.zygote import run as run_python

MARK = "AIOPS_TEST_RUN"

PROGRAM = """
import os, sys, time
import numpy as np
import aiops

rank, restarts = int(os.environ["RANK"]), int(os.environ["AIOPS_RESTARTS"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "seed", os.environ["AIOPS_SEED"], *sys.argv[1:])
print("threads", os.environ["OMP_NUM_THREADS"], file=sys.stderr)
print("batch", os.sched_getscheduler(0) == os.SCHED_BATCH)
mine = np.zeros(2, np.float32)
mine[rank] = -1  # what is subtracted from each parameter: the pushes of each worker are counted
with aiops.Worker(params={"w": np.zeros(2, np.float32)}) as worker:
    done = round(float(worker.params["w"][rank]))
    print("begins at", done, "after", restarts)
    for step in range(done, 20):
        worker.step({"w": mine})
        if len(sys.argv) > 1 and sys.argv[1] == "dies" and rank == 1 and step == 9:
            os.kill(os.getpid(), 9)
        if len(sys.argv) > 1 and sys.argv[1] == "waits" and step == 9:
            print("waits", flush=True)
            while not os.path.exists(sys.argv[2]):
                worker.step({"w": 0 * mine})
                time.sleep(0.01)
    print("ends at", worker.params["w"].tolist(), "lost", worker.rolled_back)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


class Running:
    """``aiops run`` as a process, and what it has printed; its processes are forked, too."""

    def __init__(self, *words: str | Path, folder: Path, forked: bool = True) -> None:
        self.mark = uuid4().hex
        self.process = ForkedPopen(
            [sys.executable, "-m", "aiops", "run", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, MARK: self.mark, NESTED: "1" if forked else ""},
            start_new_session=True,
        )
        self.seen: list[str] = []

    def until(self, text: str, times: int = 1) -> str:
        """Read lines until some have had a text; return the last."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            times -= text in line
            if not times:
                return line
        raise AssertionError(f"no {text!r} in {''.join(self.seen)}")

    def end(self) -> int:
        """Read the rest; return the exit status."""
        rest, _ = self.process.communicate(timeout=PATIENCE)
        self.seen.append(rest)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.seen)

    def processes(self) -> list[int]:
        """The processes of the job, without the command's own."""
        return [pid for pid in having(f"{MARK}={self.mark}") if pid != self.process.pid]

    def process_of(self, module: str) -> int:
        """The process that runs a module."""
        (found,) = (
            pid
            for pid in self.processes()
            if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        )
        return found


@contextmanager
def running(*words: str | Path, folder: Path, forked: bool = True) -> Iterator[Running]:
    made = Running(*words, folder=folder, forked=forked)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()
        eventually(lambda: not made.processes(), "its processes end")


def test_workers_find_their_server_and_their_place(program: Path, tmp_path: Path) -> None:
    flags = "-n", "2", "--seed", "7", "--worker-threads", "3", "--policy", "asgd", "--lr", "1"
    with running(*flags, program, "a", "--lr", "x", folder=tmp_path, forked=False) as run:
        assert run.end() == 0, run.output
        for rank in range(2):
            assert f"[{rank}] rank {rank} of 2 seed 7 a --lr x\n" in run.output
            assert f"[{rank}] threads 3\n" in run.output
            assert f"[{rank}] begins at 0 after 0\n" in run.output
        assert "ends at [20.0, 20.0] lost 0" in run.output
        assert run.output.count("] batch False\n") == 2
        assert "40 gradients" in run.output.splitlines()[-1]
        assert "[server] " in run.output


def test_workers_that_outnumber_the_processors_are_batch_processes(program: Path) -> None:
    on_one = "import os, aiops.cli.main; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    done = run_python("-c", f"{on_one}; aiops.cli.main.main()", "run", "-n", "2", str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("] batch True\n") == 2


@pytest.mark.slow
def test_a_worker_and_a_server_that_die_are_started_again(program: Path, tmp_path: Path) -> None:
    """Nothing that was acknowledged is lost, and the port stays."""
    go, state = tmp_path / "go", tmp_path / "state"
    flags = "-n", "2", "--policy", "asgd", "--lr", "1", "--state", state
    with running(*flags, program, "waits", go, folder=tmp_path) as run:
        run.until("waits", 2)
        os.kill(run.process_of("aiops.server"), signal.SIGKILL)
        run.until("the server was ended by signal 9; it is started again")
        run.until("serving asgd")
        go.touch()
        assert run.end() == 0, run.output
        assert "ends at [20.0, 20.0] lost 0" in run.output
    with running("-n", "2", *flags[2:], program, "dies", folder=tmp_path) as run:
        assert run.end() == 0, run.output  # all is done already
        assert "begins at 20 after 0" in run.output
    flags = "-n", "2", "--policy", "asgd", "--lr", "1", "--logs", tmp_path / "logs"
    with running(*flags, program, "dies", folder=tmp_path) as run:
        assert run.end() == 0, run.output
        assert "worker 1 was ended by signal 9; it is started again" in run.output
        lines = (tmp_path / "logs" / "worker-1.txt").read_text()
        assert "begins at 10 after 1\n" in lines
        assert "[1]" not in run.output
        assert "joined" in (tmp_path / "logs" / "server.txt").read_text()


@pytest.mark.slow
def test_ctrl_c_ends_all(program: Path, tmp_path: Path) -> None:
    with running("-n", "2", program, "waits", tmp_path / "never", folder=tmp_path) as run:
        run.until("waits", 2)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.output
        assert "KeyboardInterrupt" in run.output
        assert not run.processes()


@pytest.mark.slow
def test_nothing_outlives_a_command_that_is_killed(program: Path, tmp_path: Path) -> None:
    with running("-n", "2", program, "waits", tmp_path / "never", folder=tmp_path) as run:
        run.until("waits", 2)
        assert len(run.processes()) == 4  # with the reaper
        run.process.kill()
        eventually(lambda: not run.processes(), "they end with it")


def test_a_program_that_fails_at_once_ends_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "broken.py").write_text("raise SystemExit(5)")
    with running("-n", "2", "-m", "package.broken", folder=tmp_path) as run:
        assert run.end() == 5, run.output
        assert "ended with status 5 before it had joined the server" in run.output


def test_what_cannot_work_is_a_sentence(program: Path, tmp_path: Path) -> None:
    with running("-n", "2", "train", folder=tmp_path) as run:
        assert run.end() == 66
        assert "there is no script 'train'; a module is run with -m" in run.output
    with running("-n", "2", "--policy", "nosuch", program, folder=tmp_path) as run:
        assert run.end() == 64
        assert "no policy is called 'nosuch'" in run.output
        assert "the server ended with status 64" in run.output
