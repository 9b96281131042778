"""Run one update on all shards: ordered on all at once, and done when all have done it.

An update is one round on all shards, the step, if each has proven that its part of the result is
finite (`aiops.shards.proofs`). Other rounds may come before it. If the norm of the gradient is
clipped, all measure their part of it, and the factors of the step follow from the sums. And the
shards that have no proof rehearse the step: if the result is not finite on one of them, the update
is refused before any has changed anything. A gradient that is collected is added to the sum in
progress in the first round that a shard takes part in.

A gradient that filters look at is measured before that (`aiops.shards.measuring`): on the lead, and
on those that have not said yet what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from aiops.engine.events import Applied, Apply, Effect, Order, Reported
from aiops.errors import RemoteProtocolError
from aiops.model.layout import Ints
from aiops.model.placement import Placement
from aiops.shards.measuring import Measuring
from aiops.shards.orders import CAPTURE, REPLICA, evaluation_of, work_of
from aiops.shards.proofs import ShardProofs
from aiops.shards.reports import check_count, check_squares, check_statistic, read_sums
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import UNTOUCHED, ReplicaJob
from aiops.store.evaluation import EvaluationJob
from aiops.store.finite_guard import Proof, refusal
from aiops.store.parameters import MeasureJob, UpdateJob, UpdateRound
from aiops.store.snapshots import Version
from aiops.store.sparse_table import CopyRowsJob, TableJob
from aiops.store.updater import NONE
from aiops.wire.server_messages import RunUpdate, ShardState, UpdateDone

OnMeasured: TypeAlias = Callable[[int, Sequence[float]], list[Effect]]
"""Takes an update's number, and the squared norms of its groups."""

_FINITE = np.array([-1])


@dataclass(slots=True)
class _Update:
    """The update that is outstanding."""

    ticket: int
    job: UpdateJob | ReplicaJob | EvaluationJob | CaptureJob | MeasureJob
    push: int = 0  # the number of the push that it begins with
    asked: set[int] = field(default_factory=set)  # shards that take part in the present round
    missing: set[int] = field(default_factory=set)  # those that have not reported it
    begun: set[int] = field(default_factory=set)  # shards that have done an earlier round
    made: set[int] = field(default_factory=set)  # followers that have made the step already
    sums: list[Ints] = field(default_factory=list)  # by shard
    orders: dict[int, Order] = field(default_factory=dict)  # by shard, of the present round
    since: dict[int, float] = field(default_factory=dict)  # when each was given that order last

    def note_made(self, shard: int, *, made: bool) -> None:
        """Note whether a follower has made the step: then its result is finite on all shards."""
        (self.made.add if made else self.made.discard)(shard)

    def ordered(self, now: float) -> list[Effect]:
        """Return the orders of the present round, which are given now."""
        self.since = dict.fromkeys(self.orders, now)
        return [*self.orders.values()]

    def ask_again(self, shard: int, now: float) -> list[Order]:
        """Return the orders of those who reported otherwise before this follower had come."""
        wrong = self.asked - {0, shard} if shard in self.made else set[int]()
        wrong = {each for each in wrong if self.sums[each][0] >= 0}
        self.missing |= wrong
        self.since |= dict.fromkeys(wrong, now)
        return [self.orders[each] for each in sorted(wrong)]


class Updating:
    """The updates of one lead, one after the other.

    Work on the delta replica (`aiops.store.delta_replica`) takes one round, and so does a capture.

    Parameters
    ----------
    placement
        The model's.
    of_replica
        Returns whether a version is one of the delta replica.
    holders
        The shards that hold some of the model, the lead first: rows of tables, or parameters.
    largest
        As of `ShardProofs`.
    measuring
        What followers have measured of pushes.

    Attributes
    ----------
    versions
        The version that each follower has computed.
    completed
        The ticket of the last update that all shards have done; a push that was measured is none.
    on_measured
        Called with an update's number and the squared norm of each of its groups, before the round
        that follows from them is ordered; returns effects that come first.
    """

    def __init__(
        self,
        placement: Placement,
        of_replica: Callable[[Version], bool],
        holders: Sequence[int],
        largest: Callable[[int], Mapping[int, float]],
        measuring: Measuring,
    ) -> None:
        self._measuring = measuring
        self._placement, self._of_replica, self._holders = placement, of_replica, holders
        self._proofs = ShardProofs(placement, largest)
        self._outstanding: dict[int, _Update] = {}  # one or none, by its ticket
        self._computing = 0  # the version that the update makes
        self.completed = 0
        self.versions = [0] * (len(placement) - 1)
        self.on_measured: OnMeasured = lambda ticket, squares: []

    def begin(self, effect: Apply, version: int, now: float) -> list[Effect]:
        """Begin an update; return the orders to the followers, and the lead's own part.

        ``version``: the model's. ``now``: the time, in seconds.
        """
        job = effect.job
        alone = isinstance(job, MeasureJob) and len(self._placement.used) == 1
        if alone or isinstance(job, TableJob | CopyRowsJob):  # it is the lead's alone
            return [effect]
        self._outstanding[effect.ticket] = update = _Update(effect.ticket, job)
        if isinstance(job, MeasureJob):
            return [*self._measure(update, job, version, now), effect]
        if isinstance(job, CaptureJob):
            update.sums = [NONE] * len(self._placement)
            work = {CAPTURE: job.row}
            return [*self._order(update, version, work, self._holders, now), effect]
        if isinstance(job, ReplicaJob):
            return [*self._have_followed(update, job, now), effect]
        if isinstance(job, EvaluationJob):
            return [*self._evaluate(update, job, version, now), effect]
        update.push = 0 if job.gradient is None else job.gradient.number
        self._computing = job.store.version + (job.target is not None)
        if job.weights is not None:
            self._proofs.collect(job, update.push)
        if job.clip is not None and job.target is not None:
            return self._issue(update, job, UpdateRound.MEASURE, self._placement.used, now)
        return self._rehearse(update, job, now)

    def _evaluate(
        self, update: _Update, job: EvaluationJob, version: int, now: float
    ) -> list[Effect]:
        """Have all shards make a version for evaluation."""
        placement = self._placement
        update.sums, update.missing = [NONE] * len(placement), set(placement.used)
        for shard in placement.used[1:]:
            work = evaluation_of(job.left, shard, placement)
            update.orders[shard] = Order(shard, RunUpdate(update.ticket, 0, version, work))
        return update.ordered(now)

    def _measure(self, update: _Update, job: MeasureJob, version: int, now: float) -> list[Effect]:
        """Ask followers for what they have not said of a push, or of the version that it meets."""
        known, self._computing = self._measuring.known(job), version
        update.sums = [known.get(shard, NONE) for shard in range(len(self._placement))]
        update.missing = set(self._placement.used) - set(known)
        for shard in sorted(update.missing - {0}):
            number, work = self._measuring.work(job, shard)
            update.orders[shard] = Order(shard, RunUpdate(update.ticket, number, version, work))
        return update.ordered(now)

    def fits(self, shard: int, state: ShardState, version: int) -> bool:
        """Return whether a follower that came back can go on; as of `resume`."""
        expected = {version}
        for update in self._outstanding.values():
            if shard in update.begun and state.update < update.ticket:
                return False
            round = update.job.round if isinstance(update.job, UpdateJob) else None
            if shard in update.missing or round is UpdateRound.REHEARSE:
                expected.add(self._computing)  # an earlier start of the lead may have ordered more
            elif round is UpdateRound.STEP:  # it has done it
                expected = {self._computing}
        if shard not in self._placement.used:  # it has rows of tables alone
            expected = {0}
        return state.version in expected and state.update >= self.completed

    def resume(
        self, shard: int, state: ShardState, version: int, now: float
    ) -> list[Effect] | None:
        """Go on with a follower that came back, or has a lead that came back.

        Parameters
        ----------
        shard, state
            The follower, and its state.
        version
            The model's.
        now
            The time, in seconds.

        Returns
        -------
        list of Effect or None
            The order that it is given again, if it is waited for. None: it is not at the model's
            version, nor at the one that is being made; or it has lost an update that it had done,
            which may have been one of the delta replica alone.
        """
        if not self.fits(shard, state, version):
            return None
        again = list[Effect]()
        for update in self._outstanding.values():
            if shard in update.missing:
                again.append(update.orders[shard])
                update.since[shard] = now
            job = update.job
            if isinstance(job, UpdateJob) and job.round is UpdateRound.REHEARSE:
                update.note_made(shard, made=version < state.version == self._computing)
                again += update.ask_again(shard, now)
        self.versions[shard - 1] = state.version
        self._proofs.forget(shard)
        return again

    def lost(self, shard: int) -> None:
        """Note that a follower is lost: from here on it is waited for until it is back."""
        for update in self._outstanding.values():
            update.since.pop(shard, None)

    def late(self, now: float, patience: Callable[[int], float]) -> dict[int, str]:
        """Return the followers that have not done what they were ordered in time, with the reason.

        ``patience``: returns the seconds that they have, given the bytes that are read and written.
        """
        found = dict[int, str]()
        for update in self._outstanding.values():
            for shard in update.missing & update.since.keys():
                waited = now - update.since[shard]
                if waited > patience(update.job.cost + self._placement.layouts[shard].nbytes):
                    found[shard] = (
                        f"it answers, and has not done its part of update {update.ticket}, of"
                        f" version {self._computing}, in {waited:.0f} s"
                    )
        return found

    def concerns(self, event: Applied) -> bool:
        """Return whether the lead's part of the outstanding update was done."""
        return event.ticket in self._outstanding

    def applied(self, event: Applied) -> Applied | list[Effect]:
        """Take the lead's sums; return `Applied` if all shards are done, else what is to follow."""
        update = self._outstanding[event.ticket]
        job = update.job
        if isinstance(job, UpdateJob) and job.round is UpdateRound.REHEARSE:
            self._proofs.renew(0, job.store.guard.proof)
        return self._take(update, 0, event.sums, event.time)

    def done(self, event: Reported, message: UpdateDone) -> Applied | list[Effect]:
        """Take a follower's sums; return the same.

        Raises
        ------
        RemoteProtocolError
            When that was not ordered, its sums are of other tensors, or its proof is none.
        """
        update, placement = self._outstanding.get(message.id), self._placement
        if update is None or event.shard not in update.missing:
            raise RemoteProtocolError(f"shard {event.shard} did update {message.id} unasked")
        shard, sums, job = event.shard, read_sums(message.sums, event.shard), update.job
        match job:
            case ReplicaJob():
                check_count(sums, shard, len(placement.layouts[shard].tensors))
            case CaptureJob() | EvaluationJob():
                check_count(sums, shard, 0)
            case MeasureJob():
                check_count(sums, shard, self._measuring.length(job, shard))
                self._measuring.check(sums, shard)
            case UpdateJob(round=UpdateRound.REHEARSE):
                check_count(sums, shard, 1)
                self._take_proof(shard, update, job, message, int(sums[0]))
            case UpdateJob(round=UpdateRound.MEASURE):
                check_count(sums, shard, 0, len(update.sums[shard]))
                check_squares(sums, shard)
            case UpdateJob():
                sizes = placement.sizes(shard, job.touched)
                check_count(sums, shard, 0, len(sizes))
                check_statistic(sums, sizes, shard)
                self.versions[shard - 1] = self._computing
                self._measuring.computed(shard, self._computing, message.seed, message.values)
        return self._take(update, shard, sums, event.time)

    def _take(self, update: _Update, shard: int, sums: Ints, time: float) -> Applied | list[Effect]:
        placement, job = self._placement, update.job
        if len(sums):
            update.sums[shard] = sums
        update.missing.discard(shard)
        if update.missing:
            return []
        update.begun |= update.asked
        if isinstance(job, UpdateJob) and job.round is UpdateRound.MEASURE:
            return self._clip(update, job, time)
        if isinstance(job, UpdateJob) and job.round is UpdateRound.REHEARSE:
            bad = [placement.firsts[n] + int(m[0]) for n, m in enumerate(update.sums) if m[0] >= 0]
            if bad:
                return self._refuse(update, job, min(bad), time)
            return self._issue(update, job, UpdateRound.STEP, placement.used, time)
        del self._outstanding[update.ticket]
        if isinstance(job, MeasureJob):  # most followers have done nothing
            return Applied(time, update.ticket, self._measuring.joined(job, update.sums))
        self.completed = update.ticket
        if isinstance(job, ReplicaJob):
            return Applied(time, update.ticket, np.concatenate(update.sums))
        if isinstance(job, CaptureJob | EvaluationJob):
            return Applied(time, update.ticket, NONE)
        return Applied(time, update.ticket, placement.sums(job.touched, update.sums))

    def _take_proof(
        self, shard: int, update: _Update, job: UpdateJob, message: UpdateDone, bad: int
    ) -> None:
        """Check and note how far a follower's proof reaches, after it has rehearsed a step."""
        others = update.made - {shard}
        if bad >= 0 and others:
            raise RemoteProtocolError(
                f"shard {shard} would refuse update {message.id}, which shard {min(others)} has"
                " made"
            )
        if not -1 <= bad < len(self._placement.layouts[shard].tensors):
            raise RemoteProtocolError(f"shard {shard} has rehearsed tensor {bad}")
        try:
            proof = Proof.unpacked(message.proof, len(job.store.rule.scalars))
        except ValueError as error:
            raise RemoteProtocolError(f"update_done.proof of shard {shard}: {error}") from None
        self._proofs.renew(shard, proof)

    def _clip(self, update: _Update, job: UpdateJob, now: float) -> list[Effect]:
        """Go on with a gradient whose norms have been measured, with the factors to clip it."""
        measured = [mine.view(np.float64).tolist() for mine in update.sums]
        squares = [sum(each) for each in zip(*measured, strict=True)]
        noted = self.on_measured(update.ticket, squares)
        clip(job, squares)
        return [*noted, *self._rehearse(update, job, now)]

    def _rehearse(self, update: _Update, job: UpdateJob, now: float) -> list[Effect]:
        """Order a rehearsal of the shards that have no proof; if all have one, the step."""
        lacking = list[int]()
        if job.target is not None:
            direct = job.gradient is not None and job.weights is None
            known = job.sent is None or not self._of_replica(job.sent)
            push = update.push if direct else 0
            lacking = self._proofs.lacking(job, push, known=known)
        if lacking:
            return self._issue(update, job, UpdateRound.REHEARSE, lacking, now)
        return self._issue(update, job, UpdateRound.STEP, self._placement.used, now)

    def _refuse(self, update: _Update, job: UpdateJob, tensor: int, time: float) -> Applied:
        """Refuse an update: nothing has changed but the sum in progress, which is dropped.

        Followers drop theirs when the next one begins.
        """
        del self._outstanding[update.ticket]
        job.store.updater.drop_sum()
        return Applied(time, update.ticket, refusal(tensor))

    def _have_followed(self, update: _Update, job: ReplicaJob, now: float) -> list[Effect]:
        """Order the followers to bring their parts of the delta replica up to the model."""
        layouts = self._placement.layouts
        update.sums = [np.full(len(each.tensors), UNTOUCHED) for each in layouts]
        work = {REPLICA: job.replica.oldest}
        return self._order(update, job.model.number, work, self._placement.used, now)

    def _order(
        self,
        update: _Update,
        version: int,
        work: dict[str, int],
        shards: Sequence[int],
        now: float,
    ) -> list[Effect]:
        """Order the same work of shards, which leaves the model at this version."""
        update.missing, self._computing = set(shards), version
        for shard in shards[1:]:
            at = version if shard in self._placement.used else 0  # it has rows of tables alone
            update.orders[shard] = Order(shard, RunUpdate(update.ticket, 0, at, work))
        return update.ordered(now)

    def _issue(
        self,
        update: _Update,
        job: UpdateJob,
        round: UpdateRound,
        shards: Iterable[int],
        now: float,
    ) -> list[Effect]:
        """Order some shards to do a round of an update; return the lead's own part, too."""
        placement, sizes = self._placement, self._placement.layout.sizes
        job.round, update.orders = round, {}
        update.asked, update.missing = set(shards), set(shards)
        if round is UpdateRound.REHEARSE:
            update.sums = [_FINITE] * len(placement)
        else:
            rows = [placement.rows(shard, job.touched) for shard in range(len(placement))]
            lengths = [mine.stop - mine.start for mine in rows]
            if round is UpdateRound.MEASURE and job.clip is not None:
                lengths = [len(job.clip.limits)] * len(placement)
            update.sums = [np.zeros(length, np.int64) for length in lengths]
        sent = -1 if job.sent is None else job.sent.number
        replica = job.sent is not None and self._of_replica(job.sent)
        collected = job  # for a shard that has the gradient in its sum
        if job.weights is not None and update.begun:
            collected = replace(job, gradient=None, weights=None, begins_sum=False)
        for shard in sorted(update.asked - {0}):
            theirs = collected if shard in update.begun else job
            work = work_of(theirs, shard, placement, sent=sent, replica=replica)
            pushed = job.pushed[placement.rows(shard, job.pushed)]
            number = 0 if theirs.gradient is None else update.push
            if not sizes[pushed].any():  # empty pieces: no portion was sent
                number = 0
                work.pop("weights", None)
            message = RunUpdate(update.ticket, number, job.store.version, work)
            update.orders[shard] = Order(shard, message)
        mine = [Apply(update.ticket, collected if 0 in update.begun else job)]
        return [*update.ordered(now), *(mine if 0 in update.asked else ())]


def clip(job: UpdateJob, squares: Sequence[float]) -> None:
    """Have a job whose gradient was measured take its step, clipped to its norms."""
    assert job.clip is not None, "only gradients that are clipped are measured"
    job.factor, job.scales = job.clip.clipped(job.factor, squares)
    job.clip = None
    if job.weights is not None:  # the first round has added it to the sum
        job.gradient = job.weights = None
        job.begins_sum = False
