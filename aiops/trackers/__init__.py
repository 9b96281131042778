"""Trackers of experiments, to which a server sends the numbers of its run.

One callback takes all: ``on_metrics(metrics)`` with a `RunMetrics`. `aiops.serve` takes one that a
program has, and ``aiops serve --track KIND:TARGET`` makes one of these:

=============== ================================================================================
``tensorboard:``  a folder, in which event files are written (`aiops.trackers.tensorboard`)
``wandb:``        a project, or PROJECT/NAME with the run's name (`aiops.trackers.wandb`)
``mlflow:``       an experiment, at ``MLFLOW_TRACKING_URI`` (`aiops.trackers.mlflow`)
``trackio:``      a project (`aiops.trackers.trackio`)
=============== ================================================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from aiops.errors import UsageError, nearest

__all__ = ["RunMetrics"]


class RunMetrics(NamedTuple):
    """The numbers of a run at one moment.

    Attributes
    ----------
    step
        The model's version: how many updates it has had.
    time
        In seconds since 1970.
    values
        The numbers by name, all finite: what workers have logged, as a mean over them, and the
        server's own, whose names begin with ``server/`` (`aiops.metrics.scalars.RunScalars`).
    """

    step: int
    time: float
    values: Mapping[str, float]


OnMetrics = Callable[[RunMetrics], object]
"""What `aiops.serve` takes: called on a thread of its own, which it may block."""


class Tracker(Protocol):
    """Takes the numbers of one run. Both methods are called on one thread, which they may block."""

    def on_metrics(self, metrics: RunMetrics) -> None:
        """Take the numbers of one moment."""

    def close(self) -> None:
        """Write what is left: the run has ended."""


OpenTracker = Callable[[str, Mapping[str, str]], Tracker]
"""From a target, and the run's settings by name, to a tracker; it may take as long as it does."""

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "trackio": "trackio",
}
"""The package that each kind needs."""


def tracker_of(text: str) -> tuple[OpenTracker, str]:
    """Return what opens the tracker that a text names, and its target.

    Raises
    ------
    UsageError
        When there is no such kind, the target is missing, or its package is not installed.
    """
    kind, _, target = text.partition(":")
    if kind not in PACKAGES:
        raise UsageError(f"there is no tracker {kind!r}; {nearest(kind, PACKAGES)}")
    if not target:
        raise UsageError(f"--track {kind} needs a target: {kind}:NAME")
    try:
        module = importlib.import_module(f"aiops.trackers.{kind}")
    except ImportError as error:
        raise UsageError(
            f"--track {kind} needs a package that cannot be imported ({error}):"
            f" pip install {PACKAGES[kind]}"
        ) from None
    except Exception as error:  # of another's code: packages that do not fit each other, mostly
        raise UsageError(
            f"--track {kind}: {PACKAGES[kind]} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    opened: OpenTracker = module.open_tracker
    return opened, target
