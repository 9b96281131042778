"""A worker of the benchmark: ``python -m benchmarks.algorithms.worker TASK``.

TASK is an `AlgorithmTask` as JSON. The worker reports ``{"steps": 100}`` now and then (with
``"snapshot"``, a file, where it has a model of its own), and at the end a `AlgorithmReport`
(`aiops.lab.training_worker`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import aiops
from aiops.lab.training_worker import BatchGradients, Ready, mapped, run, send_line
from aiops.lab.workloads import MLP, batches

Compute = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Parameters → gradients."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmTask:
    """The task of one worker.

    ``steps`` or ``seconds`` say when to stop, 0 does not; the first ``warmup`` of those do not
    count. A gradient takes ``pace`` seconds, or as long as it takes. With ``averaging`` the worker
    has a model of its own, of which it leaves ``looks`` snapshots in ``snapshots``, if that names a
    folder.
    """

    url: str
    index: int
    workers: int
    sizes: Sequence[int]
    data: str
    batch_size: int
    seed: int
    steps: int = 0
    seconds: float = 0.0
    warmup: float = 0.0
    pace: float = 0.0
    averaging: bool = False
    snapshots: str = ""
    looks: int = 0


@dataclass(frozen=True, kw_only=True)
class AlgorithmReport:
    """The report of one worker, of the time that counts, but for ``sent`` and ``received``.

    ``idle`` are the seconds that its training loop waited; the two byte counts are of the wire.
    """

    steps: int
    seconds: float
    idle: float
    recomputed: int
    sent: int
    received: int


class Trainee(Protocol):
    """A worker of either kind."""

    def step(self, compute: Compute) -> None:
        """Take a step with the gradient that a function of the parameters returns."""

    def idle(self) -> float:
        """Return the seconds that its steps have waited so far."""

    def recomputed(self) -> int:
        """Return how many gradients were computed in vain."""

    def model(self) -> Mapping[str, Any] | None:
        """Return a copy of the model, where it is the worker's own."""

    def finish(self) -> tuple[int, int]:
        """Say goodbye; return the bytes received and sent."""


class PushingTrainee:
    """A worker of a parameter server."""

    def __init__(self, task: AlgorithmTask, params: Mapping[str, Any]) -> None:
        self._worker = aiops.Worker(task.url, params, name=_name(task))

    def step(self, compute: Compute) -> None:
        """Push, and whatever else the policy wants."""
        self._worker.step(compute)

    def idle(self) -> float:
        """Return what the worker counts."""
        return self._worker.idle_seconds

    def recomputed(self) -> int:
        """Return what the policy refused."""
        return self._worker.recomputed

    def model(self) -> None:
        """The model is the server's."""
        return None

    def finish(self) -> tuple[int, int]:
        """Push the rest."""
        self._worker.close()
        return self._worker.traffic


class AveragingTrainee:
    """A worker with a model of its own, which is averaged with the others'."""

    def __init__(self, task: AlgorithmTask, params: dict[str, Any]) -> None:
        self._params = params
        self._averager = aiops.client.ModelAverager(task.url, params, name=_name(task))
        self._idle = 0.0

    def step(self, compute: Compute) -> None:
        """Take a plain step; its wait is that for the lock."""
        began = time.perf_counter()
        with self._averager.step():
            self._idle += time.perf_counter() - began
            for name, gradient in compute(self._params).items():
                self._params[name] -= np.multiply(gradient, self._averager.lr, out=gradient)

    def idle(self) -> float:
        """Return the waits for the lock."""
        return self._idle

    def recomputed(self) -> int:
        """Nothing is refused."""
        return 0

    def model(self) -> dict[str, Any]:
        """Return a copy that no average is halfway through."""
        with self._averager.lock:
            return {name: array.copy() for name, array in self._params.items()}

    def finish(self) -> tuple[int, int]:
        """Average a last time."""
        self._averager.average()
        traffic = self._averager.stats.traffic
        self._averager.close()
        return traffic.bytes_in, traffic.bytes_out


class _TrainingLoop:
    """The training loop of a task."""

    def __init__(self, task: AlgorithmTask) -> None:
        self._task, model = task, MLP(task.sizes)
        data = mapped(task.data)
        stream = batches(data, task.batch_size, task.seed, task.index, task.workers)
        self._gradients = BatchGradients(model, stream)
        kind = AveragingTrainee if task.averaging else PushingTrainee
        self.trainee: Trainee = kind(task, model.init(task.seed))
        self._steps = 0

    def train(self) -> AlgorithmReport:
        """Train, and return the report."""
        task, began = self._task, time.perf_counter()
        end = began + task.seconds if task.seconds else float("inf")
        before, warm = self._state(), not task.warmup
        now = began
        while now < end and (self._steps < task.steps or not task.steps):
            self._gradients.advance()
            self.trainee.step(self._paced)
            self._steps += 1
            now = time.perf_counter()
            if not warm and now >= began + task.warmup:
                before, warm = self._state(), True
            self._tell()
        after = self._state()
        received, sent = self.trainee.finish()
        if task.snapshots:
            self._snapshot()
        steps, seconds, idle, recomputed = (b - a for a, b in zip(before, after, strict=True))
        return AlgorithmReport(
            steps=int(steps),
            seconds=seconds,
            idle=idle,
            recomputed=int(recomputed),
            sent=sent,
            received=received,
        )

    def _state(self) -> tuple[int, float, float, int]:
        trainee = self.trainee
        return self._steps, time.perf_counter(), trainee.idle(), trainee.recomputed()

    def _paced(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the gradients, not before a gradient's time is over."""
        began = time.perf_counter()
        gradients = self._gradients(params)
        left = began + self._task.pace - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return gradients

    def _tell(self) -> None:
        """Report the steps, a hundred times in all; leave a snapshot where one is due."""
        task = self._task
        if not task.steps:
            return
        if (
            task.snapshots
            and self._steps < task.steps
            and self._steps % max(task.steps // task.looks, 1) == 0
        ):
            self._snapshot()
        elif self._steps % max(task.steps // 100, 1) == 0:
            send_line({"steps": self._steps})

    def _snapshot(self) -> None:
        model = self.trainee.model()
        assert model is not None
        path = Path(self._task.snapshots) / f"{self._steps}.npz"
        np.savez(path, **model)
        send_line({"steps": self._steps, "snapshot": str(path)})


def _name(task: AlgorithmTask) -> str:
    return f"worker-{task.index + 1}"


def train(task: AlgorithmTask, ready: Ready) -> Mapping[str, Any]:
    """Train as the task states; return the `AlgorithmReport`."""
    loop = _TrainingLoop(task)
    ready()
    return asdict(loop.train())


if __name__ == "__main__":
    run(AlgorithmTask, train)
