"""``aiops join``: workers that another launcher starts, and the server of rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiops.net.process_tree import having
from tests.peers import eventually
from tests.support import PATIENCE
from tests.zygote import NESTED, ForkedPopen

PROGRAM = """
import os, sys, time
import numpy as np
import aiops

rank = int(os.environ["RANK"])
mine = np.zeros(3, np.float32)
mine[rank] = -1  # what is subtracted from each parameter: the pushes of each worker are counted
with aiops.Worker(params={"w": np.zeros(3, np.float32)}) as worker:
    for _ in range(20):
        worker.step({"w": mine})
    while "all" in sys.argv and worker.params["w"].sum() < 60:
        worker.step({"w": 0 * mine})
        time.sleep(0.01)
    if "waits" in sys.argv:
        print("waits", flush=True)
        time.sleep(60)
    print(
        *("rank", rank, os.environ["LOCAL_RANK"], "of", os.environ["WORLD_SIZE"]),
        *("threads", os.environ["OMP_NUM_THREADS"], *worker.params["w"].tolist()),
    )
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def processes(
    count: int, *words: str | Path, environment: Mapping[str, str]
) -> list[subprocess.Popen[str]]:
    """Start the ranks of a job as Open MPI does, each in a session of its own."""
    known = {k: v for k, v in os.environ.items() if k not in ("AIOPS_URL", "AIOPS_TOKEN")}
    return [
        ForkedPopen(
            [sys.executable, "-m", "aiops", "join", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **known,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": str(count),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
                NESTED: "1",
                **environment,
            },
            start_new_session=True,
        )
        for rank in range(count)
    ]


@pytest.mark.slow
def test_rank_0_serves_and_the_server_ends_after_the_last(program: Path) -> None:
    """Rank 0's own worker ends first; that of rank 2 is started late."""
    job = {"PMIX_NAMESPACE": f"test {os.getpid()}"}
    flags = "--policy", "asgd", "--lr", "1", "--worker-threads", "3"
    started = processes(3, *flags, program, "all", environment=job)
    printed = [process.communicate(timeout=PATIENCE) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], printed
    for rank, (out, err) in enumerate(printed):
        assert out == f"rank {rank} {rank} of 3 threads 3 20.0 20.0 20.0\n"
        assert ("serving asgd" in err) == (rank == 0)


@pytest.mark.slow
def test_a_signal_ends_the_server_with_its_worker(program: Path) -> None:
    job = {"PMIX_NAMESPACE": f"signal {os.getpid()}"}
    [process] = processes(1, "--policy", "asgd", program, "waits", environment=job)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    mine = having(f"PMIX_NAMESPACE={job['PMIX_NAMESPACE']}")
    [server] = (p for p in mine if b"aiops.server" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(server, signal.SIGTERM)  # as a scheduler does, which sends it to all processes
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert "'worker 0'" in err.partition("is gone: process ")[0], err  # it left, and was not left
    assert "the server is shutting down" not in err.partition("is gone: process ")[0]
    eventually(lambda: not having(f"PMIX_NAMESPACE={job['PMIX_NAMESPACE']}"), "all have ended")


def test_what_cannot_work_is_a_sentence(program: Path, tmp_path: Path) -> None:
    elsewhere = {"AIOPS_URL": "aiops://127.0.0.1:1", "OMPI_COMM_WORLD_RANK": "1"}
    distant = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n1"}
    for status, words, environment, text in (
        (66, ["train.py"], {}, "there is no script 'train.py'"),
        (64, [program], distant, "needs a token"),
        (
            69,
            ["--wait", "1", program],
            elsewhere,
            "rank 1 has waited 1 s for the server (`aiops doctor`",
        ),
    ):
        [process] = processes(1, *words, environment={"OMPI_COMM_WORLD_SIZE": "2", **environment})
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        assert text in err


@pytest.mark.slow
def test_torchrun(program: Path) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", "--no-python", sys.executable, "-m", "aiops"]
    done = subprocess.run(
        [*command, "join", "--policy", "asgd", "--lr", "1", str(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k != "AIOPS_URL"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line[:15] for line in done.stdout.splitlines()) == [
        *("rank 0 0 of 2 t", "rank 1 1 of 2 t")
    ]
    assert "serving asgd" in done.stderr
