"""The part that a process takes in another launcher's job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from aiops.common.launchers import detect, job_port
from aiops.errors import UsageError
from aiops.launch.joining import JoinPlan, plan_to_join, threads_of_worker
from tests.common.test_launchers import HYDRA, KUBERNETES, OPEN_MPI, SLURM, TORCHRUN
from tests.rows import each_row


def plan(environment: Mapping[str, str], **settings: Any) -> JoinPlan:
    given = {"serve": None, "port": None, "host": None, "token": False, **settings}
    return plan_to_join(detect(environment), **given)


def test_on_one_machine_rank_0_serves_on_loopback() -> None:
    for rank in (0, 1):
        found = plan({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)})
        port = job_port("Open MPI 497287169")
        assert found.serves == (rank == 0)
        assert found.url == f"aiops://127.0.0.1:{port}"
        assert found.listen == ("127.0.0.1", port)
        assert (found.rank, found.workers) == (rank, 2)


def test_on_several_it_listens_everywhere_and_needs_a_token() -> None:
    found = plan(SLURM, token=True)
    assert not found.serves
    assert (found.rank, found.workers, found.local_rank, found.local_workers) == (3, 4, 0, 1)
    port = job_port("Slurm 17 0")
    assert found.url == f"aiops://trial1:{port}"
    assert found.listen == ("0.0.0.0", port)
    with pytest.raises(UsageError, match=r"needs a token: .* in the batch script, or before srun"):
        plan(SLURM)
    with pytest.raises(UsageError, match="mpirun -x AIOPS_TOKEN"):
        plan({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n1"})


def test_what_is_given_counts() -> None:
    assert plan(TORCHRUN, port=8000, token=True).url == "aiops://node1:8000"
    assert plan(TORCHRUN, host="10.0.0.1", token=True).listen == (
        *("10.0.0.1", job_port("torchrun none 29500")),
    )


def test_a_server_that_is_named_is_elsewhere() -> None:
    found = plan({**SLURM, "AIOPS_URL": "aiops://a,b"})
    assert (found.serves, found.url, found.listen) == (False, "aiops://a,b", None)
    assert found.restarts == 1


def test_unless_rank_0_is_to_serve_there() -> None:
    """For launchers that do not tell where rank 0 is."""
    found = plan({**HYDRA, "PMI_RANK": "0", "AIOPS_URL": "aiops://n1:9"}, serve=True, token=True)
    assert (found.serves, found.url, found.listen) == (True, "aiops://n1:9", ("0.0.0.0", 9))


@each_row(
    ("environment", "settings", "text"),
    [
        ({}, {}, "no launcher has started this process: .* on one machine use `aiops run`"),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            {},
            "Kubernetes tells a process its rank, and not how many",
        ),
        (KUBERNETES, {}, "Kubernetes does not tell which machine rank 0 is on: set MASTER_ADDR"),
        (HYDRA, {"token": True}, "MPICH or Intel MPI does not tell which machine rank 0 is on"),
        (SLURM, {"serve": False}, "no server is named: set AIOPS_URL, or have rank 0 serve"),
        ({**TORCHRUN, "RANK": "x"}, {}, "RANK must be a whole number"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    environment: Mapping[str, str], settings: Mapping[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        plan(environment, **settings)


def test_threads_of_a_worker() -> None:
    assert threads_of_worker({}, 8, 4) == 2
    assert threads_of_worker({}, 2, 4) == 1
    assert threads_of_worker({"SLURM_CPUS_PER_TASK": "6"}, 6, 4) == 6  # bound to its own
    assert threads_of_worker({"SLURM_CPUS_PER_TASK": "6"}, 24, 4) == 6  # not bound
    assert threads_of_worker({"SLURM_CPUS_PER_TASK": "6"}, 2, 4) == 2
