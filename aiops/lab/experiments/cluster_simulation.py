"""Runs on a cluster in virtual time: of a simulation, beside a straggler, of throughput alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from aiops.bandwidth.units import parse_rate
from aiops.lab.experiments.planned_run import OnProgress, Result
from aiops.lab.experiments.runs import FinishedRun
from aiops.lab.workloads import PerceptronWorkload
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Computing, LogNormal, Straggler
from aiops.sim.cluster.result import ClusterResult
from aiops.sim.cluster.run import Progress, simulate
from aiops.sim.cluster.spec import Cluster, StarTopology
from aiops.sim.cluster.workers import AveragingWorker, worker_kind
from aiops.sim.cluster.workload import Deadweight, Workload
from aiops.sim.turns.simulation import Simulation

_PROGRESS_EVERY = 50  # mini-batches
_LIGHT = 400_000  # bytes: a model that is larger is simulated by a smaller one


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

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it.

        The result's ``seconds`` are virtual; ``idle`` is the share of their time that the workers
        waited, and ``refused`` the share of all computed gradients that had to be computed again.
        ``error`` is of the data set's test part.
        """
        return outcome_result(simulate(self.cluster, sparse_progress(on_progress)))


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
    push_codec, worker_budget
        As of the server's settings.
    """

    task: Simulation
    policy: str
    settings: tuple[str, ...] = ()
    times: float = 1.0
    median: float = 0.05
    sigma: float = 0.25
    links: StarTopology = field(default_factory=StarTopology)
    push_codec: tuple[str, ...] = ()
    worker_budget: str | None = None

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
            push_codec=list(self.push_codec),
            worker_budget=self.worker_budget,
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        computing: Computing = LogNormal(self.median, self.sigma)
        if self.times > 1:
            computing = Straggler(computing, self.times)
        task, server = self.task, self._server
        return training_cluster(task, server, computing, self.links, self.median, self.workload)

    @property
    def workload(self) -> Workload:
        """The workload of its workers."""
        return _perceptron(self.task)

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it; the result is `ClusterSimulation`'s, with each worker's ``steps``."""
        found = simulate(self.cluster, sparse_progress(on_progress))
        return {**outcome_result(found), "steps": [worker.steps for worker in found.workers]}


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
            None if given is None else parse_rate("a link's rate:", given) / factor
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

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it.

        ``speedup`` is how many workers' work is done, of workers that never wait: the time that all
        of them computed, in that of the run. ``idle`` is the share of their time that they waited.
        """
        found = simulate(self.cluster, sparse_progress(on_progress))
        speedup = sum(worker.compute for worker in found.workers) / found.seconds
        figures = {"speedup": speedup, "idle": found.idle, "tau": found.mean_staleness}
        end = {"iteration": found.gradients, "seconds": found.seconds, "version": found.version}
        return {
            "digest": found.digest,
            "diverged": None,
            "seconds": found.seconds,
            "curve": [{**end, **figures}],
        }


def _perceptron(run: Simulation) -> PerceptronWorkload:
    return PerceptronWorkload(run.dataset, (run.hidden,), run.batch_size)


def training_cluster(
    run: Simulation,
    server: Config,
    computing: Computing,
    links: StarTopology,
    median: float,
    workload: Workload | None = None,
) -> Cluster:
    """Return a cluster that trains a simulation's perceptron, or another workload.

    Its samples are evenly spread over the time that its mini-batches take if each takes ``median``
    seconds and no worker waits.
    """
    seconds = run.iterations / run.clients * median
    return Cluster(
        server=server,
        workers=run.clients,
        workload=workload or _perceptron(run),
        computing=computing,
        links=links,
        gradients=run.iterations,
        every=seconds / run.samples if run.samples else None,
        seed=run.seed,
    )


def sparse_progress(on_progress: OnProgress) -> Progress:
    """Return a progress callback that calls ``on_progress`` at every fiftieth mini-batch only."""
    return lambda done, _seconds: None if done % _PROGRESS_EVERY else on_progress(done)


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


def reached(run: FinishedRun, error: float) -> float:
    """Return after how many virtual seconds a test error was first seen; infinity if it was not."""
    times = zip(run.series("seconds"), run.series("error"), strict=True)
    return next((seconds for seconds, seen in times if seen <= error), math.inf)


def mean_reached(runs: Sequence[FinishedRun], error: float) -> float:
    """Return the mean of `reached` over seeds; infinity if one of them never did."""
    return fmean(reached(run, error) for run in runs) if runs else math.inf
