"""Measured learning curves: the runs of docs/results/algorithms.json, by algorithm."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiops.errors import UsageError

TRANSFORMER = Path("experiments", "everything-transformer.json")
"""The summary of an experiment, beside the file of the curves."""


@dataclass(frozen=True)
class Curve:
    """The runs of one algorithm with the same settings and different seeds.

    ``samples``
        Training samples seen by all workers together, at each point.
    ``accuracies``
        Test accuracies in [0, 1], a tuple of all seeds' at each point.
    """

    policy: str
    settings: Mapping[str, Any]
    samples: tuple[int, ...]
    accuracies: tuple[tuple[float, ...], ...]
    final: tuple[float, ...]

    @property
    def seeds(self) -> int:
        """The number of runs."""
        return len(self.final)

    @property
    def mean(self) -> float:
        """The mean of the test accuracies in the end."""
        return statistics.fmean(self.final)

    @property
    def least(self) -> float:
        """The smallest of them."""
        return min(self.final)

    @property
    def most(self) -> float:
        """The largest of them."""
        return max(self.final)


class Curves:
    """All runs of one task.

    Parameters
    ----------
    data
        ``{"task": {...}, "runs": [{"policy", "settings", "seed", "curve": [[samples, accuracy,
        loss], ...], "accuracy"}, ...]}``.
    transformer
        The rows of `TRANSFORMER`, or none.
    """

    def __init__(
        self, data: Mapping[str, Any], transformer: Sequence[Mapping[str, str]] = ()
    ) -> None:
        measured, self.transformer = data["runs"], transformer
        self.task: Mapping[str, Any] = data.get("task", {})
        alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for run in measured:
            key = json.dumps(run.get("settings", {}), sort_keys=True)
            alike.setdefault((run["policy"], key), []).append(run)
        self._best: dict[str, Curve] = {}
        for runs in alike.values():
            curve = _curve(runs)
            if curve.policy not in self._best or self._best[curve.policy].mean < curve.mean:
                self._best[curve.policy] = curve

    @classmethod
    def read(cls, path: Path) -> Curves | None:
        """Return those of a file; None when there is no such file.

        Raises
        ------
        UsageError
            When the file has another form.
        """
        if not path.exists():
            return None
        other = path.parent / TRANSFORMER
        try:
            rows = json.loads(other.read_text(encoding="utf-8"))["table"] if other.exists() else ()
            return cls(json.loads(path.read_text(encoding="utf-8")), rows)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"{path} does not hold learning curves ({type(error).__name__}: {error}): make it"
                " again, or remove it"
            ) from None

    def of(self, policy: str) -> Curve | None:
        """Return the curve of an algorithm with the settings that ended best, if it was run."""
        return self._best.get(policy)

    def task_text(self) -> str:
        """Return what was trained, as a sentence."""
        task = self.task
        seeds = max((curve.seeds for curve in self._best.values()), default=1)
        said = [
            f"{str(task.get('dataset', 'the task')).upper()}",
            f"{task['workers']} workers over TCP" if "workers" in task else "",
            f"mini-batches of {task['batch_size']}" if "batch_size" in task else "",
            f"{task['hidden']} hidden units" if "hidden" in task else "",
            f"{task['epochs']} epochs" if "epochs" in task else "",
            f"{seeds} seeds: their mean, and from the worst to the best" if seeds > 1 else "",
        ]
        return ", ".join(part for part in said if part) + "."


def _curve(runs: list[Mapping[str, Any]]) -> Curve:
    """Return runs that differ only in their seed as one curve, as far as all of them go."""
    points = list(zip(*(run["curve"] for run in runs), strict=False))
    if not points:
        raise ValueError(f"a run of {runs[0]['policy']} has no points")
    return Curve(
        policy=runs[0]["policy"],
        settings=runs[0].get("settings", {}),
        samples=tuple(round(statistics.fmean(p[0] for p in point)) for point in points),
        accuracies=tuple(tuple(float(p[1]) for p in point) for point in points),
        final=tuple(float(run["accuracy"]) for run in runs),
    )
