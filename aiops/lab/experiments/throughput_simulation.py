"""The throughput of a cluster in virtual time, in mini-batches, independent of what it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aiops.bandwidth.units import parse_rate
from aiops.lab.experiments.cluster_simulation import sparse_progress
from aiops.lab.experiments.planned_run import Result, Tell
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import LogNormal
from aiops.sim.cluster.run import simulate
from aiops.sim.cluster.spec import Cluster, StarTopology
from aiops.sim.cluster.workload import Deadweight
from aiops.sim.turns.simulation import Simulation

_LIGHT = 400_000  # bytes: a model that is larger is simulated by a smaller one


@dataclass(frozen=True)
class ClusterMachines:
    """The machines, their network, and the model that crosses it.

    Attributes
    ----------
    nbytes
        Of the model, in float32.
    median, sigma
        Of the log-normal times of mini-batches: seconds that half of them take less than, and the
        standard deviation of their logarithm.
    links
        How workers and server are connected.
    apply_rate
        Bytes of parameters, state and gradient that the server reads and writes in a second while
        it updates them.
    """

    nbytes: int
    median: float
    sigma: float
    links: StarTopology
    apply_rate: float = math.inf

    @property
    def mean(self) -> float:
        """Seconds of a mini-batch, on average."""
        return self.median * math.exp(self.sigma**2 / 2)

    def light(self) -> ClusterMachines:
        """Return machines on which all takes as long, with a model small enough to simulate.

        Model and rates shrink by one factor, so that each message crosses in the same time, but
        for its header, which is then relatively larger: by some hundred bytes of a thousand times
        as many.
        """
        factor = max(self.nbytes / _LIGHT, 1.0)
        if factor == 1.0:
            return self
        worker, server = (
            None if (rate := parse_rate("a link's rate:", given)) is None else rate / factor
            for given in (self.links.worker, self.links.server)
        )
        return replace(
            self,
            nbytes=round(self.nbytes / factor),
            links=replace(self.links, worker=worker, server=server),
            apply_rate=self.apply_rate / factor,
        )


@dataclass(frozen=True)
class ThroughputSimulation:
    """Real workers and a real server on simulated machines; what they train has no meaning.

    Attributes
    ----------
    simulation
        Policy, settings, clients and seed; its ``iterations`` are those that all clients together
        would do if they never waited, and it ends when that time is over.
    machines
        What they run on.
    """

    simulation: Simulation
    machines: ClusterMachines

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        run, machines = self.simulation, self.machines.light()
        server = Config(policy=run.policy, lr=run.lr, set=list(run.set), kernels=run.kernels)
        return Cluster(
            server=server,
            workers=run.clients,
            workload=Deadweight(machines.nbytes),
            computing=LogNormal(machines.median, machines.sigma),
            links=machines.links,
            apply_rate=machines.apply_rate,
            seconds=run.iterations / run.clients * machines.mean,
            seed=run.seed,
        )

    def __call__(self, tell: Tell) -> Result:
        """Run it.

        ``speedup`` is how many workers' work is done, of workers that never wait: the time that all
        of them computed, in that of the run. ``idle`` is the share of their time that they waited.
        """
        found = simulate(self.cluster, sparse_progress(tell))
        speedup = sum(worker.compute for worker in found.workers) / found.seconds
        figures = {"speedup": speedup, "idle": found.idle, "tau": found.mean_staleness}
        end = {"iteration": found.gradients, "seconds": found.seconds, "version": found.version}
        return {
            "digest": found.digest,
            "diverged": None,
            "seconds": found.seconds,
            "curve": [{**end, **figures}],
        }
