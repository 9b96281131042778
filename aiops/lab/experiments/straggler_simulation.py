"""A policy among others on one cluster in virtual time, with a straggler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from aiops.lab.experiments.cluster_simulation import (
    outcome_result,
    sparse_progress,
    training_cluster,
)
from aiops.lab.experiments.planned_run import Result, Tell
from aiops.lab.experiments.runs import FinishedRun
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Computing, LogNormal, Straggler
from aiops.sim.cluster.run import simulate
from aiops.sim.cluster.spec import Cluster, StarTopology
from aiops.sim.cluster.workers import AveragingWorker, worker_kind
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True)
class StragglerSimulation:
    """Real workers and a real server, on simulated machines of which one is slower.

    Attributes
    ----------
    task
        What is trained: its data set, model, mini-batches, workers, iterations, samples and seed.
    policy, settings
        The policy that trains it, and its settings, ``key=value``, the learning rate among them.
    times
        How many times as long the first worker takes for a mini-batch; 1: it is like the others.
    median, sigma
        Of the others' log-normal times: seconds, and the standard deviation of their logarithm.
    links
        How workers and server are connected.
    """

    task: Simulation
    policy: str
    settings: tuple[str, ...] = ()
    times: float = 1.0
    median: float = 0.05
    sigma: float = 0.25
    links: StarTopology = field(default_factory=StarTopology)

    @property
    def simulation(self) -> Simulation:
        """The same in turns, to estimate its time; averaging policies are taken for plain SGD."""
        if worker_kind(self._server) is AveragingWorker:
            return replace(self.task, policy="asgd", set=())
        return replace(self.task, policy=self.policy, set=self.settings)

    @property
    def _server(self) -> Config:
        return Config(
            policy=self.policy,
            set=list(self.settings),
            kernels=self.task.kernels,
            workers=self.task.clients,
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        computing: Computing = LogNormal(self.median, self.sigma)
        if self.times > 1:
            computing = Straggler(computing, self.times)
        return training_cluster(self.task, self._server, computing, self.links, self.median)

    def __call__(self, tell: Tell) -> Result:
        """Run it; the result is `ClusterSimulation`'s, with each worker's ``steps``."""
        found = simulate(self.cluster, sparse_progress(tell))
        return {**outcome_result(found), "steps": [worker.steps for worker in found.workers]}


def reached(run: FinishedRun, error: float) -> float:
    """Return after how many virtual seconds a test error was first seen; infinity if it was not."""
    times = zip(run.series("seconds"), run.series("error"), strict=True)
    return next((seconds for seconds, seen in times if seen <= error), math.inf)


def mean_reached(runs: Sequence[FinishedRun], error: float) -> float:
    """Return the mean of `reached` over seeds; infinity if one of them never did."""
    return fmean(reached(run, error) for run in runs) if runs else math.inf
