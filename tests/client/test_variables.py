"""The variables that clients read where they are given nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client.variables import GPUS, see_own_gpu, standalone
from aiops.common.launchers import detect
from aiops.errors import UsageError
from aiops.launch.program import Team
from tests.common.test_launchers import (
    AWS_BATCH,
    FLUX,
    HYDRA,
    JSRUN,
    KUBERNETES,
    MVAPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
)
from tests.rows import each_row
from tests.support import ServerThread

PARAMS = {"w": np.zeros(3, np.float32)}


def names(server: ServerThread) -> set[str]:
    with aiops.Client(server.url) as client:
        return {row["name"] for row in client.stats()["workers"]}


def test_a_worker_finds_its_server_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def train() -> None:
        async with aiops.AsyncWorker(params=PARAMS) as worker:
            await worker.step(PARAMS)

    with ServerThread(policy="asgd") as server:
        monkeypatch.setenv("AIOPS_URL", server.url)
        monkeypatch.setenv("AIOPS_NAME", "worker 5")
        with aiops.Worker(params=PARAMS) as worker:
            worker.step(PARAMS)
            assert worker.url == server.url
        assert names(server) == {"worker 5"}
        monkeypatch.setenv("AIOPS_NAME", "worker 6")
        asyncio.run(train())
        with aiops.Worker(server.url, PARAMS, name="mine"):
            assert {"worker 6", "mine"} <= names(server)


def test_what_is_given_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPS_URL", "aiops://127.0.0.1:1")
    with ServerThread(policy="asgd") as server, aiops.Client(server.url) as client:
        assert client.url == server.url


def test_a_launcher_tells_where_the_server_is_and_which_worker_this_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AIOPS_URL", raising=False)
    with ServerThread(policy="asgd") as server:
        port = server.url.rpartition(":")[2]
        for name, text in {**TORCHRUN, "MASTER_ADDR": "localhost", "AIOPS_PORT": port}.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setenv("RANK", "0")
        with aiops.Worker(params=PARAMS) as worker, aiops.Client():
            assert worker.url == f"aiops://localhost:{port}"
            rows = worker.stats()["workers"]
            assert [row["name"] for row in rows if row["role"] == "worker"] == ["worker 0"]
            assert not any(row["name"] == "worker 0" for row in rows if row["role"] != "worker")
    (told, _same) = caplog.messages
    assert told == (
        f"AIOPS_URL is not set: the server is taken to be aiops://localhost:{port}, by MASTER_ADDR,"
        " AIOPS_PORT"
    )


@each_row(
    "make",
    [
        lambda: aiops.Client(),
        lambda: aiops.AsyncClient(),
        lambda: aiops.Worker(params=PARAMS),
        lambda: aiops.client.AsyncModelAverager(params=PARAMS),
    ],
)
def test_without_either(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOPS_URL", raising=False)
    with pytest.raises(
        UsageError, match="no server is named: give its URL, start the program with"
    ):
        make()


@each_row(
    ("params", "given"), [(None, "nothing"), ([np.zeros(3)], "list"), (np.zeros(3), "ndarray")]
)
def test_parameters_without_names(params: Any, given: str) -> None:
    with pytest.raises(UsageError, match=f"params are arrays by name, as .*, not {given}"):
        aiops.Worker("aiops://127.0.0.1:1", params)
    with pytest.raises(UsageError, match=f"params are arrays by name, as .*, not {given}"):
        aiops.AsyncWorker("aiops://127.0.0.1:1", params)


def test_parameters_in_the_place_of_the_url() -> None:
    with pytest.raises(UsageError, match=r"is a string, not dict; .* Worker\(params=\.\.\.\)"):
        aiops.Worker(PARAMS, PARAMS)  # type: ignore[arg-type]


RUN = {
    "AIOPS_URL": "aiops://127.0.0.1:7171", "AIOPS_RESTARTS": "2", "RANK": "1", "WORLD_SIZE": "4",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "HOME": "/home/alice",
}  # fmt: skip
JOBS = [RUN, TORCHRUN, {**SLURM, **RUN}, SLURM, OPEN_MPI, HYDRA, KUBERNETES, AWS_BATCH, JSRUN, FLUX]
JOBS.append(MVAPICH)


@each_row("before", JOBS)
def test_frameworks_find_one_process_and_aiops_its_place(before: dict[str, str]) -> None:
    environment = dict(before)
    place = detect(before)
    assert standalone(environment) == (place.rank, place.workers)
    assert not environment.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}
    after = detect(environment)
    assert after.launcher == ""
    assert after.url == place.url
    assert after.name == place.name
    assert (after.rank, after.workers) == (place.rank, place.workers)
    assert (after.local_rank, after.local_workers) == (place.local_rank, place.local_workers)
    assert after.restarts == place.restarts
    assert standalone(environment) == (place.rank, place.workers)  # again
    assert environment.get("HOME") == before.get("HOME")


def test_the_workers_of_a_job_that_a_worker_starts_have_places_of_their_own() -> None:
    """The inner jobs of a search, say, whose outer workers have called `standalone`."""
    outer = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    standalone(outer)
    team = Team(workers=3, local_workers=3, restarts=0, seed=1, threads=1)
    for rank in range(3):
        inner = team.place(rank, 0, "aiops://inner").variables(outer)
        place = detect(inner)
        assert (place.rank, place.workers) == (rank, 3)
        assert (place.local_rank, place.local_workers, place.url) == (rank, 3, "aiops://inner")
        assert standalone(inner) == (rank, 3)
    assert outer["AIOPS_RANK"] == "1"


def test_where_nothing_tells_it_is_the_only_one() -> None:
    environment = {"HOME": "/home/alice"}
    assert standalone(environment) == (0, 1)
    assert environment == {"HOME": "/home/alice"}
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}  # no step's
    assert standalone(batch) == (0, 1)


@each_row(
    ("count", "given", "seen"),
    [
        (4, None, ["0", "1", "2"]),
        (2, None, ["0", "1", "0"]),
        (1, None, [None] * 3),
        (0, None, [None] * 3),
        (3, "5, GPU-7,2", ["5", "GPU-7", "2"]),
        (1, "5", ["5"] * 3),  # a launcher has chosen
        (0, "", [""] * 3),
    ],
)
def test_each_worker_of_a_machine_has_a_gpu_of_its_own(
    count: int, given: str | None, seen: list[str | None]
) -> None:
    for rank, own in enumerate(seen):
        environment = {"RANK": str(rank), "WORLD_SIZE": "3"}
        environment |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"}
        if given is not None:
            environment[GPUS] = given
        standalone(environment)
        see_own_gpu(count, environment)
        assert environment.get(GPUS) == own
        see_own_gpu(min(count, 1), environment)  # again: it sees one now
        assert environment.get(GPUS) == own
    alone = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    before = dict(alone)
    see_own_gpu(4, alone)
    assert alone == before


@each_row(
    ("environment", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"RANK": "2", "WORLD_SIZE": "three"}, "WORLD_SIZE must be a whole number from 1"),
        ({"RANK": "2"}, "number is told, 2, and not how many there are: set WORLD_SIZE"),
        ({"JOB_COMPLETION_INDEX": "2"}, "number is told, 2, and not how many there are"),
        ({"AIOPS_RANK": "2"}, "number is told, 2, and not how many there are"),
        ({"AIOPS_WORLD_SIZE": "4"}, "4 workers, by AIOPS_WORLD_SIZE, and the number of this one"),
    ],
)
def test_a_place_that_is_told_in_part_is_not_guessed(
    environment: dict[str, str], said: str
) -> None:
    before = dict(environment)
    with pytest.raises(UsageError, match=said):
        standalone(environment)
    assert environment == before
