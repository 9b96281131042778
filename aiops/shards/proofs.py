"""Count the updates that each server of a sharded model has proven to be finite.

A server proves updates of its part (`aiops.store.finite_guard`), and says after a rehearsal how far
its proof reaches: for how many updates, learning rates, scalars and gradients. The lead knows all
of these before it orders an update, so it sees without a question whether one is proven on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aiops.model.placement import Placement
from aiops.store.finite_guard import LIMIT, Proof
from aiops.store.parameters import UpdateJob


class ShardProofs:
    """The proofs of all servers of one model, as its lead counts them.

    Parameters
    ----------
    placement
        The model's.
    largest
        Returns, by shard, the largest magnitude in its portion of a push, by the push's number;
        where it is not known the shard is missing.
    """

    def __init__(self, placement: Placement, largest: Callable[[int], Mapping[int, float]]) -> None:
        self._placement, self._largest = placement, largest
        self._proofs = [Proof() for _ in placement.layouts]
        # Bounds of the sum in progress, by shard; it may be one that an earlier start has begun.
        self._sums = np.full(len(placement), np.inf)

    def renew(self, shard: int, proof: Proof) -> None:
        """Take the proof that a server has found, or found not."""
        self._proofs[shard] = proof

    def forget(self, shard: int) -> None:
        """Have no proof of a server: it may have been started again."""
        self._proofs[shard] = Proof()

    def collect(self, job: UpdateJob, push: int) -> None:
        """Note that a push is added to the sum in progress."""
        assert job.weights is not None, "it is collected"
        trimmed = bool(job.store.updater.trim.share)
        if job.begins_sum:
            self._sums[:] = 0.0
        largest = self._largest(push)
        for shard in self._placement.used:
            weights = job.weights[self._placement.rows(shard, job.pushed)]
            most = float(np.abs(weights).max(initial=0.0))
            bound = largest.get(shard, LIMIT) * most
            before = float(self._sums[shard])
            self._sums[shard] = max(before, bound) if trimmed else before + bound

    def lacking(self, job: UpdateJob, push: int, *, known: bool) -> list[int]:
        """Return the shards that have not proven a step to be finite; count it for the others.

        Parameters
        ----------
        job
            The step; its factors clip the gradient to its norms already.
        push
            The number of the push that it is made of; 0: it is made of the sum in progress.
        known
            Whether what the rule reads is among the versions that proofs are for.
        """
        placement, found = self._placement, []
        largest = self._largest(push) if push else {}
        for shard in placement.used:
            rows = placement.rows(shard, job.touched)
            steps, scalars = job.steps[rows], job.scalars
            most = largest.get(shard, LIMIT)
            if not push:
                most = float(self._sums[shard]) * job.store.updater.growth
            most *= job.largest_factor(rows)
            numbers = steps, None if scalars is None else scalars[rows], most
            if len(steps) and not (known and self._proofs[shard].covers(*numbers)):
                found.append(shard)
        return found
