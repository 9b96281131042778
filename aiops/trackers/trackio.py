"""Trackio: a run of a project, kept on this machine or in a Space, as its variables say."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from aiops.trackers import RunMetrics, Tracker

_ALONE = {"auto_log_gpu": False, "auto_log_cpu": False}
"""It is to log what it is given, and not to watch the machine besides."""


class TrackioTracker:
    """Logs the numbers of one moment together."""

    def __init__(self, project: str, settings: Mapping[str, str]) -> None:
        self._run = trackio.init(project=project, config=dict(settings), embed=False, **_ALONE)

    def on_metrics(self, metrics: RunMetrics) -> None:
        """Log the numbers."""
        self._run.log(dict(metrics.values), step=metrics.step)

    def close(self) -> None:
        """End the run, and wait until all is kept."""
        self._run.finish()


def open_tracker(target: str, settings: Mapping[str, str]) -> Tracker:
    """Begin a run of the project ``target``."""
    return TrackioTracker(target, settings)
