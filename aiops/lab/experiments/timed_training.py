"""Training for a stated time on simulated machines: a real server and real workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiops.errors import UsageError, nearest
from aiops.lab.experiments.cluster_simulation import outcome_result, sparse_progress
from aiops.lab.experiments.execution import NETWORKS, TorchSimulation, network_task
from aiops.lab.experiments.planned_run import OnProgress, Result
from aiops.lab.workloads.tasks import TaskWorkload
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Computing, LogNormal, Straggler
from aiops.sim.cluster.run import simulate
from aiops.sim.cluster.spec import Cluster, StarTopology
from aiops.sim.turns.task import Task


@dataclass(frozen=True)
class TimedTraining(TorchSimulation):
    """Training until a stated time, on simulated machines, of a network on real data.

    Attributes
    ----------
    simulation
        Policy, settings, codecs, clients, mini-batches, samples and seed. Its ``iterations`` are
        those that all clients together would do in the time if they never waited.
    network
        One of `NETWORKS`; for the perceptron ``simulation`` has the data set and the hidden units.
    in_seconds
        More settings of the policy, those whose unit is seconds: turns have none.
    median, sigma
        Of the log-normal times of mini-batches: seconds, and the standard deviation of their
        logarithm.
    beside
        What a worker computes beside the gradient, as a share of its time.
    times
        How many times as long the first worker takes; 1: it is like the others.
    links
        How workers and server are connected.
    overlap
        Exchanges that a worker has under way while it computes.

    Raises
    ------
    UsageError
        When there is no such network.
    """

    network: str = "perceptron"
    in_seconds: tuple[str, ...] = ()
    median: float = 0.05
    sigma: float = 0.1
    beside: float = 0.0
    times: float = 1.0
    links: StarTopology = field(default_factory=StarTopology)
    overlap: int = 0

    def __post_init__(self) -> None:
        """Check the network's name."""
        if self.network not in NETWORKS:
            known = nearest(self.network, NETWORKS)
            raise UsageError(f"no network is called {self.network!r}; {known}")

    @property
    def task(self) -> Task:
        """The network on its data, which all runs of a process share."""
        return network_task(self.network, self.simulation)

    @property
    def seconds(self) -> float:
        """The time that there is."""
        return self.simulation.iterations / self.simulation.clients * self.median

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        run = self.simulation
        server = Config(
            policy=run.policy,
            lr=run.lr,
            set=[*run.set, *self.in_seconds],
            push_codec=list(run.push_codec),
            fetch_codec=list(run.fetch_codec),
            kernels=run.kernels,
        )
        computing: Computing = LogNormal(self.median * (1 + self.beside), self.sigma)
        if self.times > 1:
            computing = Straggler(computing, self.times)
        return Cluster(
            server=server,
            workers=run.clients,
            workload=TaskWorkload(self.task, run.batch_size),
            computing=computing,
            links=self.links,
            seconds=self.seconds,
            every=self.seconds / run.samples if run.samples else None,
            overlap=self.overlap,
            seed=run.seed,
        )

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it; ``steps`` are each worker's mini-batches, ``error`` and ``cost`` of the test."""
        found = simulate(self.cluster, sparse_progress(on_progress))
        return {**outcome_result(found), "steps": [worker.steps for worker in found.workers]}
