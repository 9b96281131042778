"""MPI through mpi4py and Open MPI, in shared memory: one communicator, of which rank 0 serves.

An MPI process belongs to what mpirun has started, while ours are started, given orders and
killed by `benchmarks.peers.team`. So mpirun starts stand-ins. Each sends us the environment that
it was given, which says all that makes a process a rank, and waits for us to let go; our processes
take these environments over. (Processes that meet later, by spawn or by connect and accept, would
not do: Open MPI has those talk over TCP.)

The server posts a receive per worker and goes on with whichever comes first, in one thread. MPI
waits in a busy loop. To leave the processor to the other peers when it is their turn, the workers
tell that they rest, and the server then waits for a datagram.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd

SETTINGS: Mapping[str, Setting] = {
    "pml": "ob1",
    "btl": "self,vader",
    "btl_vader_single_copy_mechanism": "cma",
    "btl_vader_eager_limit": 16384,
    "btl_vader_max_send_size": 32768,
    "mpi_yield_when_idle": 1,
    "whole": False,
}
"""Open MPI's own parameters, and ``whole``: wait until an answer is sent before the next update.

Tried with Open MPI 4.1.4 on two busy cores. An eager limit of 16 KiB is a quarter quicker at 4 KiB
than the default, 4 KiB. Without CMA there are two copies instead of one: a third slower from 16 MiB
on. Not to yield is ruin where processes outnumber cores. UCX (``pml=ucx``) is up to half as quick
again until 64 KiB where they do not, and far slower where they do, for it does not yield."""
ENVIRONMENT: Mapping[str, str] = {"UCX_TLS": "posix,cma,self", "UCX_RNDV_THRESH": "2m"}

_PUSH, _REST, _END = 0, 1, 2
"""The tags of a worker's messages."""
_STOP_SECONDS = 20.0

_STAND_IN = """
import json, os, socket, sys
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
told = {k: v for k, v in os.environ.items() if k.startswith(("OMPI_", "PMIX_"))}
line.sendall(json.dumps(told).encode() + b"\\n")
line.recv(1)
"""


def missing() -> str | None:
    """Say so when Open MPI or mpi4py is not installed."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed; apt-get install openmpi-bin libopenmpi-dev"
    return lacks("mpi4py", "pip install mpi4py")


class Launch:
    """mpirun, its stand-ins, and what they were told.

    Attributes
    ----------
    told
        The environment of every rank.
    """

    def __init__(self, ranks: int, settings: Mapping[str, Setting]) -> None:
        parameters = {name: value for name, value in settings.items() if name != "whole"}
        parameters |= dict.fromkeys(("pml_ucx_tls", "pml_ucx_devices"), "any")
        # What it leaves behind when it is killed goes with the team's folder.
        folders = ("orte_tmpdir_base", "btl_vader_backing_directory")
        parameters |= dict.fromkeys(folders, tempfile.gettempdir())
        command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
        for name, value in parameters.items():
            command += ["--mca", name, str(value)]
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        with socket.create_server((HOST, 0), backlog=ranks) as listener:
            address, port = listener.getsockname()
            self._process = subprocess.Popen(
                [*command, sys.executable, "-I", "-S", "-c", _STAND_IN, address, str(port)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(root, "1")},
            )
            listener.settimeout(_STOP_SECONDS)
            self._lines = [listener.accept()[0] for _ in range(ranks)]
        told: list[dict[str, str]] = []
        for line in self._lines:
            with line.makefile() as file:
                told.append(json.loads(file.readline()))
        self.told = sorted(told, key=lambda rank: int(rank["OMPI_COMM_WORLD_RANK"]))

    def end(self) -> None:
        """Let the stand-ins go, and expect that mpirun has seen nothing amiss."""
        for line in self._lines:
            line.close()
        code = self._process.wait(_STOP_SECONDS)
        if code:
            raise RuntimeError(f"mpirun ended with exit code {code}, expected 0")


def become(told: Mapping[str, str]) -> Any:
    """Make this process the rank that a stand-in was told to be; return the module MPI."""
    os.environ.update(told)
    package: Any = importlib.import_module("mpi4py")
    package.rc.initialize = package.rc.finalize = False
    module: Any = importlib.import_module("mpi4py.MPI")
    module.Init_thread(module.THREAD_FUNNELED)  # one thread makes all calls
    return module


class Server:
    """Rank 0 in a thread, and the mpirun that all ranks belong to."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._theta: Array = np.zeros(job.elements, np.float32)
        self._sgd = load_sgd()
        self._launch = Launch(job.workers + 1, job.settings)
        self._bell = socket.socket(type=socket.SOCK_DGRAM)
        self._rung = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> str:
        """Serve; the address is where to ring, and what the workers' stand-ins were told."""
        self._bell.bind((HOST, 0))
        self._thread.start()
        return json.dumps([self._bell.getsockname()[1], self._launch.told[1:]])

    def _serve(self) -> None:
        # MPI starts together with the workers, and Python holds its lock meanwhile: not before they
        # have their address.
        self._sleep(0)
        mpi = become(self._launch.told[0])
        comm, status, wait = mpi.COMM_WORLD, mpi.Status(), mpi.Request.Waitany
        workers, whole = self._job.workers, bool(self._job.settings["whole"])
        pushed = np.empty((workers, self._job.elements), np.float32)
        theta = [self._theta, mpi.FLOAT]

        def receive(worker: int) -> Any:
            return comm.Irecv([pushed[worker], mpi.FLOAT], worker + 1)

        pushes = [receive(worker) for worker in range(workers)]
        answers = [mpi.REQUEST_NULL] * workers
        runs, resting, ended = 1, workers, 0
        while ended < workers:
            if resting == workers:
                self._sleep(runs)
                runs, resting = runs + 1, 0
            worker = wait(pushes, status)
            if status.tag == _PUSH:
                self._sgd(self._theta, pushed[worker])
                pushes[worker] = receive(worker)
                answers[worker].Wait()  # it has come, or there would be no push
                answers[worker] = comm.Isend(theta, worker + 1)
                if whole:
                    answers[worker].Wait()
            elif status.tag == _REST:
                resting += 1
                pushes[worker] = receive(worker)
            else:
                ended += 1
        mpi.Request.Waitall(answers)
        mpi.Finalize()

    def _sleep(self, runs: int) -> None:
        """Wait for the ring that begins the next run; joining is the first ring."""
        while self._rung <= runs * self._job.workers:
            self._bell.recv(1)
            self._rung += 1

    def parameters(self) -> Array:
        """Return the array itself."""
        return self._theta

    def close(self) -> None:
        """Expect that all ranks have ended, and mpirun with them."""
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError("the ranks have not all called MPI_Finalize")
        self._launch.end()


class Worker:
    """One of the other ranks."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        self.params: Array = np.zeros(job.elements, np.float32)
        port, told = json.loads(address)
        self._bell = socket.socket(type=socket.SOCK_DGRAM)
        self._bell.connect((HOST, port))
        self.wake()
        self._mpi = become(told[index])
        self._out = [gradient(job.elements), self._mpi.FLOAT]
        self._into = [self.params, self._mpi.FLOAT]
        self._comm = self._mpi.COMM_WORLD

    def cycle(self) -> None:
        """Send the gradient to rank 0, and have the parameters received meanwhile."""
        self._comm.Sendrecv(self._out, 0, _PUSH, self._into, 0)

    def wake(self) -> None:
        """Ring at the server."""
        self._bell.send(b"!")

    def rest(self) -> None:
        """Tell the server."""
        self._tell(_REST)

    def _tell(self, tag: int) -> None:
        self._comm.Send([None, 0, self._mpi.FLOAT], 0, tag)

    def close(self) -> None:
        """Tell the server, and leave together with it."""
        self.wake()
        self._tell(_END)
        self._mpi.Finalize()
