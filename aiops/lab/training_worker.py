"""The worker's side of `aiops.lab.training_run`: what every worker process has in common.

A worker module defines its task, a dataclass of plain values, and ends with ``run(Task, train)``.
Its standard output is lines of JSON for the parent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from aiops.client.params import Params
from aiops.errors import AiopsError
from aiops.lab.workloads import MLP
from aiops.net.child_guard import ChildGuard

T = TypeVar("T")

Ready: TypeAlias = Callable[[], None]
"""Reports that the worker is ready, and returns when all are: then it begins to train."""

REPORT_EVERY = 0.25
"""Seconds between two lines of progress."""

PATIENCE = 120.0
"""Seconds that a worker waits for the others to be ready."""


def send_line(message: Mapping[str, Any]) -> None:
    """Write a line of JSON for the parent."""
    print(json.dumps(message), flush=True)


def run(task_type: Callable[..., T], train: Callable[[T, Ready], Mapping[str, Any]]) -> None:
    """Run a worker process: read the task, train, report.

    Parameters
    ----------
    task_type
        Makes a task of its fields.
    train
        Is given the task and a function to call when it is ready; returns the report.
    """
    guard = ChildGuard()

    def ready() -> None:
        send_line({"ready": True})
        if not guard.wait_for_line(PATIENCE):
            raise SystemExit(f"the other workers were not ready within {PATIENCE:g} s")

    try:
        task = task_type(**json.loads(sys.argv[1]))
        send_line({"report": dict(train(task, ready))})
    except AiopsError as error:
        sys.exit(f"aiops: {error}")


def mapped(folder: str) -> tuple[Any, Any]:
    """Return the arrays in the folder of a `TrainingFiles`, mapped into memory."""
    x, y = (np.asarray(np.load(Path(folder) / f"{name}.npy", mmap_mode="r")) for name in "xy")
    return x, y


class BatchGradients:
    """The gradients of one worker's mini-batches, as a function of parameters.

    A function, not arrays: some policies refuse a gradient and want it computed again on newer
    parameters, of the same mini-batch.

    Parameters
    ----------
    model
        The perceptron.
    stream
        The worker's mini-batches.
    out
        Where the gradients are written: views of one arena spare a copy; default: new arrays.

    Attributes
    ----------
    losses
        The loss of each gradient computed since `take_losses`, in nats.
    """

    def __init__(
        self,
        model: MLP,
        stream: Iterator[tuple[Any, Any]],
        out: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._stream, self._out = model, stream, out
        self._batch: tuple[Any, Any] = (None, None)
        self.losses: list[float] = []

    def advance(self) -> None:
        """Take the next mini-batch."""
        self._batch = next(self._stream)

    def __call__(self, params: Params | Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the gradients at these parameters; the arrays are the same each time."""
        loss, self._out = self._model.gradients(params, *self._batch, out=self._out)
        self.losses.append(loss)
        return self._out

    def take_losses(self) -> Sequence[float]:
        """Return the losses since the last call."""
        losses, self.losses = self.losses, []
        return losses
