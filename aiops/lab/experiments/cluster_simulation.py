"""A simulation's settings run on a cluster in virtual time instead of in an order of turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiops.lab.experiments.planned_run import Result, Tell
from aiops.lab.workloads import PerceptronWorkload
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Computing, LogNormal
from aiops.sim.cluster.result import ClusterResult
from aiops.sim.cluster.run import Progress, simulate
from aiops.sim.cluster.spec import Cluster, StarTopology
from aiops.sim.turns.simulation import Simulation

_TELL_EVERY = 50  # mini-batches


@dataclass(frozen=True)
class ClusterSimulation:
    """Real workers and a real server, on simulated machines.

    Attributes
    ----------
    simulation
        What is run; its selection, order and initial weights have no meaning here, and its samples
        are evenly spread over the time that workers need that never wait.
    median
        Seconds that half of all mini-batches take less than.
    sigma
        Standard deviation of their times' logarithm: 0.05 is nearly constant.
    links
        How workers and server are connected; default: at once, and without limits.
    """

    simulation: Simulation
    median: float = 0.1
    sigma: float = 0.05
    links: StarTopology = field(default_factory=StarTopology)

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        run = self.simulation
        server = Config(
            policy=run.policy,
            lr=run.lr,
            set=list(run.set),
            gate=run.gate,
            recall=run.recall,
            push_codec=list(run.push_codec),
            fetch_codec=list(run.fetch_codec),
            fetch_lag=run.fetch_lag,
            kernels=run.kernels,
        )
        computing = LogNormal(self.median, self.sigma)
        return training_cluster(run, server, computing, self.links, self.median)

    def __call__(self, tell: Tell) -> Result:
        """Run it.

        The result's ``seconds`` are virtual; ``idle`` is the share of their time that the workers
        waited, and ``refused`` the share of all computed gradients that had to be computed again.
        ``error`` is of the data set's test part.
        """
        return outcome_result(simulate(self.cluster, sparse_progress(tell)))


def training_cluster(
    run: Simulation, server: Config, computing: Computing, links: StarTopology, median: float
) -> Cluster:
    """Return a cluster that trains a simulation's perceptron.

    Its samples are evenly spread over the time that its mini-batches take if each takes ``median``
    seconds and no worker waits.
    """
    seconds = run.iterations / run.clients * median
    return Cluster(
        server=server,
        workers=run.clients,
        workload=PerceptronWorkload(run.dataset, (run.hidden,), run.batch_size),
        computing=computing,
        links=links,
        gradients=run.iterations,
        every=seconds / run.samples if run.samples else None,
        seed=run.seed,
    )


def sparse_progress(tell: Tell) -> Progress:
    """Return a progress callback that calls ``tell`` at every fiftieth mini-batch only."""
    return lambda done, _seconds: None if done % _TELL_EVERY else tell(done)


def outcome_result(found: ClusterResult) -> dict[str, Any]:
    """Return an outcome in virtual time as JSON has it."""
    again = sum(worker.recomputed for worker in found.workers)
    curve = [
        {
            "iteration": sample.gradients,
            "seconds": sample.seconds,
            "version": sample.version,
            "bytes": sample.nbytes,
            "cost": sample.loss,
            "error": 1 - sample.accuracy,
        }
        for sample in found.samples
    ]
    return {
        "digest": found.digest,
        "diverged": None,
        "seconds": found.seconds,
        "idle": found.idle,
        "refused": again / max(again + found.gradients, 1),
        "mean_staleness": found.mean_staleness,
        "staleness": dict(found.staleness),
        "curve": curve,
    }
