"""MLflow: a run of an experiment.

Where it is kept is what ``MLFLOW_TRACKING_URI`` says, with the variables of MLflow for passwords.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from aiops.trackers import RunMetrics, Tracker

_LONGEST = 6000
"""Characters of a setting that MLflow takes."""

_REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that its names may not have: one such name would have it refuse all numbers."""

_AT_ONCE = 100
"""Settings that it takes in one request."""


class MlflowTracker:
    """Logs the numbers of one moment in one request."""

    def __init__(self, experiment: str, settings: Mapping[str, str]) -> None:
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        known = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run = self._client.create_run(known).info.run_id
        given = [Param(name, value[:_LONGEST]) for name, value in settings.items()]
        for begin in range(0, len(given), _AT_ONCE):
            self._client.log_batch(self._run, params=given[begin : begin + _AT_ONCE])

    def on_metrics(self, metrics: RunMetrics) -> None:
        """Log the numbers."""
        at, step = round(1000 * metrics.time), metrics.step
        values = {_REFUSED.sub("_", name): value for name, value in metrics.values.items()}
        logged = [Metric(name, value, at, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=logged)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


def open_tracker(target: str, settings: Mapping[str, str]) -> Tracker:
    """Begin a run of the experiment ``target``, which is made if it is not there."""
    return MlflowTracker(target, settings)
