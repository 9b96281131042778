"""The parameters where a model is evaluated, if its gradients are computed elsewhere.

Some rules train at a point that lies off the best one by an array of their state
(`aiops.kernels.rule.Rule.offset`). So there is a second set of versions, made when it is requested:
w − left · offset, computed when no update is outstanding, since updates overwrite the offset in
place. What is left out is chosen for each tensor (`aiops.algorithms.base.Algorithm.offset_kept`).
Parameters and optimiser are not changed, so training does not depend on who evaluates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints
from aiops.store.parameters import Store
from aiops.store.snapshots import Lease, SnapshotPool, Version
from aiops.store.updater import NONE

LIVE = 2
"""The versions that may be sent at once, with the one in the making; then the slowest reader is
cut off."""

_BLOCK = 65_536
"""Elements that are computed at a time, in buffers that stay in the cache."""


@dataclass(slots=True)
class EvaluationJob:
    """Compute one version for evaluation; `run` may be called on another thread.

    Attributes
    ----------
    evaluation
        That of the store. No update is outstanding meanwhile.
    target
        The version that it makes.
    left
        float64[tensors that are held here], what is left out of the offset.
    """

    evaluation: Evaluation
    target: Version
    left: Array

    @property
    def cost(self) -> int:
        """Bytes read and written, at most."""
        return 4 * self.target.room.layout.nbytes

    def run(self) -> Ints:
        """Write the values."""
        self.evaluation.compute(self)
        return NONE


class Evaluation:
    """The versions for evaluation of one store, whose rule has an offset.

    Their arenas are made on first use.
    """

    def __init__(self, store: Store) -> None:
        assert store.rule.offset is not None, "it is evaluated where it is trained"
        self._store, self._place = store, list(store.rule.state).index(store.rule.offset)
        self._pool: SnapshotPool | None = None
        self._number = -1

    @property
    def number(self) -> int:
        """The model version that the newest is of; -1: there is none that may be sent."""
        return self._number

    @property
    def cut(self) -> int:
        """The number of slow readers that were cut off."""
        return 0 if self._pool is None else self._pool.cut

    def forget(self) -> None:
        """Send the newest no more, for a restored server has none."""
        self._number = -1

    def begin(self, left: Array) -> EvaluationJob:
        """Return the job that makes the version of the current one.

        ``left``: float64[tensors that are held here].
        """
        current, held = self._store.current, self._store.held
        self._number = -1  # it may be overwritten in place
        if self._pool is None:
            first = current.following(Arena(held))
            self._pool = SnapshotPool(first, LIVE)
        return EvaluationJob(self, self._pool.target(), left)

    def publish(self, job: EvaluationJob) -> None:
        """Make a job's result the newest version."""
        assert self._pool is not None, "a job was begun"
        current = self._store.current
        job.target.follow(current, self._store.layout.all)
        self._pool.publish(job.target)
        self._number = current.number

    def lease(self) -> Lease:
        """Return a lease on the newest version."""
        assert self._pool is not None, "none is made"
        return self._pool.lease()

    def owns(self, version: Version) -> bool:
        """Return whether a version is one of these."""
        return self._pool is not None and version in self._pool

    def now(self, left: Array) -> Arena:
        """Return the values for the current version at once, while no update is outstanding."""
        arena = Arena(self._store.held)
        self._write(arena, left)
        return arena

    def compute(self, job: EvaluationJob) -> None:
        """Write a job's values (on any thread)."""
        self._write(job.target.arena, job.left)

    def _write(self, arena: Arena, left: Array) -> None:
        store = self._store
        masters, sections = store.masters, store.current.arena.sections
        values = [
            mine if wide is None else wide for mine, wide in zip(sections, masters, strict=True)
        ]
        leave_out(arena, values, [state[self._place] for state in store.state], left)


def leave_out(arena: Arena, values: Sequence[Array], offsets: Sequence[Array], left: Array) -> None:
    """Write w − left · offset into an arena.

    Parameters
    ----------
    arena
        It gets the values.
    values
        By section of its layout: the parameters, or their float32 masters.
    offsets
        By section: the array that is left out.
    left
        float64[tensors], how much of it.
    """
    layout = arena.layout
    for index, section in enumerate(layout.sections):
        offset, target = offsets[index], arena.sections[index]
        scratch = np.empty(_BLOCK, offset.dtype)
        for tensor in range(section.first, section.last):
            one, share = layout.tensors[tensor], offset.dtype.type(left[tensor])
            first = (one.offset - section.start) // section.dtype.itemsize
            end = first + one.size
            for at in range(first, end, _BLOCK):
                part = slice(at, min(at + _BLOCK, end))
                block = scratch[: part.stop - at]
                np.multiply(offset[part], share, out=block)
                target[part] = np.subtract(values[index][part], block, out=block)
