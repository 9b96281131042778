"""The functions that a training loop calls: where it is, what it reports, what it trains on.

They have the names of Ray Train's. `report` differs: it is no barrier, and each worker reports when
it likes, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiops.errors import DeadlineExceeded, UsageError

if TYPE_CHECKING:
    from aiops.ray.data import DatasetShard
    from aiops.ray.storage import Storage

_MOST = 4096  # reports that may wait for the driver
_WAIT = 60.0  # seconds that a report waits while there are more


@dataclass(frozen=True)
class LoopReport:
    """One call of `report`.

    Attributes
    ----------
    rank
        The worker's.
    metrics
        As given.
    checkpoint
        The path of the checkpoint in the run's storage, or None.
    """

    rank: int
    metrics: Mapping[str, Any]
    checkpoint: str | None = None


class ReportQueue:
    """The reports of a worker that the driver has not taken yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reports: list[LoopReport] = []
        self._closed = False

    def put(self, report: LoopReport) -> None:
        """Add one.

        Raises
        ------
        DeadlineExceeded
            When there are `_MOST`, and the driver takes none.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._reports) < _MOST, _WAIT):
                raise DeadlineExceeded(
                    f"{_MOST} reports wait, and the driver has taken none for {_WAIT:g} s: is it"
                    " still there? report less often"
                )
            self._reports.append(report)
            self._changed.notify_all()

    def take(self, seconds: float) -> tuple[list[LoopReport], bool]:
        """Return the reports as soon as there are some, and whether no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._reports) or self._closed, seconds)
            taken, self._reports = self._reports, []
            self._changed.notify_all()
            return taken, self._closed

    def close(self) -> None:
        """Note that no more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class LoopContext:
    """The place of a loop in its job; `get_context` returns it.

    Attributes
    ----------
    rank, world_size
        Its number, from 0, and the most workers that the job may have; with elastic workers there
        may be fewer, and which there are changes.
    local_rank, local_world_size
        The same on its node, as they were when it began.
    restarts
        How often this rank's loop has been begun before.
    name
        The run's.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int
    name: str

    def get_world_rank(self) -> int:
        """Return ``rank``."""
        return self.rank

    def get_world_size(self) -> int:
        """Return ``world_size``."""
        return self.world_size

    def get_local_rank(self) -> int:
        """Return ``local_rank``."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """Return ``local_world_size``."""
        return self.local_world_size

    def get_experiment_name(self) -> str:
        """Return ``name``."""
        return self.name


@dataclass
class LoopSurroundings:
    """All that a loop's calls need, in the process of its worker."""

    context: LoopContext
    storage: Storage
    newest: str | None
    shards: Mapping[str, DatasetShard]
    queue: ReportQueue
    reported: int = field(default=0)


_current: LoopSurroundings | None = None  # a worker's process runs one loop


def enter(surroundings: LoopSurroundings | None) -> None:
    """Make these the surroundings of the loop in this process; None: it has ended."""
    global _current
    _current = surroundings


def _surroundings(call: str) -> LoopSurroundings:
    if _current is None:
        raise UsageError(
            f"aiops.ray.{call} is for the loop that aiops.ray.train runs, in its worker"
        )
    return _current


def get_context() -> LoopContext:
    """Return the place of this loop in its job.

    Raises
    ------
    UsageError
        Outside of a loop; so do the others.
    """
    return _surroundings("get_context()").context


def get_checkpoint() -> Any:
    """Return the newest `ray.train.Checkpoint` that the job had when this loop began, or None.

    The parameters need none: they are on the server. It is for what else a loop has to go on with.
    """
    here = _surroundings("get_checkpoint()")
    return None if here.newest is None else here.storage.checkpoint(here.newest)


def get_dataset_shard(name: str = "train") -> DatasetShard:
    """Return this worker's part of one of the ``datasets``.

    Raises
    ------
    UsageError
        When there is none of that name.
    """
    here = _surroundings("get_dataset_shard()")
    if name not in here.shards:
        known = ", ".join(map(repr, here.shards)) or "none"
        raise UsageError(f"train was given no dataset {name!r}; it was given: {known}")
    return here.shards[name]


def report(metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
    """Report metrics, and perhaps a checkpoint. It is no barrier: no other worker is waited for.

    Parameters
    ----------
    metrics
        Values by name. Those of rank 0 become the result's ``metrics``; all are in its
        ``metrics_dataframe``.
    checkpoint
        A `ray.train.Checkpoint`: its files are copied to the run's storage before this returns.

    Raises
    ------
    UsageError
        When metrics are not given by name.
    DeadlineExceeded
        When the driver takes no reports.
    """
    here = _surroundings("report()")
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics are values by name, not {type(metrics).__name__}")
    path, rank = None, here.context.rank
    if checkpoint is not None:
        name = f"checkpoint_{rank:04}_{here.context.restarts:03}_{here.reported:06}"
        path = here.storage.put(checkpoint, name)
        here.reported += 1
    here.queue.put(LoopReport(rank, dict(metrics), path))
