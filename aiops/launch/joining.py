"""Decide how a process that another launcher has started takes part in its job; no sockets.

The process of rank 0 starts the server beside its worker, unless the server is elsewhere. The
others wait for it. The server listens on loopback if all processes are on one machine, and else on
all addresses. Then it needs a token, and nothing that a launcher tells can be one: other users can
read the names of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiops.common import urls
from aiops.common.frozen import value
from aiops.common.launchers import URL, WorkerPlace
from aiops.errors import UsageError

_PASSED_ON = {
    "torchrun": "on each machine, before torchrun",
    "Open MPI": "before mpirun, and hand it on: mpirun -x AIOPS_TOKEN",
    "Slurm": "in the batch script, or before srun",
}


@value
class JoinPlan:
    """The part of one process.

    Attributes
    ----------
    rank, workers, local_rank, local_workers
        Its number, from 0, and how many there are; the same on its machine.
    restarts
        How often the launcher has started it before.
    serves
        It starts the server.
    url
        The server's, as this process reaches it.
    listen
        Host and port that the server listens on; None: it is elsewhere.
    """

    rank: int
    workers: int
    local_rank: int
    local_workers: int
    restarts: int
    serves: bool
    url: str
    listen: tuple[str, int] | None


def plan_to_join(
    place: WorkerPlace,
    *,
    serve: bool | None,
    port: int | None,
    host: str | None,
    token: bool,
) -> JoinPlan:
    """Return the part of a process.

    Parameters
    ----------
    place
        What its environment tells.
    serve
        Rank 0 serves; None: if no server is named.
    port
        The server's; None: that of its URL, or the job's own.
    host
        The address that the server is to listen on; None: as the module says.
    token
        Whether it has one.

    Raises
    ------
    UsageError
        When the environment does not tell enough, or there must be a token.
    """
    for fault in place.faults:
        raise UsageError(fault)
    rank, workers = place.rank, place.workers
    named = place.url if place.sources.get("url") == URL else None
    if rank is None:
        raise UsageError(
            "no launcher has started this process: aiops join stands behind torchrun, srun or"
            " mpirun, as in `srun aiops join train.py`; on one machine use `aiops run`"
            " (`aiops doctor` shows what is set)"
        )
    if workers is None:
        raise UsageError(
            f"{place.launcher or 'the launcher'} tells a process its rank, and not how many there"
            " are: set WORLD_SIZE to the number of workers"
        )
    local = (place.local_rank or 0, place.local_workers or 1)
    if not (named is None if serve is None else serve):
        if named is None:
            raise UsageError(f"no server is named: set {URL}, or have rank 0 serve")
        return JoinPlan(rank, workers, *local, place.restarts, False, named, None)
    url = place.server_url(port)
    if url is None:
        raise UsageError(
            f"{place.launcher or 'the environment'} does not tell which machine rank 0 is on: set"
            f" MASTER_ADDR to its name, or {URL}=aiops://HOST:PORT"
        )
    listen = host or ("127.0.0.1" if place.one_machine and named is None else "0.0.0.0")
    if not urls.is_loopback(listen) and not token:
        how = _PASSED_ON.get(place.launcher, "for all processes of the job")
        raise UsageError(
            "the job is on several machines, so its server listens beyond loopback and needs a"
            f" token: export AIOPS_TOKEN=$(openssl rand -hex 16) {how}"
        )
    return JoinPlan(
        *(rank, workers, *local, place.restarts, rank == 0, url, (listen, urls.parse(url)[1]))
    )


def threads_of_worker(environment: Mapping[str, str], processors: int, local_workers: int) -> int:
    """Return the threads that a worker's mathematics may use, at least 1.

    ``processors``: those that this process may use. Slurm binds each process to its own, or not;
    the number that was asked for is right in both cases.
    """
    asked = environment.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdigit() and int(asked):
        return min(int(asked), processors)
    return max(1, processors // local_workers)
