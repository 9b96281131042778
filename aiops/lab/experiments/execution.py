"""The execution of one run of an experiment in a process, and the tasks that runs train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from aiops.common.jsonable import plain
from aiops.errors import UsageError, nearest
from aiops.lab.experiments.cluster_simulation import StragglerSimulation
from aiops.lab.experiments.planned_run import OnProgress, Result, RunWork
from aiops.lab.workloads import PerceptronTask
from aiops.lab.workloads.tasks import TaskWorkload
from aiops.model.layout import Array
from aiops.sim.turns.result import SimulationResult
from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation
from aiops.sim.turns.task import Task

INITIAL = ("he", "glorot", "small", "unit")
PERCEPTRON, CONVNET, TRANSFORMER = NETWORKS = ("perceptron", "convnet", "transformer")


@lru_cache(maxsize=2)
def perceptron(dataset: str, hidden: int) -> PerceptronTask:
    """Return the task of a simulation, which all runs of a process share."""
    return PerceptronTask(dataset, hidden)


@dataclass(frozen=True)
class TaskSimulation(ABC):
    """A simulation of another task than the perceptron.

    Attributes
    ----------
    simulation
        What is run.
    """

    simulation: Simulation

    @property
    @abstractmethod
    def task(self) -> Task:
        """The task, of which all runs of a process share what they can."""

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        return simulated(self.simulation, self.task, on_progress)


class TorchSimulation(TaskSimulation):
    """One whose task PyTorch computes (`aiops.lab.experiments.torch_task`)."""


@dataclass(frozen=True)
class ConvNetSimulation(TorchSimulation):
    """A simulation of the softsync paper's convolutional network, in PyTorch.

    Attributes
    ----------
    simulation
        What is run; its ``hidden`` has no meaning here.
    weight_decay
        Times the weights (not the biases), added to the gradient.
    tested
        Images of the test part that are validated, from its first; None: all.
    """

    weight_decay: float = 0.004
    tested: int | None = None

    @property
    def task(self) -> Task:
        """The network on the simulation's data, which all runs of a process share."""
        return _convnet(self.simulation.dataset, self.weight_decay, self.tested)


@lru_cache(maxsize=1)
def _convnet(dataset: str, weight_decay: float, tested: int | None) -> Task:
    with _pytorch("the convolutional network"):
        from aiops.lab.experiments.convnet import ConvNet

        return ConvNet(dataset, weight_decay, tested)


@dataclass(frozen=True)
class ResNetSimulation(TorchSimulation):
    """A simulation of a small residual network (`aiops.lab.experiments.resnet`), in PyTorch.

    Attributes
    ----------
    simulation, weight_decay, tested
        As `ConvNetSimulation`'s.
    """

    weight_decay: float = 0.0005
    tested: int | None = None

    @property
    def task(self) -> Task:
        """The network on the simulation's data, which all runs of a process share."""
        return _resnet(self.simulation.dataset, self.weight_decay, self.tested)


@lru_cache(maxsize=1)
def _resnet(dataset: str, weight_decay: float, tested: int | None) -> Task:
    with _pytorch("the residual network"):
        from aiops.lab.experiments.resnet import ResNet

        return ResNet(dataset, weight_decay, tested)


@dataclass(frozen=True)
class TransformerSimulation(TorchSimulation):
    """A simulation of a small transformer (`aiops.lab.experiments.gpt`), in PyTorch.

    Attributes
    ----------
    simulation
        What is run; its ``dataset`` and ``hidden`` have no meaning here.
    width, blocks, context
        The transformer's.
    """

    width: int = 64
    blocks: int = 3
    context: int = 64

    @property
    def task(self) -> Task:
        """The transformer, which all runs of a process share."""
        return _transformer(self.width, self.blocks, self.context)


@lru_cache(maxsize=1)
def _transformer(width: int, blocks: int, context: int) -> Task:
    with _pytorch("the transformer"):
        from aiops.lab.experiments.gpt import ByteGPT

        return ByteGPT(width, blocks, context)


@dataclass(frozen=True)
class LSTMSimulation(TorchSimulation):
    """A simulation of a small LSTM (`aiops.lab.experiments.lstm`), in PyTorch.

    Attributes
    ----------
    simulation
        What is run; its ``dataset`` and ``hidden`` have no meaning here.
    width, units, context
        The network's.
    """

    width: int = 32
    units: int = 96
    context: int = 32

    @property
    def task(self) -> Task:
        """The network, which all runs of a process share."""
        return _lstm(self.width, self.units, self.context)


@lru_cache(maxsize=1)
def _lstm(width: int, units: int, context: int) -> Task:
    with _pytorch("the LSTM"):
        from aiops.lab.experiments.lstm import ByteLSTM

        return ByteLSTM(width, units, context)


@dataclass(frozen=True)
class TablesSimulation(TorchSimulation):
    """A simulation of a small recommender (`aiops.lab.experiments.click_tables`), in PyTorch.

    Attributes
    ----------
    simulation
        What is run; its ``dataset`` and ``hidden`` have no meaning here.
    """

    @property
    def task(self) -> Task:
        """The recommender and its clicks, which all runs of a process share."""
        return _tables()


@lru_cache(maxsize=1)
def _tables() -> Task:
    with _pytorch("the recommender"):
        from aiops.lab.experiments.click_tables import ClickTables

        return ClickTables()


@contextmanager
def _pytorch(what: str) -> Iterator[None]:
    """Import PyTorch within this, or say what needs it."""
    try:
        import torch

        torch.set_num_threads(1)  # sums in another order would be other sums
        yield
    except ImportError:
        raise UsageError(
            f"{what} needs PyTorch, which is not here: pip install 'aiops-ps[torch]'"
        ) from None


@dataclass(frozen=True)
class TransformerStraggler(StragglerSimulation):
    """One of the small transformer; of its task, data set and hidden units have no meaning."""

    @property
    def workload(self) -> TaskWorkload:
        """The workload of its workers, which all runs of a process share."""
        return TaskWorkload(TransformerSimulation(self.task).task, self.task.batch_size)


@dataclass(frozen=True)
class TransformerAverage(TransformerStraggler):
    """One whose workers have AdamW in their training loops, of which the policy knows nothing."""

    @property
    def workload(self) -> TaskWorkload:
        """The workload of its workers: their gradients are AdamW's steps at the rate 1."""
        from aiops.lab.experiments.adamw_workload import AdamWWorkload

        plain = super().workload
        return AdamWWorkload(plain.task, plain.batch_size)


def network_task(network: str, simulation: Simulation) -> Task:
    """Return a network on its data, which all runs of a process share.

    For the perceptron the simulation has the data set and the hidden units, for the convolutional
    network the data set.

    Raises
    ------
    UsageError
        When there is no such network.
    """
    if network == TRANSFORMER:
        return TransformerSimulation(simulation).task
    if network == CONVNET:
        return ConvNetSimulation(simulation).task
    if network != PERCEPTRON:
        raise UsageError(f"no network is called {network!r}; {nearest(network, NETWORKS)}")
    return perceptron(simulation.dataset, simulation.hidden)


def task_of(work: RunWork) -> Task:
    """Return the task of a piece of work; by default the perceptron of its simulation."""
    if isinstance(work, TaskSimulation):
        return work.task
    if isinstance(work, TransformerStraggler):
        return work.workload.task
    run = work if isinstance(work, Simulation) else work.simulation
    return perceptron(run.dataset, run.hidden)


def carry_out(work: RunWork, on_progress: OnProgress) -> Result:
    """Do a piece of work; return what it came to, as JSON has it."""
    if isinstance(work, Simulation):
        return simulated(work, perceptron(work.dataset, work.hidden), on_progress)
    found: Result = plain(work(on_progress))
    return found


def simulated(simulation: Simulation, task: Task, on_progress: OnProgress) -> Result:
    """Run a simulation; one that diverges is a result as well."""
    with Run(simulation, task) as run:
        return reported(run.execute(on_progress))


def reported(outcome: SimulationResult) -> Result:
    """Return an outcome as JSON has it, without the settings, which are known."""
    report = outcome.report()
    del report["simulation"]
    found: Result = plain(report)
    return found


@dataclass(frozen=True)
class InitializedSimulation(TaskSimulation):
    """A simulation from other initial weights than He's: the paper does not state its own.

    Attributes
    ----------
    simulation
        What is run.
    initial
        ``glorot``: uniform in ±sqrt(6 / (inputs + outputs)), Theano's usual choice when the paper
        was written. ``small``: normal, of standard deviation 0.01. ``unit``: normal, of standard
        deviation 1, as in the code of FRED that its author published. Biases begin at 0.
    """

    initial: str

    def __post_init__(self) -> None:
        """Check the name."""
        if self.initial not in INITIAL:
            known = nearest(self.initial, INITIAL)
            raise UsageError(f"no initialisation is called {self.initial!r}; {known}")

    @property
    def task(self) -> Task:
        """The simulation's perceptron, but for its initial weights."""
        return _InitializedTask(
            perceptron(self.simulation.dataset, self.simulation.hidden), self.initial
        )


def initialized(simulation: Simulation, initial: str) -> RunWork:
    """Return the work of a simulation from such initial weights."""
    return simulation if initial == "he" else InitializedSimulation(simulation, initial)


_DEVIATIONS = {"small": 0.01, "unit": 1.0}


class _InitializedTask:
    """A perceptron, but for its initial weights."""

    def __init__(self, task: PerceptronTask, initial: str) -> None:
        self._task, self._initial = task, initial
        self.examples = task.examples
        self.gradient, self.validate = task.gradient, task.validate

    def initial(self, seed: int) -> Mapping[str, Array]:
        random, found = np.random.default_rng([seed, 3]), {}
        for name, shape in self._task.model.shapes.items():
            if len(shape) == 1:
                drawn = np.zeros(shape)
            elif self._initial == "glorot":
                bound = np.sqrt(6 / sum(shape))
                drawn = random.uniform(-bound, bound, shape)
            else:
                drawn = _DEVIATIONS[self._initial] * random.standard_normal(shape)
            found[name] = drawn.astype(self._task.model.dtype)
        return found
