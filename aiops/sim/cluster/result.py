"""The result of a simulated cluster, and the digest by which two results are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiops.model.layout import Array


@dataclass(frozen=True)
class ClusterSample:
    """One test of the parameters on the way.

    Attributes
    ----------
    seconds
        Virtual, since training began.
    gradients, version
        Mini-batches computed so far, and updates made.
    nbytes
        Bytes that crossed the network so far, both ways.
    loss, accuracy
        On the test set.
    """

    seconds: float
    gradients: int
    version: int
    nbytes: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class WorkerUsage:
    """One worker's time and traffic.

    Attributes
    ----------
    steps, recomputed
        Mini-batches, and gradients that were computed again for the policy.
    compute, idle
        Virtual seconds spent on computing, and on waiting for the server.
    bytes_in, bytes_out
        Bytes that it received and sent.
    """

    steps: int
    recomputed: int
    compute: float
    idle: float
    bytes_in: int
    bytes_out: int

    @property
    def idle_share(self) -> float:
        """The share of its time that it waited: 0 to 1."""
        whole = self.compute + self.idle
        return self.idle / whole if whole else 0.0


@dataclass(frozen=True)
class ClusterResult:
    """The result of a run.

    Attributes
    ----------
    seconds
        Virtual seconds from the moment at which all first workers were connected to the end of the
        last one.
    gradients, version
        Mini-batches computed, and updates made.
    staleness
        The number of gradients by their staleness, in versions.
    workers
        Time and traffic of each worker, by number.
    params
        The server's parameters in the end, by name; with the policy ``average``, which leaves them
        to the workers, the mean of those of all living workers.
    samples
        Tests on the way.
    messages
        Writes that crossed the network.
    report
        The server's statistics (``aiops stats``).
    digest
        Of parameters, version and ledger: equal for equal runs.
    complete
        Whether the run ended by itself, and was not stopped.
    """

    seconds: float
    gradients: int
    version: int
    staleness: Mapping[int, int]
    workers: tuple[WorkerUsage, ...] = field(repr=False)
    params: Mapping[str, Array] = field(repr=False)
    samples: tuple[ClusterSample, ...] = field(repr=False)
    messages: int
    report: Mapping[str, Any] = field(repr=False)
    digest: str
    complete: bool

    @property
    def idle(self) -> float:
        """The share of their time that all workers together waited."""
        whole = sum(worker.compute + worker.idle for worker in self.workers)
        return sum(worker.idle for worker in self.workers) / whole if whole else 0.0

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that the workers sent, and that they received."""
        sent = sum(worker.bytes_out for worker in self.workers)
        return sent, sum(worker.bytes_in for worker in self.workers)

    @property
    def mean_staleness(self) -> float:
        """The mean of `staleness`, in versions."""
        used = sum(self.staleness.values())
        return sum(tau * count for tau, count in self.staleness.items()) / used if used else 0.0


def digest_of(params: Mapping[str, Array], version: int, ledger: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of parameters, version and ledger."""
    digest = hashlib.sha256()
    for name, array in params.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(json.dumps([version, ledger], sort_keys=True).encode())
    return digest.hexdigest()
