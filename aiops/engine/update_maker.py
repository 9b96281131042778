"""Make the updates of one model, one at a time: fix each when it begins, publish what it made.

A gradient is either used alone, or added to a sum that a later step is taken with. Everything about
an update (the staleness of its gradient, its learning rates, its target) is fixed in `begin`. Until
`end` it is the outstanding one, which runs on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.algorithms.base import Algorithm, Decision
from aiops.engine.replies import PendingPush
from aiops.engine.schedule_position import SchedulePosition
from aiops.engine.staleness import StalenessHistogram
from aiops.engine.step_numbers import StepNumbers
from aiops.model.layout import Array, Ints
from aiops.store.finite_guard import refused_tensor
from aiops.store.parameters import Store, UpdateJob
from aiops.store.snapshots import Lease, Version
from aiops.wire.messages import Push


class CollectedSum:
    """The ``count`` gradients of the sum in progress, whose values are the `Updater`'s."""

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "count")

    def __init__(self, tensors: int) -> None:
        self.count = 0
        self._held = np.zeros(tensors, bool)
        self._modulated = np.zeros((2, tensors))  # per tensor: the sum of modulations, gradients

    def add(self, tensors: Ints, modulation: Array) -> None:
        """Add a gradient of these n tensors; float64[n], the modulation of each."""
        self.count += 1
        self._held[tensors] = True
        self._modulated[0, tensors] += modulation
        self._modulated[1, tensors] += 1

    def tensors(self) -> tuple[Ints, Array]:
        """Return the n tensors that it has; float64[n], the mean modulation of each."""
        held = np.flatnonzero(self._held)
        return held, self._modulated[0, held] / self._modulated[1, held]

    def clear(self) -> None:
        """Forget the sum: the next gradient is the first of another."""
        self.count = 0
        self._held[:] = False
        self._modulated[:] = 0

    def state(self) -> dict[str, Any]:
        """Return it as plain values and arrays, for `restore`."""
        found = {"sum": self._held.copy(), "modulated": self._modulated.copy()}
        return {**found, "collected": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._held[:], self._modulated[:] = state["sum"], state["modulated"]
        self.count = state["collected"]


class UpdateMaker:
    """The updates of one model, of which at most one is outstanding.

    Attributes
    ----------
    job, push, decision
        The outstanding update, its gradient if it has one, and what the policy decided; else None.
    collected
        The sum in progress.
    numbers
        Learning rates and scalars.
    position
        Where the schedule of the learning rate is; None: it counts updates.
    staleness
        That of the gradients used.
    trims
        Whether a step is made of a trimmed mean.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "job")

    def __init__(
        self, algorithm: Algorithm, workers: int | None, store: Store, most_batches: int
    ) -> None:
        self._algorithm, self._store = algorithm, store
        self.numbers = StepNumbers(algorithm, workers, store.layout)
        self.position = SchedulePosition.of(algorithm, workers, most_batches)
        self.collected = CollectedSum(len(store.layout.tensors))
        self.staleness = StalenessHistogram()
        self._clip = algorithm.clipping([tensor.name for tensor in store.layout.tensors])
        self._linear = algorithm.linear
        self.trims = bool(algorithm.trimming(workers).share)
        self.job: UpdateJob | None = None
        self.push: PendingPush | None = None
        self.decision: Decision | None = None
        self._sent: Lease | None = None  # on what the outstanding update reads

    @property
    def reads(self) -> Version | None:
        """The version that the outstanding update reads beside the current one, or None."""
        return self._sent.version if self._sent is not None else None

    def whole(self, staleness: int, now: float) -> tuple[Array, Array | None]:
        """Return learning rates and scalars of an update of all tensors with one gradient now."""
        numbers, store, position = self.numbers, self._store, self.position
        if position is not None:
            position.now = now
        if numbers.scheduled:
            numbers.move_to(store.current.number if position is None else position.at(1))
        scalars = numbers.scalars(store.current, store.layout.all) if store.rule.scalars else None
        return numbers.even[staleness][1], scalars

    def begin(
        self, push: PendingPush | None, decision: Decision, stale: Ints | None = None
    ) -> UpdateJob:
        """Fix everything about the next update.

        ``push``: the gradient that is used; None: the step is taken with the sum. ``stale``: the
        staleness of each tensor that it covers; None: they all have the push's.
        """
        store, numbers, position = self._store, self.numbers, self.position
        direct = decision.divide == 1 and not self.collected.count and push is not None
        gradient = None if push is None else push.sink.take()
        job = UpdateJob(store, store.cost, gradient=gradient)
        if push is not None and position is not None:  # one applied again is no new example
            position.used(push.message.count if isinstance(push.message, Push) else 0)
        if numbers.scheduled:
            numbers.move_to(store.current.number if position is None else position.at())
        if push is not None:
            cover, staleness = push.sink.cover, push.staleness
            job.pushed = cover.tensors
            self.staleness.note(staleness)
            even = stale is None and cover.whole
            scales, steps = numbers.even[staleness] if even else numbers.of(cover, staleness, stale)
            if push.message.lr_factors:  # of one for all, or of each
                factors = np.array(push.message.lr_factors)
                scales, steps = scales * factors, steps * factors
            if direct:
                job.steps, job.touched = steps, cover.tensors
                if store.rule.reads:
                    job.sent = self._read(push)
            else:
                job.weights = scales if self._linear else np.ones(len(cover.tensors))
                job.begins_sum = not self.collected.count
                self.collected.add(cover.tensors, scales)
        if decision.divide is not None:
            if not direct:
                self._take_sum(job, decision.divide)
            if self._clip is not None:
                job.clip = self._clip.of(job.touched)
            if store.rule.scalars:
                job.scalars = numbers.scalars(store.current, job.touched)
            job.target = store.begin()
        if push is not None and store.rule.scalars:  # last: those are by the gradients before it
            numbers.recent_staleness.note(push.staleness)
        self.job, self.push, self.decision = job, push, decision
        return job

    def end(self, sums: Ints) -> tuple[bool, int | None]:
        """Publish what the outstanding update made, given what its job returned.

        Returns
        -------
        published, refused
            Whether there is a new version. If its values would not be finite: the tensor.
        """
        job, store = self.job, self._store
        assert job is not None, "no update is outstanding"
        self.job = self.push = self.decision = None
        if job.target is None:
            return False, None
        refused = refused_tensor(sums)
        if refused is None:
            store.commit(job.target, job.touched, sums)
            if self.numbers.gain.moves:
                self.numbers.gain.note(sums)
        else:
            store.abandon(job.target)
        if self.position is not None:
            self.position.end(published=refused is None)
        if self.collected.count:
            self.collected.clear()
        if self._sent is not None:
            self._sent.release()
            self._sent = None
        return refused is None, refused

    # ------------------------------------------------------------ inside

    def _take_sum(self, job: UpdateJob, divide: int) -> None:
        """Have the step be taken with the sum, divided by this."""
        (touched, modulation), every = self.collected.tensors(), self._store.layout.all
        job.cost += self._store.updater.sum_cost
        job.touched = every if len(touched) == len(every) else touched
        # Gradients that were weighted have their modulation already.
        job.steps = self.numbers.collected(touched, None if self._linear else modulation)
        job.factor = 1.0 if self.trims else 1.0 / divide  # of a mean, or a sum

    def _read(self, push: PendingPush) -> Version:
        """Return the version that the rule reads beside the parameters, which the worker was sent.

        If it is not held any more (the connection was lost meanwhile), this is the current version.
        It is leased until the update is done, since its worker may leave before. A lease also keeps
        the update from being done in place.
        """
        cover, sent = push.sink.cover, push.member.sent
        if sent is None or not np.array_equal(
            sent.version.tensor_versions[cover.tensors], cover.bases
        ):
            self._sent = self._store.lease()
        else:
            self._sent = sent.shared()
        return self._sent.version

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the sum in progress and the statistics as plain values, for `restore`."""
        assert self.job is None, "the sum in progress is being changed"
        return {
            **self.collected.state(),
            "recent_staleness": self.numbers.recent_staleness.state(),
            **({"gain": self.numbers.gain.state()} if self.numbers.gain.moves else {}),
            "position": None if self.position is None else self.position.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.collected.restore(state)
        self.numbers.recent_staleness.restore(state["recent_staleness"])
        if "gain" in state:
            self.numbers.gain.restore(state["gain"])
        if self.position is not None:
            self.position.restore(state["position"])
