"""Run one update on all shards: ordered on all at once, and done when all have done it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from aiops.engine.events import Applied, Apply, Effect, Order, Reported
from aiops.errors import RemoteProtocolError
from aiops.model.layout import Ints
from aiops.model.placement import Placement
from aiops.shards.orders import CAPTURE, REPLICA, work_of
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import UNTOUCHED, ReplicaJob
from aiops.store.parameters import MeasureJob, UpdateJob
from aiops.store.snapshots import Version
from aiops.store.sparse_table import CopyRowsJob, TableJob
from aiops.store.updater import NONE, clipping
from aiops.wire.server_messages import RunUpdate, ShardState, UpdateDone


@dataclass(slots=True)
class _Update:
    """The update that is outstanding."""

    ticket: int
    job: UpdateJob | ReplicaJob | CaptureJob
    missing: set[int] = field(default_factory=set)  # shards that have not reported their part
    sums: list[Ints] = field(default_factory=list)  # by shard
    orders: dict[int, Order] = field(default_factory=dict)  # by shard, of the present round


class Updating:
    """The updates of one lead, one after the other.

    If the norm of a gradient is clipped, each takes two rounds: all shards measure their part of
    the norm, then all take the step with the factor that follows from the sum. Work on the delta
    replica (`aiops.store.delta_replica`) takes one round, and so does a capture.

    Parameters
    ----------
    placement
        The model's.
    of_replica
        Returns whether a version is one of the delta replica.
    holders
        The shards that hold some of the model, the lead first: rows of tables, or parameters.

    Attributes
    ----------
    versions
        The version that each follower has computed.
    on_measured
        Called with an update's number and its squared norm, before the step that follows from it is
        ordered; returns effects that come first.
    """

    def __init__(
        self,
        placement: Placement,
        of_replica: Callable[[Version], bool],
        holders: Sequence[int],
    ) -> None:
        self._placement, self._of_replica, self._holders = placement, of_replica, holders
        self._outstanding: dict[int, _Update] = {}  # one or none, by its ticket
        self._computing = 0  # the version that the update makes
        self._done = 0  # the last that all shards have done
        self.versions = [0] * (len(placement) - 1)
        self.on_measured: Callable[[int, float], list[Effect]] = lambda ticket, squares: []

    def begin(self, effect: Apply, version: int) -> list[Effect]:
        """Begin an update; return the orders to the followers, and the lead's own part.

        ``version``: the model's.
        """
        job = effect.job
        assert not isinstance(job, MeasureJob), "--filter is refused on shards"
        if isinstance(job, TableJob | CopyRowsJob):  # it is the lead's alone
            return [effect]
        self._outstanding[effect.ticket] = update = _Update(effect.ticket, job)
        if isinstance(job, CaptureJob):
            update.sums = [NONE] * len(self._placement)
            return [*self._order(update, version, {CAPTURE: job.row}, self._holders), effect]
        if isinstance(job, ReplicaJob):
            return [*self._have_followed(update, job), effect]
        job.measure = bool(job.clip) and job.target is not None
        return [*self._issue(update, job), effect]

    def resume(self, shard: int, state: ShardState, version: int) -> list[Effect] | None:
        """Go on with a follower that came back, or has a lead that came back.

        Parameters
        ----------
        shard, state
            The follower, and its state.
        version
            The model's.

        Returns
        -------
        list of Effect or None
            The order that it is given again, if it is waited for. None: it is not at the model's
            version, nor at the one that is being made; or it has lost an update that it had done,
            which may have been one of the delta replica alone.
        """
        expected, again = {version}, list[Effect]()
        for update in self._outstanding.values():
            if shard in update.missing:
                again.append(update.orders[shard])
                expected.add(self._computing)
            elif isinstance(update.job, UpdateJob) and not update.job.measure:
                expected = {self._computing}
        if shard not in self._placement.used:  # it has rows of tables alone
            expected = {0}
        if state.version not in expected or state.update < self._done:
            return None
        self.versions[shard - 1] = state.version
        return again

    def concerns(self, event: Applied) -> bool:
        """Return whether the lead's part of the outstanding update was done."""
        return event.ticket in self._outstanding

    def applied(self, event: Applied) -> Applied | list[Effect]:
        """Take the lead's sums; return `Applied` if all shards are done, else what is to follow."""
        return self._take(self._outstanding[event.ticket], 0, event.sums, event.time)

    def done(self, event: Reported, message: UpdateDone) -> Applied | list[Effect]:
        """Take a follower's sums; return the same.

        Raises
        ------
        RemoteProtocolError
            When that was not ordered, or its sums are of other tensors.
        """
        update, placement = self._outstanding.get(message.id), self._placement
        if update is None or event.shard not in update.missing:
            raise RemoteProtocolError(f"shard {event.shard} did update {message.id} unasked")
        sums, job = np.frombuffer(message.sums, "<i8").astype(np.int64), update.job
        if isinstance(job, ReplicaJob):
            expected = [len(placement.layouts[event.shard].tensors)]
        elif isinstance(job, CaptureJob):
            expected = [0]
        else:
            rows = placement.rows(event.shard, job.touched)
            expected = [0, 1 if job.measure else rows.stop - rows.start]
        if len(sums) not in expected:
            raise RemoteProtocolError(f"shard {event.shard} has sums of {len(sums)} tensors")
        if isinstance(job, UpdateJob) and not job.measure:
            self.versions[event.shard - 1] = self._computing
        return self._take(update, event.shard, sums, event.time)

    def _take(self, update: _Update, shard: int, sums: Ints, time: float) -> Applied | list[Effect]:
        placement, job = self._placement, update.job
        if len(sums):
            update.sums[shard] = sums
        update.missing.discard(shard)
        if update.missing:
            return []
        if isinstance(job, UpdateJob) and job.measure:
            return self._step(update, job)
        del self._outstanding[update.ticket]
        self._done = update.ticket
        if isinstance(job, ReplicaJob):
            return Applied(time, update.ticket, np.concatenate(update.sums))
        if isinstance(job, CaptureJob):
            return Applied(time, update.ticket, NONE)
        return Applied(time, update.ticket, placement.sums(job.touched, update.sums))

    def _step(self, update: _Update, job: UpdateJob) -> list[Effect]:
        """Order the step of a gradient whose norm has been measured, with the factor to clip it."""
        squares = sum(float(mine.view(np.float64).sum()) for mine in update.sums)
        noted = self.on_measured(update.ticket, squares)
        clip(job, squares)
        return [*noted, *self._issue(update, job), Apply(update.ticket, job)]

    def _have_followed(self, update: _Update, job: ReplicaJob) -> list[Effect]:
        """Order the followers to bring their parts of the delta replica up to the model."""
        layouts = self._placement.layouts
        update.sums = [np.full(len(each.tensors), UNTOUCHED) for each in layouts]
        return self._order(
            update, job.model.number, {REPLICA: job.replica.oldest}, self._placement.used
        )

    def _order(
        self, update: _Update, version: int, work: dict[str, int], shards: Sequence[int]
    ) -> list[Effect]:
        """Order the same work of shards, which leaves the model at this version."""
        update.missing, self._computing = set(shards), version
        for shard in shards[1:]:
            at = version if shard in self._placement.used else 0  # it has rows of tables alone
            update.orders[shard] = Order(shard, RunUpdate(update.ticket, 0, at, work))
        return [*update.orders.values()]

    def _issue(self, update: _Update, job: UpdateJob) -> list[Effect]:
        """Order the followers to do their parts."""
        placement = self._placement
        shards = range(len(placement))
        rows = [placement.rows(shard, job.touched) for shard in shards]
        update.missing = set(placement.used)
        update.sums = [
            np.zeros(1 if job.measure else len(job.touched[mine]), np.int64) for mine in rows
        ]
        self._computing = job.store.version + (job.target is not None)
        sent = -1 if job.sent is None else job.sent.number
        replica = job.sent is not None and self._of_replica(job.sent)
        number = 0 if job.gradient is None else job.gradient.number
        sizes = placement.layout.sizes
        for shard in placement.used[1:]:
            work = work_of(job, shard, placement, sent=sent, replica=replica)
            pushed = job.pushed[placement.rows(shard, job.pushed)]
            mine = number if sizes[pushed].any() else 0  # empty pieces: no portion was sent
            if not mine:
                work.pop("weights", None)
            message = RunUpdate(update.ticket, mine, job.store.version, work)
            update.orders[shard] = Order(shard, message)
        return [*update.orders.values()]


def clip(job: UpdateJob, squares: float) -> None:
    """Have a job whose gradient was measured take its step, clipped to its norm."""
    job.factor *= clipping(job.clip, job.factor, squares)
    job.measure, job.clip = False, 0.0
    if job.weights is not None:  # the first round has added it to the sum
        job.gradient = job.weights = None
