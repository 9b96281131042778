"""The tasks of `one_rule`, and the measure by which rules are compared on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.execution import (
    ConvNetSimulation,
    LSTMSimulation,
    ResNetSimulation,
    TablesSimulation,
    TransformerSimulation,
)
from aiops.lab.experiments.planned_run import RunWork
from aiops.lab.experiments.runs import FinishedRun, Group
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True)
class Measure:
    """A figure of a run's end by which rules are compared; less is better.

    Attributes
    ----------
    name, unit
        Its name in the samples, and the unit in words.
    times
        What a sample's figure is multiplied by.
    level
        Differences up to this are none.
    """

    name: str
    unit: str
    times: float
    level: float

    def of(self, run: FinishedRun) -> float:
        """Return it; infinite if the run diverged."""
        return self.times * run.end(self.name)

    def mean(self, group: Group) -> float:
        """Return the mean of some runs."""
        return fmean(map(self.of, group))


@dataclass(frozen=True)
class LearnedTask:
    """A task, how long it is learnt, and the middles of the rates that are tried.

    Attributes
    ----------
    base
        The simulation of which all others are variations; its batch size is µ.
    workers
        One panel's each.
    measure
        By which rules are compared.
    middles
        The middle of the learning rates that are tried, by the rule's optimiser: from a few tries
        with seeds that are not reported, so that the best rate is among them. That of ``ours``
        is the default rate if it is not named.
    work
        From a simulation to the run with this task.
    product
        µλ, if each number of workers has a µ of its own: at least 1. 0: all have the base's.
    """

    base: Simulation
    workers: tuple[int, ...]
    measure: Measure
    middles: Mapping[str, float]
    work: Callable[[Simulation], RunWork] = lambda simulation: simulation
    product: int = 0

    def batch_size(self, workers: int) -> int:
        """Return µ."""
        return max(1, self.product // workers) if self.product else self.base.batch_size


_COST = Measure("cost", "nats", 1.0, 0.02)
_ERROR = Measure("error", "% wrong", 100.0, 0.5)

_USUAL = {"adamw": 0.003, "momentum": 0.03, "sgd": 0.1, "fasgd": 0.01, "gradients": 0.005}
_OF_TEXT = {**_USUAL, "adamw": 0.002, "sgd": 0.3, "gradients": 0.002}
_OF_LSTM = {
    "adamw": 0.015,
    "momentum": 0.5,
    "sgd": 3.0,
    "fasgd": 0.1,
    "gradients": 0.03,
    "ours": 0.024,
}
_TEXT = Simulation(dataset="help", batch_size=16, iterations=600, samples=4)


_OF_MNIST = LearnedTask(
    Simulation(dataset="mnist", hidden=200, iterations=4000, samples=5),
    (4, 32, 256),
    Measure("error", "% wrong", 100.0, 0.2),
    {"adamw": 0.005, "momentum": 0.12, "sgd": 0.15, "fasgd": 0.02, "gradients": 0.01},
    product=128,
)


def _larger(simulation: Simulation) -> RunWork:
    return TransformerSimulation(simulation, width=128, blocks=4, context=128)


def _convolved(simulation: Simulation) -> RunWork:
    return ConvNetSimulation(simulation, tested=2000)


def _residual(simulation: Simulation) -> RunWork:
    return ResNetSimulation(simulation, tested=2000)


_OF_IMAGES = LearnedTask(
    Simulation(dataset="cifar10", batch_size=16, iterations=400, samples=2),
    (1, 4, 16),
    Measure("error", "% wrong", 100.0, 1.0),
    {**_USUAL, "fasgd": 0.001, "gradients": 0.003},
    _convolved,
)
_OF_TRANSFORMER = LearnedTask(_TEXT, (1, 4, 16), _COST, _OF_TEXT, TransformerSimulation)


TASKS: Mapping[str, LearnedTask] = {
    "digits": LearnedTask(
        Simulation(dataset="digits", hidden=32, batch_size=16, iterations=600, samples=4),
        (1, 4, 16),
        _ERROR,
        {**_USUAL, "adamw": 0.01, "gradients": 0.01},
    ),
    "transformer": _OF_TRANSFORMER,
    "crowd": replace(_OF_TRANSFORMER, base=replace(_TEXT, iterations=1600), workers=(64,)),
    "large": LearnedTask(
        replace(_TEXT, batch_size=8), (1, 8), _COST, {**_OF_TEXT, "adamw": 0.001}, _larger
    ),
    "lstm": LearnedTask(_TEXT, (1, 4, 16), _COST, _OF_LSTM, LSTMSimulation),
    "mnist": _OF_MNIST,
    "many": replace(_OF_MNIST, base=replace(_OF_MNIST.base, iterations=20000), workers=(1000,)),
    "cifar10": _OF_IMAGES,
    "resnet": replace(_OF_IMAGES, base=replace(_OF_IMAGES.base, iterations=600), work=_residual),
    "tables": LearnedTask(
        Simulation(dataset="clicks", batch_size=128, iterations=1000, samples=5),
        (1, 4, 16),
        replace(_COST, level=0.003),
        {"adamw": 0.02, "momentum": 0.06, "sgd": 0.5, "fasgd": 0.05, "gradients": 0.01},
        TablesSimulation,
    ),
}
"""By name. ``digits`` is --quick's."""

DEFAULT = "transformer"
OF_FULL = (DEFAULT, *(name for name in TASKS if name not in (DEFAULT, "digits")))
