"""The table of launchers: environments as they are found in the wild, and what they say."""

from __future__ import annotations

import string
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from aiops.common.launchers import LAUNCHERS, OVERRIDES, detect, first_host, job_port
from tests.rows import each_row

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "OMP_NUM_THREADS": "1",
}  # fmt: skip
SLURM_BATCH = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "trial[1-2]", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}  # fmt: skip
SLURM = {
    **SLURM_BATCH, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_NODEID": "1",
    "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "trial[1-2]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_RESTART_COUNT": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "497287169",
    "PMIX_RANK": "1",
}  # fmt: skip
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "PMI_RANK": "2", "PMI_SIZE": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2", "AIOPS_URL": "aiops://h:1",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
AWS_BATCH = {
    "AWS_BATCH_JOB_ID": "b", "AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.1.2.3",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "7", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6", "LSB_JOBID": "99", "PMIX_RANK": "7",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "3", "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "f1",
}  # fmt: skip


@each_row(
    ("environment", "launcher", "place", "url"),
    [
        ({}, "", (None, None, None, None), None),
        (TORCHRUN, "torchrun", (5, 8, 1, 4), "aiops://node1:7171"),
        (SLURM_BATCH, "", (None, None, None, None), None),
        (SLURM, "Slurm", (3, 4, 0, 1), "aiops://trial1:7171"),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2), "aiops://127.0.0.1:7171"),
        (HYDRA, "MPICH or Intel MPI", (2, 4, 0, 2), None),
        ({**HYDRA, "MASTER_ADDR": "n3"}, "MPICH or Intel MPI", (2, 4, 0, 2), "aiops://n3:7171"),
        (MVAPICH, "MVAPICH", (1, 2, 1, 2), "aiops://h:1"),
        (KUBERNETES, "Kubernetes", (2, 3, None, None), None),
        (AWS_BATCH, "AWS Batch", (1, 2, None, None), "aiops://10.1.2.3:7171"),
        (JSRUN, "jsrun (LSF)", (7, 12, 1, 6), None),
        (FLUX, "Flux", (3, 4, 3, None), "aiops://127.0.0.1:7171"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIx", (1, None, None, None), None),
    ],
)
def test_what_an_environment_says(
    environment: Mapping[str, str],
    launcher: str,
    place: tuple[int | None, ...],
    url: str | None,
) -> None:
    found = detect(environment)
    assert found.launcher == launcher
    assert (found.rank, found.workers, found.local_rank, found.local_workers) == place
    assert found.url == url
    assert not found.faults
    for names in found.sources.values():
        assert set(names.split(", ")) <= set(environment)


@each_row(
    ("inner", "name"), [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI"), (HYDRA, "MPICH or Intel M")]
)
def test_the_inner_launcher_counts(inner: Mapping[str, str], name: str) -> None:
    """Within a Slurm job's script, or the agent that a launcher has started by srun."""
    for outer in (SLURM_BATCH, SLURM):
        found = detect({**outer, **inner})
        assert found.launcher.startswith(name)
        assert found.rank == detect(inner).rank


def test_srun_that_speaks_pmi_is_slurm() -> None:
    for pmi in ({"PMI_RANK": "3", "PMI_SIZE": "4"}, {"PMIX_RANK": "3"}):
        assert detect({**SLURM, **pmi}).host == "trial1"


def test_variables_of_our_own_win() -> None:
    found = detect({**SLURM, "AIOPS_RANK": "1", "AIOPS_URL": "aiops://a,b", "AIOPS_RESTARTS": "0"})
    assert (found.rank, found.workers, found.url, found.restarts) == (1, 4, "aiops://a,b", 0)
    assert found.sources["rank"] == "AIOPS_RANK"
    assert detect({"AIOPS_RANK": "2", "AIOPS_WORLD_SIZE": "4"}).name == "worker 2"


def test_restarts() -> None:
    assert detect(TORCHRUN).restarts == 2
    assert detect(SLURM).restarts == 1
    assert detect(OPEN_MPI).restarts == 0


def test_slurm_counts_the_tasks_of_a_node() -> None:
    def on(node: str, tasks: str) -> int | None:
        each = {**SLURM, "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks}
        return detect(each).local_workers

    assert [on(node, "3(x2),1") for node in "0123"] == [3, 3, 1, None]


def test_a_job_on_one_machine_serves_on_loopback() -> None:
    """There the name that a launcher gives may be one of another network card."""
    one = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "trial1.cluster"}
    assert detect(one).one_machine
    assert detect(one).server_url(None) == f"aiops://127.0.0.1:{job_port('Slurm 17 0')}"
    assert not detect(SLURM).one_machine
    assert detect(SLURM).server_url(8000) == "aiops://trial1:8000"
    assert detect(HYDRA).server_url(8000) is None
    given = {**HYDRA, "AIOPS_URL": "aiops://n1:9"}
    assert detect(given).server_url(8000) == "aiops://n1:9"


def test_ports_of_jobs() -> None:
    """The same for all processes of one job, mostly different for two."""
    ports = {job_port(f"Slurm {job} 0") for job in range(100)}
    assert len(ports) > 95
    assert all(20000 <= port < 30000 for port in ports)
    assert detect(SLURM).job == detect({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).job


@each_row(
    ("changed", "fault"),
    [
        ({"RANK": "one"}, "RANK must be a whole number from 0, not 'one'"),
        ({"RANK": "-1"}, "RANK must be a whole number from 0, not '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1"),
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8: ranks count from 0"),
        (
            {"AIOPS_PORT": "tcp://10.0.0.1:7171"},
            "which Kubernetes sets for a service that is called aiops: set enableServiceLinks",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(changed: Mapping[str, str], fault: str) -> None:
    (found,) = detect({**TORCHRUN, **changed}).faults
    assert fault in found


def test_a_port_of_the_server() -> None:
    assert detect({**TORCHRUN, "AIOPS_PORT": "9000"}).url == "aiops://node1:9000"
    assert detect({**TORCHRUN, "MASTER_ADDR": "fe80::1"}).url == "aiops://[fe80::1]:7171"


@each_row(
    ("nodes", "host"),
    [
        ("trial[1-2]", "trial1"),
        ("node[007-012,31],gpu1", "node007"),
        ("gpu1,node[1-2]", "gpu1"),
        ("r[1-2]n[4,6]", "r1n4"),
        ("rack1-node[3]-ib,x", "rack1-node3-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_machine_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


NAMES = sorted(
    {
        name
        for launcher in (*LAUNCHERS, OVERRIDES)
        for fact in ("marks", "rank", "workers", "local_rank", "local_workers", "nodes", "host")
        for name in getattr(launcher, fact)
    }
    | {"AIOPS_PORT", "SLURM_NODEID"}
)


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.one_of(
            st.sampled_from(["0", "1", "4", "2(x3),1", "a[1-2]", " "]), st.text(string.printable)
        ),
    )
)
def test_whatever_is_set_there_is_an_answer(environment: dict[str, str]) -> None:
    found = detect(environment)
    if found.rank is not None and found.workers is not None:
        assert 0 <= found.rank < found.workers


def test_each_launcher_can_be_found() -> None:
    """No row of the table stands behind one that all of its processes have, too."""
    for launcher in LAUNCHERS:
        assert detect(dict.fromkeys(launcher.marks, "1")).launcher == launcher.name
