"""Find a process's place in its job from the variables that launchers set: one table, no sockets.

`LAUNCHERS` is the table, from the most specific launcher to the least: a program that ``mpirun`` or
``torchrun`` starts inside of a Slurm job has Slurm's variables too, and they say something else.
The first launcher all of whose ``marks`` are set is the one. Variables of aiops' own, in
`OVERRIDES`, win over any launcher's, each for itself.

The server's address is ``AIOPS_URL``. Without it, it is port `urls.PORT` (or ``AIOPS_PORT``) of the
host of rank 0: this one if all of the job's processes are on one machine.

``aiops doctor`` prints what was found, and in which variable.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping

from aiops.common import urls
from aiops.common.frozen import value
from aiops.common.tls_files import CA, CERT

URL, PORT = "AIOPS_URL", "AIOPS_PORT"

_LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 30000)
"""Ports of jobs' servers: below those that Linux gives to connections, and Kubernetes to nodes."""


@value
class Launcher:
    """The variables of one launcher; of several for one fact the first that is set counts.

    Attributes
    ----------
    name
        For people.
    marks
        It has started a process in whose environment all of these are.
    rank, workers, local_rank, local_workers
        Number of the process in its job and on its machine, from 0, and how many there are.
    nodes
        How many machines the job has.
    host
        The machine of rank 0: a name, or a list of machines as Slurm writes it.
    job
        Those that together name the job, the same for all its processes.
    restarts
        How often the launcher has started the job's processes again.
    """

    name: str
    marks: tuple[str, ...]
    rank: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_workers: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()


LAUNCHERS = (
    Launcher(
        # Also Kubeflow's PyTorchJob, and every script that prepares torch.distributed by hand.
        "torchrun",
        ("RANK", "WORLD_SIZE"),
        rank=("RANK",),
        workers=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_workers=("LOCAL_WORLD_SIZE",),
        nodes=("GROUP_WORLD_SIZE",),
        host=("MASTER_ADDR",),
        job=("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
        restarts=("TORCHELASTIC_RESTART_COUNT",),
    ),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        workers=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_workers=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        host=("MASTER_ADDR",),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        # Of mpirun_rsh; below MPICH's mpiexec they are there once MPI is initialised.
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        rank=("MV2_COMM_WORLD_RANK",),
        workers=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_workers=("MV2_COMM_WORLD_LOCAL_SIZE",),
        host=("MASTER_ADDR",),
    ),
    Launcher(
        # `srun --mpi=pmi2` sets PMI_RANK, too, and leaves the rest to Slurm's variables.
        "MPICH or Intel MPI",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        rank=("PMI_RANK",),
        workers=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_workers=("MPI_LOCALNRANKS",),
        host=("MASTER_ADDR",),
    ),
    Launcher(
        "Flux",
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        rank=("FLUX_TASK_RANK",),
        workers=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        nodes=("FLUX_JOB_NNODES",),
        host=("MASTER_ADDR",),
        job=("FLUX_JOB_ID",),
    ),
    Launcher(
        "jsrun (LSF)",
        ("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        workers=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_workers=("JSM_NAMESPACE_LOCAL_SIZE",),
        host=("MASTER_ADDR",),
        job=("LSB_JOBID",),
    ),
    Launcher(
        # Those of a step: the batch script itself has SLURM_PROCID=0, and is no worker.
        "Slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rank=("SLURM_PROCID",),
        workers=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        local_workers=("SLURM_STEP_TASKS_PER_NODE",),
        nodes=("SLURM_STEP_NUM_NODES",),
        host=("MASTER_ADDR", "SLURM_STEP_NODELIST"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        restarts=("SLURM_RESTART_COUNT",),
    ),
    Launcher(
        "PMI",
        ("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        workers=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        host=("MASTER_ADDR",),
        job=("PALS_APID",),
    ),
    Launcher(
        "PMIx",
        ("PMIX_RANK",),
        rank=("PMIX_RANK",),
        workers=("WORLD_SIZE",),
        host=("MASTER_ADDR",),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        "AWS Batch",
        ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
        rank=("AWS_BATCH_JOB_NODE_INDEX",),
        workers=("AWS_BATCH_JOB_NUM_NODES",),
        nodes=("AWS_BATCH_JOB_NUM_NODES",),
        host=("MASTER_ADDR", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),
        job=("AWS_BATCH_JOB_ID",),
        restarts=("AWS_BATCH_JOB_ATTEMPT",),
    ),
    Launcher(
        # An Indexed Job. Kubernetes tells a pod its number, and not how many there are.
        "Kubernetes",
        ("JOB_COMPLETION_INDEX",),
        rank=("JOB_COMPLETION_INDEX",),
        workers=("WORLD_SIZE",),
        host=("MASTER_ADDR",),
    ),
)
"""The launchers, the most specific first."""

OVERRIDES = Launcher(
    "aiops",
    (),
    rank=("AIOPS_RANK",),
    workers=("AIOPS_WORLD_SIZE",),
    local_rank=("AIOPS_LOCAL_RANK",),
    local_workers=("AIOPS_LOCAL_WORLD_SIZE",),
    restarts=("AIOPS_RESTARTS",),
)
"""Variables of aiops' own, each of which wins over a launcher's."""


@value
class WorkerPlace:
    """The place of a process in its job, as far as its environment tells.

    Attributes
    ----------
    launcher
        The name of the launcher; empty: none was found.
    rank, workers, local_rank, local_workers
        As `Launcher` has them; None: not told.
    host
        The machine of rank 0; None: not told.
    url
        The server's; None: neither told nor to be concluded.
    job
        The name of the job, the same for all its processes; empty: not told.
    restarts
        How often the process has been started before.
    tls
        Whether the job's server speaks TLS.
    sources
        By name of an attribute: the variables that it comes from, as text.
    faults
        Sentences about variables that do not have the value that they should.
    """

    launcher: str
    rank: int | None
    workers: int | None
    local_rank: int | None
    local_workers: int | None
    host: str | None
    url: str | None
    job: str
    restarts: int
    tls: bool
    sources: Mapping[str, str]
    faults: tuple[str, ...]

    @property
    def one_machine(self) -> bool:
        """All processes of the job are known to be on this machine."""
        return self.host == _LOOPBACK

    @property
    def name(self) -> str | None:
        """The worker's name in the server's statistics; None: its rank is not told."""
        return None if self.rank is None else worker_name(self.rank)

    def server_url(self, port: int | None) -> str | None:
        """Return the URL at which rank 0 serves; ``port``: None: the job's own."""
        if URL in self.sources.get("url", ""):
            return self.url
        if self.host is None:
            return None
        return urls.write(self.host, job_port(self.job) if port is None else port, tls=self.tls)


def worker_name(rank: int) -> str:
    """Return the name that a worker's client has in the server's statistics."""
    return f"worker {rank}"


def job_port(job: str) -> int:
    """Return the port of a job's server: the same for all its processes, and seldom another job's.

    >>> job_port("Slurm 17 0"), job_port("")
    (23652, 7171)
    """
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else urls.PORT


def detect(environment: Mapping[str, str]) -> WorkerPlace:
    """Return the place of the process that has these variables."""
    return _Detection(environment).place()


class _Detection:
    """Reads one environment, and notes what comes from where."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._sources: dict[str, str] = {}
        self._faults: list[str] = []
        found = (each for each in LAUNCHERS if all(map(self._text, each.marks)))
        self._launcher = next(found, None)

    def place(self) -> WorkerPlace:
        rank, workers = self._number("rank"), self._number("workers")
        if rank is not None and workers is not None and rank >= workers:
            self._faults.append(
                f"{self._sources['rank']} is {rank} and {self._sources['workers']} is {workers}:"
                " ranks count from 0, so there must be more workers than that"
            )
            rank = None
        local_rank = self._number("local_rank")
        local_workers = self._number("local_workers", self._on_this_node)
        host = self._host(workers, local_workers, self._number("nodes"))
        return WorkerPlace(
            self._launcher.name if self._launcher else "",
            *(rank, workers, local_rank, local_workers),
            host,
            self._url(host),
            self._job(),
            self._number("restarts") or 0,
            self._tls,
            self._sources,
            tuple(self._faults),
        )

    @property
    def _tls(self) -> bool:
        """True if the job's processes are given files of TLS: its server speaks it."""
        return bool(self._text(CA) or self._text(CERT))

    def _text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def _first(self, fact: str) -> tuple[str, str] | None:
        """Return the first variable for a fact that is set, and its text."""
        for launcher in (OVERRIDES, self._launcher):
            for name in getattr(launcher, fact) if launcher else ():
                if text := self._text(name):
                    return name, text
        return None

    def _number(self, fact: str, read: Callable[[str], str] = str) -> int | None:
        found = self._first(fact)
        if found is None:
            return None
        name, text = found
        try:
            number = int(read(text))
        except ValueError:
            number = -1
        least = 1 if fact in ("workers", "local_workers", "nodes") else 0
        if number < least:
            self._faults.append(f"{name} must be a whole number from {least}, not {text!r:.40}")
            return None
        self._sources[fact] = name
        return number

    def _on_this_node(self, text: str) -> str:
        """Return the tasks on this node, of a list as Slurm writes it: ``2(x3),1``."""
        if text.isdigit():  # of one node, or not of Slurm: LOCAL_WORLD_SIZE below srun
            return text
        counts = [
            count
            for part in text.split(",")
            for count in [part.partition("(")[0]] * int(_repeated(part))
        ]
        node = int(self._text("SLURM_NODEID") or 0)
        return counts[node] if node < len(counts) else ""

    def _host(self, workers: int | None, here: int | None, nodes: int | None) -> str | None:
        found = self._first("host")
        if nodes == 1 or (here is not None and here == workers):
            self._sources["host"] = self._sources["nodes" if nodes == 1 else "local_workers"]
            return _LOOPBACK
        if found is None:
            return None
        self._sources["host"] = found[0]
        return first_host(found[1])

    def _url(self, host: str | None) -> str | None:
        if url := self._text(URL):
            self._sources["url"] = URL
            return url
        if host is None:
            return None
        port, source = urls.PORT, self._sources["host"]
        text = self._text(PORT)
        if text.isdigit() and 0 < int(text) < 1 << 16:
            port, source = int(text), f"{source}, {PORT}"
        elif "://" in text:
            self._faults.append(
                f"{PORT} is {text!r:.60}, which Kubernetes sets for a service that is called aiops:"
                " set enableServiceLinks: false in the pod, or call the service something else"
            )
        self._sources["url"] = source
        return urls.write(host, port, tls=self._tls)

    def _job(self) -> str:
        names = [
            name for name in (self._launcher.job if self._launcher else ()) if self._text(name)
        ]
        if self._launcher is None or not names:
            return ""
        self._sources["job"] = ", ".join(names)
        return " ".join([self._launcher.name, *map(self._text, names)])


def _repeated(part: str) -> str:
    found = re.fullmatch(r"\d+\(x(\d+)\)", part)
    return found[1] if found else "1"


def first_host(nodes: str) -> str:
    """Return the first machine of a list as Slurm writes it.

    >>> first_host("node[007-012,31],gpu1"), first_host("r[1-2]n[4,6]"), first_host("a.example")
    ('node007', 'r1n4', 'a.example')
    """
    found = ""
    for text, numbers in re.findall(r"([^\[,]*)(?:\[([^\]]*)\])?", nodes):
        if not text and not numbers:  # a comma, or the end
            break
        found += text + re.split("[-,]", numbers)[0]
    return found
