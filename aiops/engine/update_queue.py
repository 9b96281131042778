"""Queue gradients, collect the sum in progress, and issue one update at a time.

The policy decides about each gradient when its turn comes, in the order of arrival. Everything
about an update (its version, the staleness of its gradient, its target) is fixed when it is issued.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

import numpy as np

from aiops.algorithms.base import APPLY, Algorithm, Decision, Immediate, Policy, repeatable
from aiops.engine.events import Applied, Apply, Effect, Note, WakeAt
from aiops.engine.gradient_cache import CachedGradient, GradientCache
from aiops.engine.membership import Membership
from aiops.engine.receive import PushSink
from aiops.engine.replies import PendingPush, Replies
from aiops.errors import Refused, StaleGradient, Unavailable
from aiops.model.layout import Array, Cover, Ints
from aiops.store.delta_replica import ReplicaJob
from aiops.store.parameters import Store, UpdateJob
from aiops.store.snapshots import Lease, Version
from aiops.store.sparse_table import TableJob

_EXACT = 1024
"""A staleness below this is a bin of its own in the histogram; above, bins are powers of two."""


class QueuedWork(Protocol):
    """Work on rows of a table or on the delta replica, which takes its turn among the updates."""

    def issue(self) -> TableJob | ReplicaJob:
        """Return the job, now that its turn has come."""

    def applied(self, sums: Ints) -> None:
        """Take the result of the job."""


class UpdateQueue:
    """The updates of one engine.

    Parameters
    ----------
    algorithm, workers
        They give policy, learning rates and modulation.
    crew
        The members, and the workers that a barrier waits for.
    answers
        Acknowledges or refuses pushes.
    effects
        The engine's list of effects, appended to.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        workers: int | None,
        crew: Membership,
        answers: Replies,
        effects: list[Effect],
    ) -> None:
        self._algorithm, self._crew, self._answers = algorithm, crew, answers
        self._effects = effects
        self._policy = algorithm.policy(workers)
        self._rate = algorithm.rates(workers)
        self._linear = algorithm.linear
        self._recompute = bool(algorithm.plan(workers).get("recompute"))
        self._store: Store | None = None
        self._queue: deque[PendingPush | Decision | QueuedWork] = deque()
        self._outstanding: tuple[int, UpdateJob, PendingPush | None, Decision] | None = None
        self._working: tuple[int, QueuedWork] | None = None  # the same for rows and the replica
        self._tickets = 0
        self._stopping = False
        self._sum = np.zeros(0, bool)  # the tensors that the sum in progress holds
        self._collected = 0
        self._modulated = np.zeros((2, 0))  # of that sum, per tensor: modulations, gradients
        self._even: dict[int, tuple[Array, float, Array]] = {}  # a cache of `_steps`, by staleness
        self._level_scalars: tuple[int, Array | None] = (-1, None)  # a cache of `_scalars`
        self._sent: Lease | None = None  # on what the update reads, if no member has one
        self.recall = GradientCache(0)
        self.held: list[PendingPush] = []  # used; answered when the policy lets them go
        self._held_since = 0.0
        # Thousands of workers make each `waited_for` slow, and most policies have no use for it:
        # it is computed only for policies that override `workers_changed`. `_told`: the last one.
        self._immediate = type(self._policy).push is Immediate.push
        self._listens = type(self._policy).workers_changed is not Policy.workers_changed
        self._told: frozenset[int] = frozenset()
        self.staleness: Counter[int] = Counter()  # gradients used, by bin
        self.total_staleness = 0  # of all gradients used
        self.ignored = 0  # gradients
        self.now = 0.0

    @property
    def idle(self) -> bool:
        """True if no work is outstanding and none queued."""
        return self._outstanding is None and self._working is None and not self._queue

    @property
    def working(self) -> bool:
        """True if work on rows or on the delta replica is outstanding."""
        return self._working is not None

    @property
    def reads(self) -> Version | None:
        """The version that the outstanding update reads, if no member holds it."""
        return self._sent.version if self._sent is not None else None

    def begin(self, store: Store) -> None:
        """Take the store of the model, now that it is defined."""
        self._store = store
        self._sum = np.zeros(len(store.layout.tensors), bool)
        self._modulated = np.zeros((2, len(store.layout.tensors)))

    @property
    def answers_at_once(self) -> bool:
        """True if algorithm and rule allow updates `at_once`."""
        assert self._store is not None
        clip, reads = self._algorithm.clip, self._store.rule.reads
        return repeatable(self._policy) and not (clip or reads or self.recall.bound)

    # ------------------------------------------------------------ events

    def at_once(self, worker: int, staleness: int) -> tuple[Array, Array | None] | None:
        """Begin an update of all tensors with one gradient, which the caller carries out at once.

        Returns
        -------
        tuple or None
            The learning rate of each tensor, and the rule's scalars. None if the gradient must wait
            its turn, or the policy decides anything but `APPLY`; then nothing has begun.
        """
        if self._outstanding or self._working or self._queue or self.held or self._collected:
            return None
        if self._stopping or (
            not self._immediate and self._policy.push(worker, staleness) != APPLY
        ):
            return None
        store = self._store
        assert store is not None
        rate = self._rate(store.current.number)
        known = self._even.get(staleness)
        if known is None or known[1] != rate:
            known = self._even_steps(staleness, rate)
        self._tickets += 1
        self.staleness[staleness if staleness < _EXACT else _bar(staleness)] += 1
        self.total_staleness += staleness
        return known[2], self._scalars(store.layout.all) if store.rule.scalars else None

    @property
    def tickets(self) -> int:
        """The number of the last update that was begun."""
        return self._tickets

    def push(self, pending: PendingPush) -> None:
        """Queue a gradient that passed every check."""
        self._answers.pending[pending.member.client, pending.message.seq] = pending
        self._queue.append(pending)
        if pending.member.excused:
            pending.member.excused = False
            self.crew_changed()
        self._advance()

    def work(self, work: QueuedWork, *, first: bool = False) -> None:
        """Queue work on rows or on the delta replica (``first``: at the head)."""
        if first:
            self._queue.appendleft(work)
        else:
            self._queue.append(work)
        self._advance()

    def crew_changed(self) -> None:
        """Give the policy the set of workers that are waited for, if it has changed."""
        if self._stopping:
            return
        if self._listens:
            waited_for = self._crew.waited_for()
            if waited_for == self._told:
                return
            self._told = waited_for
            verdict = self._policy.workers_changed(waited_for)
            if verdict is not None:
                self._queue.appendleft(verdict)
                self._advance()
        if self.held and self._store is not None and self._store.readable:
            self._let_go(published=False)

    def tick(self) -> None:
        """Stop waiting for workers that are overdue."""
        if not self.held:
            return
        crew = self._crew
        for member in crew.overdue(self.now, self._held_since, self._given()):
            member.excused = True
            self._effects.append(
                Note(
                    f"worker {member.name!r} has not pushed for {crew.deadline:g} s:"
                    " the others no longer wait for it (--worker-deadline)"
                )
            )
        if crew.awaited and self.now - self._held_since >= crew.deadline:
            self._effects.append(
                Note(
                    f"{crew.awaited} of {crew.expected} workers have not come within"
                    f" {crew.deadline:g} s: going on without them"
                )
            )
            crew.late = True
        self.crew_changed()
        self._wake()  # for the worker that is overdue next

    def stop(self) -> None:
        """Answer held pushes: refused, unless their step is in a published version."""
        self._stopping = True
        held, self.held = self.held, []
        for pending in held:
            if pending.made:
                self.held.append(pending)
            else:
                self._answers.refuse(pending, _not_made())
        if self.held and self._store is not None and self._store.readable:
            self._let_go(published=False)

    def applied(self, event: Applied) -> None:
        """Publish the version that the kernel wrote, and send the answers that waited for it."""
        if self._working is not None:
            ticket, work = self._working
            assert ticket == event.ticket, "Applied answers another Apply than the outstanding one"
            self._working = None
            work.applied(event.sums)
            self._advance()
            return
        assert self._outstanding is not None
        assert self._store is not None
        ticket, job, item, verdict = self._outstanding
        assert ticket == event.ticket, "Applied answers another Apply than the outstanding one"
        self._outstanding = None
        published = job.target is not None
        if job.target is not None:
            self._store.commit(job.target, job.touched, event.sums)
        if item is not None and not verdict.hold:
            item.made = published
            self._answers.acknowledge(item)
        elif item is not None:
            self._answer_or_hold(item, published)
        if published:
            if self._collected:
                self._collected = 0
                self._sum[:] = False
                self._modulated[:] = 0
            if self._sent is not None:
                self._sent.release()
                self._sent = None
            if self.held:
                self._let_go(published=True)
            if self._answers.readers:
                self._answers.readable_again()
        if item is not None and isinstance(item.sink, PushSink):
            if self.recall.bound:
                self.recall.keep(item.member.number, item.sink)
            else:
                item.sink.free()
        # Last: the next update may be in place, and the answers above read the current version.
        if self._queue:
            self._advance()

    # ------------------------------------------------------------ inside

    def _answer_or_hold(self, item: PendingPush, published: bool) -> None:
        item.made = published
        ending = self._stopping and published
        if ending or self._policy.may_go(item.member.number, published):
            self._answers.acknowledge(item)
        elif self._stopping:
            self._answers.refuse(item, _not_made())
        else:
            if not self.held:
                self._held_since = self.now
            self.held.append(item)
            self._wake()

    def _let_go(self, *, published: bool) -> None:
        """Acknowledge the held pushes whose workers the policy lets go."""
        held, self.held = self.held, []
        for pending in held:
            if self._policy.may_go(pending.member.number, published) or self._stopping:
                self._answers.acknowledge(pending)
            else:
                self.held.append(pending)

    def _wake(self) -> None:
        due = self._crew.next_deadline(self._held_since, self._given()) if self.held else None
        if due is not None:
            self._effects.append(WakeAt(due))

    def _given(self) -> frozenset[int]:
        return frozenset(pending.member.number for pending in self.held)

    def _advance(self) -> None:
        """Issue the next job, if none is outstanding."""
        while self._outstanding is None and self._working is None and self._queue:
            item = self._queue.popleft()
            if isinstance(item, Decision):
                self._issue(None, item)
                continue
            if not isinstance(item, PendingPush):
                self._tickets += 1
                self._working = (self._tickets, item)
                self._effects.append(Apply(self._tickets, item.issue()))
                continue
            if isinstance(item.sink, CachedGradient) and item.sink.gradient is None:
                self._answers.acknowledge(item, used=False)
                continue
            store = self._store
            assert store is not None, "no client can push before the model is defined"
            level, base = store.current.level, item.sink.cover.level
            if level is not None and base is not None:
                item.staleness, stale = level - base, None
                item.mean_staleness = float(level - base)
            else:
                stale = self._note_staleness(item)
            if self._immediate:
                verdict = APPLY
            else:
                verdict = self._policy.push(item.member.number, item.staleness)
            if verdict.use and store.rule.reads:
                verdict = self._alone(verdict)
            if verdict.use:
                self._issue(item, verdict, stale)
            elif not verdict.why:
                self.ignored += 1
                self._answers.acknowledge(item, used=False)
                item.sink.free()
            else:
                kind = StaleGradient if self._recompute else Refused
                self._answers.refuse(item, kind(verdict.why, staleness=item.staleness))

    def _alone(self, verdict: Decision) -> Decision:
        """Refuse to collect: the rule reads what each single gradient's worker was sent."""
        if verdict.divide == 1 and not self._collected:
            return verdict
        why = (
            f"{self._algorithm.name}: its rule reads what each gradient's worker was sent, so its"
            " policy must take a step with each gradient alone, at once (divide=1)"
        )
        return Decision(False, why=why)

    def _note_staleness(self, item: PendingPush) -> Ints | None:
        """Fill in a push's staleness; return it per tensor if the tensors differ in it."""
        assert self._store is not None
        cover, current = item.sink.cover, self._store.current
        stale = current.tensor_versions[cover.tensors] - cover.bases
        bytes_each = self._store.layout.nbytes_each[cover.tensors]
        item.staleness = int(stale.max())
        # In float64: billions of updates times billions of bytes are more than an int64 holds.
        item.mean_staleness = float((stale * bytes_each.astype(float)).sum() / bytes_each.sum())
        return stale if item.staleness != int(stale.min()) else None

    def _steps(
        self, cover: Cover, staleness: int, stale: Ints | None, rate: float
    ) -> tuple[Array, Array]:
        """Return the modulation of each tensor covered, and with it its learning rate."""
        if stale is not None:
            scales = np.array([self._algorithm.modulation(int(tau)) for tau in stale])
            return scales, scales * rate
        known = self._even.get(staleness)
        if known is None or known[1] != rate:
            known = self._even_steps(staleness, rate)
        if cover.whole:
            return known[0], known[2]
        count = len(cover.tensors)
        return known[0][:count], known[2][:count]

    def _even_steps(self, staleness: int, rate: float) -> tuple[Array, float, Array]:
        """Compute and cache modulations and learning rates for tensors of equal staleness."""
        assert self._store is not None
        if len(self._even) > 1024:
            self._even.clear()
        scales = np.full(len(self._store.layout.tensors), self._algorithm.modulation(staleness))
        known = self._even[staleness] = (scales, rate, scales * rate)
        return known

    def _scalars(self, touched: Ints) -> Array | None:
        """Return the rule's scalars for the next update of each tensor, if it has any."""
        store = self._store
        assert store is not None
        if not store.rule.scalars:
            return None
        level = store.current.level
        if level is None:
            versions = store.current.tensor_versions[touched].tolist()
            rows = {version: self._algorithm.scalars(version + 1) for version in set(versions)}
            return np.array([rows[version] for version in versions], np.float64)
        if self._level_scalars[0] != level:
            row = np.array(self._algorithm.scalars(level + 1), np.float64)
            self._level_scalars = level, np.tile(row, (len(store.layout.tensors), 1))
        found = self._level_scalars[1]
        assert found is not None
        return found if touched is store.layout.all else found[: len(touched)]

    def _read(self, store: Store, item: PendingPush) -> Version:
        """Return the version that the rule reads beside the parameters, which the worker was sent.

        If it is not held any more (the connection was lost meanwhile), this is the current version.
        """
        cover, lease = item.sink.cover, item.member.sent
        if lease is not None:
            versions = lease.version.tensor_versions[cover.tensors]
            if np.array_equal(versions, cover.bases):
                return lease.version
        self._sent = store.lease()  # it also keeps the update from being done in place
        return self._sent.version

    def _issue(
        self, item: PendingPush | None, verdict: Decision, stale: Ints | None = None
    ) -> None:
        """Fix everything about the next update, and issue its `Apply`."""
        store = self._store
        assert store is not None
        direct = verdict.divide == 1 and not self._collected and item is not None
        gradient = None if item is None else item.sink.take()
        job = UpdateJob(store, store.cost, gradient=gradient)
        if item is not None:
            cover, staleness = item.sink.cover, item.staleness
            job.pushed = cover.tensors
            self.staleness[staleness if staleness < _EXACT else _bar(staleness)] += 1
            self.total_staleness += staleness
            rate, known = self._rate(store.current.number), self._even.get(staleness)
            if stale is None and cover.whole and known is not None and known[1] == rate:
                scales, _rate, steps = known
            else:
                scales, steps = self._steps(cover, staleness, stale, rate)
            if direct:
                job.steps, job.touched = steps, cover.tensors
                if store.rule.reads:
                    job.sent = self._read(store, item)
            else:
                job.weights = scales if self._linear else np.ones(len(cover.tensors))
                self._sum[cover.tensors] = True
                self._modulated[0, cover.tensors] += scales
                self._modulated[1, cover.tensors] += 1
                self._collected += 1
        if verdict.divide is not None:
            if not direct:
                touched = np.flatnonzero(self._sum)
                job.touched = store.layout.all if len(touched) == len(self._sum) else touched
                job.steps = self._collected_steps(touched)
                job.factor = 1.0 / verdict.divide
            job.clip = self._algorithm.clip
            if store.rule.scalars:
                job.scalars = self._scalars(job.touched)
            job.target = store.begin()
        self._tickets += 1
        self._outstanding = (self._tickets, job, item, verdict)
        self._effects.append(Apply(self._tickets, job))

    def _collected_steps(self, touched: Ints) -> Array:
        """Return the learning rate of each tensor for a step with the collected sum."""
        assert self._store is not None
        steps = np.full(len(touched), self._rate(self._store.version))
        if not self._linear:  # gradients that were weighted have their modulation already
            steps *= self._modulated[0, touched] / self._modulated[1, touched]
        return steps


def _bar(staleness: int) -> int:
    """Return the histogram bin of a large staleness: the power of two at or below it."""
    return 1 << (staleness.bit_length() - 1)


def _not_made() -> Unavailable:
    return Unavailable("the server is shutting down; the step was not made")
