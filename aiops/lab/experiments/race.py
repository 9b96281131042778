"""A policy among others on one cluster in virtual time, with a straggler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from aiops.lab.experiments.case import Result, Tell
from aiops.lab.experiments.figure import Line
from aiops.lab.experiments.intime import now_and_then, timed
from aiops.lab.experiments.runs import Finished
from aiops.lab.workloads import PerceptronWorkload
from aiops.serving.config import Config
from aiops.sim.cluster.computing import Computing, LogNormal, Straggler
from aiops.sim.cluster.course import simulate
from aiops.sim.cluster.members import AveragingWorker, member
from aiops.sim.cluster.spec import Cluster, Links
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True)
class Race:
    """Real workers and a real server, on simulated machines of which one is slower.

    Attributes
    ----------
    task
        What is trained: its data set, model, mini-batches, workers, iterations, samples and seed.
    policy, settings
        Who trains it, by what learning rate and further settings (``key=value``).
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
    links: Links = field(default_factory=Links)

    @property
    def simulation(self) -> Simulation:
        """It in turns, by which its time is estimated; who averages is taken for plain SGD."""
        if member(self._server) is AveragingWorker:
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
        run = self.task
        computing: Computing = LogNormal(self.median, self.sigma)
        seconds = run.iterations / run.clients * self.median
        return Cluster(
            server=self._server,
            workers=run.clients,
            workload=PerceptronWorkload(run.dataset, (run.hidden,), run.batch_size),
            computing=Straggler(computing, self.times) if self.times > 1 else computing,
            links=self.links,
            gradients=run.iterations,
            every=seconds / run.samples if run.samples else None,
            seed=run.seed,
        )

    def __call__(self, tell: Tell) -> Result:
        """Run it; the result is `InTime`'s, with the mini-batches of each worker (``steps``)."""
        found = simulate(self.cluster, now_and_then(tell))
        return {**timed(found), "steps": [worker.steps for worker in found.workers]}


def reached(run: Finished, error: float) -> float:
    """Return after how many virtual seconds a test error was first seen; infinity if it was not."""
    times = zip(run.series("seconds"), run.series("error"), strict=True)
    return next((seconds for seconds, seen in times if seen <= error), math.inf)


def mean_reached(runs: Sequence[Finished], error: float) -> float:
    """Return the mean of `reached` over seeds; infinity if one of them never did."""
    return fmean(reached(run, error) for run in runs) if runs else math.inf


def over(label: str, runs: Sequence[Finished], x: str, points: int = 60) -> Line:
    """Return seeds' test errors (%) as one line over figures that differ between them.

    Parameters
    ----------
    label
        The line's.
    runs
        Of several seeds.
    x
        The name of a figure that grows: ``seconds``, ``bytes``.
    points
        At how many places, evenly spread as far as the shortest run goes.
    """
    if not runs:
        return Line(label, [], [])
    begin = max(run.series(x)[0] for run in runs)
    end = min(run.series(x)[-1] for run in runs)
    places = np.linspace(begin, end, points)
    ys = [100 * np.interp(places, run.series(x), run.series("error")) for run in runs]
    return Line(label, places.tolist(), [y.tolist() for y in ys])
