"""Decide which of the reported checkpoints are kept; no Ray here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.common.frozen import value
from aiops.errors import UsageError


@value
class KeptCheckpoint:
    """A checkpoint in storage: its path, and the metrics that were reported with it."""

    path: str
    metrics: Mapping[str, Any]


class CheckpointList:
    """The checkpoints of one run that are kept, as Ray Train's ``CheckpointConfig`` asks.

    Parameters
    ----------
    most
        How many are kept; None: all.
    score
        The metric by which they are compared; None: the newest are kept.
    largest
        Whether a larger score is better.

    Attributes
    ----------
    kept
        The oldest first. The newest is always kept.
    """

    def __init__(self, most: int | None = None, score: str | None = None, *, largest: bool = True):
        if most is not None and most < 1:
            raise UsageError(f"num_to_keep must be 1 or more, not {most}")
        self._most, self._score, self._largest = most, score, largest
        self.kept: list[KeptCheckpoint] = []

    @property
    def newest(self) -> KeptCheckpoint | None:
        """The newest; None: there is none yet."""
        return self.kept[-1] if self.kept else None

    def add(self, checkpoint: KeptCheckpoint) -> list[str]:
        """Note a new one; return the paths of those that are to be deleted."""
        self.kept.append(checkpoint)
        dropped = []
        while self._most is not None and len(self.kept) > self._most:
            # With one to keep the newest is it, whatever its score: workers go on from it.
            worst = min(self.kept[:-1], key=self._rank)
            self.kept.remove(worst)
            dropped.append(worst.path)
        return dropped

    def _rank(self, checkpoint: KeptCheckpoint) -> float:
        """Return a number that is the larger the better; without a score all are equal."""
        if self._score is None:
            return 0.0
        score = checkpoint.metrics.get(self._score)
        if not isinstance(score, int | float) or score != score:
            return float("-inf")
        return float(score) if self._largest else -float(score)
