"""Weights & Biases: a run of a project.

Its own variables hold: ``WANDB_API_KEY``, ``WANDB_ENTITY``, ``WANDB_MODE=offline``, ``WANDB_DIR``.
"""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from aiops.metrics.scalars import PREFIX
from aiops.trackers import RunMetrics, Tracker

_STEP = f"{PREFIX}version"


class WandbTracker:
    """Logs the numbers of one moment together.

    The x axis is the model's version. It is a number among the others, and not the step of Weights
    & Biases, which may never fall: a server that goes back to a snapshot has an older version.
    """

    def __init__(self, target: str, settings: Mapping[str, str]) -> None:
        project, _, name = target.partition("/")
        self._run = wandb.init(
            project=project,
            name=name or None,
            config=dict(settings),
            job_type="server",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def on_metrics(self, metrics: RunMetrics) -> None:
        """Log the numbers."""
        self._run.log({**metrics.values, _STEP: metrics.step})

    def close(self) -> None:
        """End the run, and wait until all is sent."""
        self._run.finish()


def open_tracker(target: str, settings: Mapping[str, str]) -> Tracker:
    """Begin a run of the project, with a name if ``target`` is PROJECT/NAME."""
    return WandbTracker(target, settings)
