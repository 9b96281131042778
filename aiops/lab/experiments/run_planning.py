"""The runs that an experiment will need: checks before they start, their time and their memory."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from aiops.lab.experiments.execution import (
    TorchSimulation,
    TransformerStraggler,
    task_of,
)
from aiops.lab.experiments.experiment import Experiment, Scale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Runs, unique
from aiops.sim.turns.client_selection import selection
from aiops.sim.turns.run import Run
from aiops.sim.turns.task import Batches

_BESIDE = 300_000_000  # bytes: the data set, the interpreter
_BESIDE_TORCH = 2_000_000_000  # bytes: CIFAR-10 while it is read, PyTorch
_PROBED = 150  # iterations by which a speed is found, at most
_ENOUGH = 0.2  # seconds that these take, at least, if they are fewer
_PROBED_CLIENTS = 16
_DAWN = 2.0  # seconds until a process has imported everything


class AssumedRuns(Runs):
    """Runs as if all were finished: an experiment that is shown it names all that it will want.

    Parameters
    ----------
    runs
        Those that are finished indeed.
    """

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self._real = runs

    def find(self, case: PlannedRun) -> FinishedRun:
        """Return a run, made up if it has to be."""
        return self._real.find(case) or FinishedRun(case, _made_up(case))


def _made_up(case: PlannedRun) -> dict[str, object]:
    """Return a result whose figures mean nothing, and differ from run to run."""
    steps = case.simulation.iterations
    error = zlib.crc32(case.name.encode()) / 2**32
    same = {"error": error, "cost": error, "vbar": 0.01}
    counted = ("version", "pushes", "fetches", "pushed", "fetched")
    curve = [
        {"iteration": n, **same, **dict.fromkeys(counted, n // 2)} for n in (0, steps // 2, steps)
    ]
    return {"curve": curve, "diverged": None, "digest": "", "staleness": {"0": steps}}


def planned(experiment: Experiment, scale: Scale, runs: Runs) -> list[PlannedRun]:
    """Return all runs that will be wanted, those that depend on others' results by a guess."""
    return unique(experiment.cases(scale, AssumedRuns(runs)))


def check(cases: Iterable[PlannedRun]) -> None:
    """Check that the runs can be made, before any of them starts.

    Raises
    ------
    AiopsError
        When settings cannot work, or a data set is missing.
    """
    kinds = {replace(case.simulation, seed=0, lr=None): case.work for case in cases}
    for run, work in kinds.items():
        run.engine()
        selection(run.selection, run.clients, run.seed)
        Batches(task_of(work).examples, run.batch_size, 0, run.order)


def memory(case: PlannedRun) -> int:
    """Return about how many bytes a run needs: a client holds one version at most."""
    run = case.simulation
    size = sum(array.nbytes for array in task_of(case.work).initial(0).values())
    in_torch = isinstance(case.work, TorchSimulation | TransformerStraggler)
    beside = _BESIDE_TORCH if in_torch else _BESIDE
    return min(run.clients, run.iterations) * size + beside


def weight(case: PlannedRun) -> float:
    """Return about how much work a run is: iterations, those with large mini-batches for more."""
    run = case.simulation
    return run.iterations * (1 + run.batch_size / 24)


@dataclass(frozen=True)
class Speed:
    """The speed of one kind of run: seconds of an iteration, and of a validation."""

    iteration: float
    validation: float


def probe(case: PlannedRun) -> Speed:
    """Measure the speed of such runs, here and now; takes some tenths of a second.

    That, or two iterations and a validation where these take longer.
    """
    run, task = case.simulation, task_of(case.work)
    clients = min(run.clients, _PROBED_CLIENTS)
    few = replace(run, gate="", clients=clients, samples=0, set=())
    iterations, known = 2, False
    while True:
        with Run(replace(few, iterations=iterations), task) as initialized:
            took = initialized.execute().seconds
            if known and (took >= _ENOUGH or iterations == _PROBED):
                start = time.perf_counter()
                task.validate(initialized.dispatcher.model)
                return Speed(took / iterations, time.perf_counter() - start)
        known = True  # the first made ready what is made once
        wanted = math.ceil(1.5 * _ENOUGH * iterations / max(took, 1e-6))
        iterations = min(_PROBED, max(iterations, wanted))


def seconds(cases: Iterable[PlannedRun], jobs: int) -> float:
    """Return about how many seconds the runs take with ``jobs`` processes, at the present speed."""
    speeds: dict[tuple[object, ...], Speed] = {}
    whole, longest = 0.0, 0.0
    for case in cases:
        run = case.simulation
        kind = run.policy, run.dataset, run.hidden, run.batch_size, type(case.work)
        if kind not in speeds:
            speeds[kind] = probe(case)
        speed = speeds[kind]
        took = run.iterations * speed.iteration + (run.samples + 2) * speed.validation
        whole, longest = whole + took, max(longest, took)
    return max(whole / jobs, longest) + _DAWN
