"""The programs of a job: their command lines, and the variables that workers find."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from aiops.common.frozen import value
from aiops.common.launchers import OVERRIDES, worker_name
from aiops.net.cpu_count import BLAS


@value
class UserProgram:
    """The user's program.

    Attributes
    ----------
    target
        The path of a script, or the name of a module.
    module
        It is a module, as after ``python -m``.
    arguments
        What it is given.
    """

    target: str
    module: bool
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Its command line."""
        return [sys.executable, *(["-m"] if self.module else []), self.target, *self.arguments]


@value
class Place:
    """The place of a worker in its job.

    Attributes
    ----------
    rank, workers
        Its number, from 0, and how many there are.
    local_rank, local_workers
        The same on its machine.
    restarts
        How often it has been started before.
    url
        The server's.
    seed
        The job's: the same for all workers.
    threads
        How many each worker's matrix products may use.
    """

    rank: int
    workers: int
    local_rank: int
    local_workers: int
    restarts: int
    url: str
    seed: int
    threads: int

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return its environment.

        Parameters
        ----------
        given
            That of the command; numbers of threads that it has stay as they are. The place that it
            has does not: a worker of another job may have started this one, and `OVERRIDES` would
            win over the worker's own.
        """
        facts = (OVERRIDES.rank, OVERRIDES.workers, OVERRIDES.local_rank, OVERRIDES.local_workers)
        outer = {name for names in facts for name in names}
        threads = {name: str(self.threads) for name in BLAS if name not in given}
        return {
            "PYTHONUNBUFFERED": "1",  # lines are shown when they are printed
            **{name: text for name, text in given.items() if name not in outer},
            **threads,
            "AIOPS_URL": self.url,
            "AIOPS_NAME": worker_name(self.rank),
            "AIOPS_SEED": str(self.seed),
            "AIOPS_RESTARTS": str(self.restarts),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_workers),
        }


@value
class Team:
    """The workers of a job, as far as they have the same.

    Attributes
    ----------
    workers, local_workers
        How many there are, and how many of them on this machine; ranks from 0 are here.
    restarts
        How often another launcher has started the job before.
    seed, threads
        As `Place`'s.
    """

    workers: int
    local_workers: int
    restarts: int
    seed: int
    threads: int

    def place(self, rank: int, restarts: int, url: str, local_rank: int | None = None) -> Place:
        """Return the place of one; ``local_rank``: its rank by default."""
        return Place(
            *(rank, self.workers, rank if local_rank is None else local_rank, self.local_workers),
            *(self.restarts + restarts, url, self.seed, self.threads),
        )


def server_command(flags: Sequence[str], port: int | None) -> list[str]:
    """Return the command line of the job's server; ``port``: of an earlier one, None: any."""
    if port is not None:
        flags = [*flags, f"--port={port}"]
    elif not any(flag.partition("=")[0] == "--port" for flag in flags):
        flags = [*flags, "--port=0"]
    return [sys.executable, "-m", "aiops.server", *flags]
