"""Queue gradients, collect the sum in progress, and issue one update at a time.

The policy decides about each gradient when its turn comes, in the order of arrival. Everything
about an update (its version, the staleness of its gradient, its target) is fixed when it is issued.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.algorithms.base import APPLY, Algorithm, Decision, Immediate, Policy, repeatable
from aiops.engine import validation
from aiops.engine.client_plan import ClientPlan
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.events import Applied, Apply, Effect, Note, OnApplied, Received
from aiops.engine.gradient_cache import CachedGradient, GradientCache
from aiops.engine.held_pushes import HeldPushes
from aiops.engine.membership import Member
from aiops.engine.receive import PushSink
from aiops.engine.recent_staleness import RecentStaleness
from aiops.engine.replies import PendingPush, Replies
from aiops.engine.run_warnings import RunWarnings
from aiops.engine.schedule_position import SchedulePosition
from aiops.errors import BadPush, Refused, StaleGradient
from aiops.filters.screen import PushScreen
from aiops.kernels.scan import largest_magnitude
from aiops.model.arena import Arena
from aiops.model.layout import Array, Cover, Ints
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import ReplicaJob
from aiops.store.finite_guard import LIMIT, magnitude, refused_tensor
from aiops.store.gradient import Gradient
from aiops.store.parameters import MeasureJob, Store, UpdateJob
from aiops.store.snapshots import Lease, Version
from aiops.store.sparse_table import CopyRowsJob, TableJob
from aiops.wire.messages import Push, Reapply

_EXACT = 1024
"""A staleness below this is a bin of its own in the histogram; above, bins are powers of two."""

_BARRED = "its examples count with a push of another worker"
_NOT_KEPT = "the server does not keep this worker's last gradient any more"


class QueuedWork(Protocol):
    """Work on rows of a table or on the delta replica, which takes its turn among the updates."""

    def issue(self) -> tuple[TableJob | CopyRowsJob | ReplicaJob, OnApplied]:
        """Return the job, now that its turn has come, and the function that takes its result."""


QueueItem: TypeAlias = PendingPush | Decision | CaptureJob | QueuedWork
"""What takes its turn: a gradient, a step that the policy decided on alone, or other work."""


class Pace:
    """Updates per second over the last ten seconds or so."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[float, int]] = deque(maxlen=12)  # (time, version then)
        self.due = -math.inf  # when a version is to be noted again

    def note(self, now: float, version: int) -> None:
        """Note the version at a time; more than once a second is ignored."""
        if now >= self.due:
            self._seconds.append((now, version))
            self.due = now + 1

    def state(self) -> list[Any]:
        """Return the versions noted and the next time as plain values, for `restore`."""
        return [self.due, list(self._seconds)]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self.due = state[0]
        self._seconds.extend((time, version) for time, version in state[1])

    def rate(self, now: float, version: int) -> float:
        """Return updates per second."""
        if not self._seconds:
            return 0.0
        since, before = self._seconds[0]
        return (version - before) / max(now - since, 1e-9)


class UpdateQueue:
    """The updates of one engine.

    Parameters
    ----------
    algorithm, workers
        They give learning rates and modulation.
    policy
        Decides about each gradient.
    store
        The parameters.
    replies
        Acknowledges or refuses pushes.
    held
        Holds answers back.
    warnings
        Those that depend on the statistic are given before an update.
    delta_replies
        Its updates of the delta replica come before all that is queued; None: there is none.
    plan
        The client plan.
    screen
        Measures pushes, and decides which are used (``--filter``); None: all are.

    Attributes
    ----------
    staleness, total_staleness
        The histogram of the gradients used, by bin; and the sum.
    ignored
        Gradients that the policy ignored.
    tickets
        The number of the last update that was begun.
    closed
        The reason for which no pushes are taken, as a sentence; empty: they are.
    paused
        Whether that is a pause, during which no worker is overdue.
    pace
        Updates per second.
    mean_staleness
        The one of late, if the rule has scalars.
    recall
        The gradients kept to be applied again.
    position
        Where the schedule of the learning rate is; None: it counts updates.
    warnings
        As above.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        workers: int | None,
        policy: Policy,
        store: Store,
        replies: Replies,
        held: HeldPushes,
        warnings: RunWarnings,
        delta_replies: DeltaReplies | None,
        plan: ClientPlan,
        screen: PushScreen | None = None,
    ) -> None:
        self._algorithm, self._policy, self._store = algorithm, policy, store
        self._replies, self._delta_replies = replies, delta_replies
        self.held, self.recall, self.pace = held, GradientCache(plan.recall), Pace()
        self.recent_staleness = RecentStaleness()
        self._screen, self.warnings = screen, warnings
        warnings.begin(store)
        self._dtypes = [section.dtype for section in store.layout.sections]
        self._immediate = type(policy).push is Immediate.push
        self._rate = algorithm.rates(workers)
        self.position = SchedulePosition.of(algorithm, workers, plan.most_batches)
        self._linear = algorithm.linear
        self._trims = bool(algorithm.trimming(workers).share)
        self._recompute = bool(plan.fields.get("recompute"))
        self._queue: deque[QueueItem] = deque()
        self._outstanding: tuple[int, UpdateJob, PendingPush | None, Decision] | None = None
        self._working: tuple[int, OnApplied] | None = None  # the same for rows and the replica
        self.tickets = 0
        self.closed, self.paused = "", False
        tensors = len(store.layout.tensors)
        self._factors, self._own_scalars = algorithm.numbers_of(store.layout.tensors)
        self._sum = np.zeros(tensors, bool)  # the tensors that the sum in progress holds
        self._collected = 0
        self._modulated = np.zeros((2, tensors))  # of that sum, per tensor: modulations, gradients
        self._even: dict[int, tuple[Array, float, Array]] = {}  # a cache of `_steps`, by staleness
        self._level_scalars: tuple[int, float, Array | None] = (-1, 0.0, None)  # of `_scalars`
        self._sent: Lease | None = None  # on what the update reads
        self.staleness: Counter[int] = Counter()
        self.total_staleness = 0
        self.ignored = 0

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
        """The version that the outstanding update reads beside the current one, or None."""
        return self._sent.version if self._sent is not None else None

    # ------------------------------------------------------------ the steady exchange

    @property
    def answers_at_once(self) -> bool:
        """True if algorithm and rule allow updates `at_once`."""
        clip, reads = self._algorithm.clip, self._store.rule.reads
        return repeatable(self._policy) and not (clip or reads or self.recall.bound)

    def at_once(
        self,
        worker: int,
        base: int,
        staleness: int,
        gradient: Arena,
        surveyed: Sequence[int],
        now: float,
    ) -> tuple[Array, Array | None] | None:
        """Begin an update of all tensors with one gradient, which the caller carries out at once.

        Parameters
        ----------
        worker, base, staleness
            Of the gradient.
        gradient
            It.
        surveyed
            What the `Surveyor` of each section returned.
        now
            The time, in seconds.

        Returns
        -------
        tuple or None
            The learning rate of each tensor, and the rule's scalars. None if the gradient must wait
            its turn, the policy decides anything but `APPLY`, the result may not be finite, or a
            filter objects; then nothing has begun.
        """
        held = self.held
        if self._outstanding or self._working or self._queue or held.pushes or self._collected:
            return None
        if self.warnings.due:
            return None
        if self.closed or (not self._immediate and self._policy.push(worker, staleness) != APPLY):
            return None
        store = self._store
        current = store.current
        position = self.position
        if position is None:
            rate = self._rate(current.number)
        else:
            position.now = now
            rate = self._rate(position.at(1))
        known = self._even.get(staleness)
        if known is None or known[1] != rate:
            known = self._even_steps(staleness, rate)
        scalars = self._scalars(store.layout.all) if store.rule.scalars else None
        guard = store.guard
        largest = magnitude(gradient.sections) if guard.narrow else LIMIT
        if not guard.covers(known[2], scalars, largest):
            return None  # the update is rehearsed first, or a new proof is sought
        screen = self._screen
        if screen is not None:  # the last condition: what the filters admit they have noted
            largest = max(map(largest_magnitude, surveyed, self._dtypes))
            if not screen.admits(worker, gradient.data, base, largest, current):
                return None
        if position is not None:
            position.used(1)
            position.end(published=True)
        self.tickets += 1
        self.staleness[staleness if staleness < _EXACT else _bar(staleness)] += 1
        self.total_staleness += staleness
        if scalars is not None:
            self.recent_staleness.note(staleness)
        return known[2], scalars

    def worked(self, now: float) -> None:
        """Count work on rows that was done at once."""
        self.tickets += 1
        if now >= self.pace.due:
            self.pace.note(now, self._store.version)

    def _count(self, staleness: int, count: int) -> None:
        """Count a gradient that is used, or (-1) that is not after all."""
        self.staleness[staleness if staleness < _EXACT else _bar(staleness)] += count
        self.total_staleness += count * staleness

    # ------------------------------------------------------------ events

    def push(self, event: Received, member: Member) -> list[Effect]:
        """Queue a gradient, or (`Reapply`) the worker's last one.

        A push that has come before is answered from memory, and one that does not fit is refused.
        """
        message, sink, now = event.message, event.sink, event.time
        assert isinstance(message, Push | Reapply)
        if message.seq <= member.last_seq:
            if isinstance(sink, PushSink):
                sink.free()
            return self._replies.repeat(event, member) + self.advance(now)
        barred = bool(member.covers) and member.bars(message.seq)
        if type(message) is Push:
            fault = validation.fault(member, self._store, message, sink, self.closed)
            gradient: PushSink | CachedGradient = sink  # type: ignore[assignment]
        else:
            fault = validation.unready(member, self.closed)
            fault = fault or validation.beyond(self._store, message)
            gradient = self.recall.find(member.number)
        if self._screen is not None and fault is None:
            fault = self._screen.fault(member.number)
            member.excused = member.excused or fault is not None
        if fault is not None:
            if isinstance(sink, PushSink):
                sink.free()
            effects = self._replies.refuse_new(event, member, fault)
            return effects + (self.workers_changed(now) if self._screen is not None else [])
        if barred:
            if isinstance(gradient, PushSink):
                gradient.free()
            gradient = CachedGradient(None)  # it is acknowledged in its turn, and not used
        member.last_seq = message.seq
        push = PendingPush(event.peer, message, gradient, member, row=event.row)
        self._replies.pending[member.client, message.seq] = push
        self._queue.append(push)
        if member.excused:
            member.excused = False
            return self.workers_changed(now)
        return self.advance(now)

    def work(self, work: QueuedWork, now: float) -> list[Effect]:
        """Queue work on rows."""
        self._queue.append(work)
        return self.advance(now)

    def capture(self, job: CaptureJob, now: float) -> list[Effect]:
        """Have a capture take the place of the next update."""
        self._queue.appendleft(job)
        return self.advance(now)

    def workers_changed(self, now: float) -> list[Effect]:
        """Give the policy the set of workers that are waited for, if it has changed."""
        held, effects = self.held, list[Effect]()
        if not held.stopping and held.may_have_changed():
            decision = held.decide()
            if decision is not None:
                self._queue.appendleft(decision)
                effects = self.advance(now)
            effects += held.release(now, published=False)
        return effects + self.advance(now)

    def tick(self, now: float) -> list[Effect]:
        """Stop waiting for workers that are overdue."""
        if self.paused or not self.held.pushes:
            return []
        effects = self.held.excuse_overdue(now) + self.workers_changed(now)
        return effects + self.held.wake()  # for the worker that is overdue next

    def stop(self, now: float, *, kept: bool) -> list[Effect]:
        """Answer the pushes that are held, unless the state is ``kept``: no more are taken."""
        answered = [] if kept else self.held.stop(now)
        return answered + self.advance(now)

    def applied(self, event: Applied) -> list[Effect]:
        """Publish the version that the kernel wrote, and send the answers that waited for it."""
        now, store, replies, held = event.time, self._store, self._replies, self.held
        if now >= self.pace.due:
            self.pace.note(now, store.version)
        if self._working is not None:
            return self._work_done(event, *self._working)
        assert self._outstanding is not None, "Applied answers an Apply"
        ticket, job, push, decision = self._outstanding
        assert ticket == event.ticket, "Applied answers another Apply than the outstanding one"
        self._outstanding = None
        effects: list[Effect] = []
        bad = refused_tensor(event.sums)
        published = job.target is not None and bad is None
        if job.target is not None and bad is None:
            store.commit(job.target, job.touched, event.sums)
            if store.total <= self.warnings.total:
                self.warnings.due = True
        if bad is not None:
            effects = self._refuse_step(job, push, bad, now)
        elif push is not None and not decision.hold:
            effects = replies.acknowledge(push, now)
        elif push is not None:
            effects = held.answer_or_hold(push, published, now)
        if published or bad is not None:
            if self.position is not None:
                self.position.end(published=published)
            if self._collected:
                self._collected = 0
                self._sum[:] = False
                self._modulated[:] = 0
            if self._sent is not None:
                self._sent.release()
                self._sent = None
            if held.pushes:
                effects += held.release(now, published=published)
            if replies.readers:
                effects += replies.answer_readers()
        if push is not None and bad is None and isinstance(push.sink, PushSink):
            if self.recall.bound:
                self.recall.keep(push.member.number, push.sink)
            else:
                push.sink.free()
        # Last: the next update may be in place, and the answers above read the current version.
        if self._queue or self._delta_replies is not None:
            effects += self.advance(now)
        return effects

    def _refuse_step(
        self, job: UpdateJob, push: PendingPush | None, bad: int, now: float
    ) -> list[Effect]:
        """Refuse a step whose result is not finite: its push, and all in the sum that are held."""
        store, held = self._store, self.held
        assert job.target is not None, "only steps are refused"
        store.abandon(job.target)
        fault = not_finite(
            store.layout.tensors[bad].name, max(self._collected, 1), self._algorithm.rate_hint
        )
        waiting = [each for each in held.pushes if self._collected and not each.made]
        held.pushes = [each for each in held.pushes if each not in waiting]
        if push is not None:
            waiting.append(push)
        effects: list[Effect] = []
        for each in waiting:
            self._count(each.staleness, -1)
            effects += self._replies.refuse(each, fault, now)
        if self._collected > len(waiting) or push is None:
            effects.append(Note(str(fault)))
        return effects

    def _work_done(self, event: Applied, ticket: int, on_applied: OnApplied) -> list[Effect]:
        """Take the result of work on rows or on the delta replica, or of a capture."""
        assert ticket == event.ticket, "Applied answers another Apply than the outstanding one"
        self._working = None
        return on_applied(event.sums, event.time) + self.advance(event.time)

    # ------------------------------------------------------------ the next update

    def advance(self, now: float) -> list[Effect]:
        """Issue the next job, if none is outstanding."""
        effects: list[Effect] = []
        replica = self._delta_replies
        if self.position is not None:
            self.position.now = now
        while self._outstanding is None and self._working is None:
            if replica is not None and replica.due:
                effects.append(self._issue_work(replica))
                continue
            if not self._queue:
                break
            item = self._queue.popleft()
            if isinstance(item, PendingPush):
                if self._screen is None or isinstance(item.sink, CachedGradient):
                    effects += self._decide(item, now)
                else:
                    effects += self._measure(self._screen, item, item.sink, now)
            elif isinstance(item, Decision):
                effects.append(self._issue(None, item))
            elif isinstance(item, CaptureJob):
                self.tickets += 1
                self._working = (self.tickets, _ignored)
                effects.append(Apply(self.tickets, item))
            else:
                effects.append(self._issue_work(item))
        return effects

    def _issue_work(self, work: QueuedWork) -> Apply:
        self.tickets += 1
        job, on_applied = work.issue()
        self._working = (self.tickets, on_applied)
        return Apply(self.tickets, job)

    def _measure(
        self, screen: PushScreen, push: PendingPush, sink: PushSink, now: float
    ) -> Sequence[Effect]:
        """Have the filters decide on a gradient, which is decoded and measured first if need be."""
        gradient = sink.take()
        if not (gradient.parts or screen.spread):
            return self._measured(screen, push, sink.largest, None, now)
        self.tickets += 1
        self._working = (self.tickets, partial(self._read_sample, screen, push))
        largest = None if gradient.parts else sink.largest
        params = screen.reader(self._store.current)
        job = MeasureJob(self._store, gradient, screen.measure, largest, params)
        return [Apply(self.tickets, job)]

    def _read_sample(
        self, screen: PushScreen, push: PendingPush, sums: Ints, now: float
    ) -> list[Effect]:
        """Take what a `MeasureJob` has measured, on all servers."""
        largest, values = float(sums[:1].view(np.float64)[0]), sums[1:].view(np.float64)
        values, params = np.split(values, [screen.sample.size])
        return self._measured(screen, push, largest, values, now, params if len(params) else None)

    def _measured(
        self,
        screen: PushScreen,
        push: PendingPush,
        largest: float,
        values: Array | None,
        now: float,
        params: Array | None = None,
    ) -> list[Effect]:
        """Have the policy decide about a gradient that passes the filters; ignore another."""
        member, sink = push.member, push.sink
        assert isinstance(sink, PushSink), "gradients that are applied again are not measured"
        payload, current = sink.buffer, self._store.current
        given = payload, sink.cover, largest, values, current, params
        why = screen.judge(member.number, *given)
        if why is None:
            return self._decide(push, now)
        self.ignored += 1
        effects = self._replies.acknowledge(push, now, why)
        push.sink.free()
        if member.number in screen.quarantined:
            text = f"worker {member.name!r} is quarantined: its pushes are refused from now on; of"
            effects.append(Note(f"{text} the last one, {why}"))
            member.excused = True
            effects += self.workers_changed(now)
        return effects

    def _decide(self, push: PendingPush, now: float) -> list[Effect]:
        """Have the policy decide about a gradient; issue its update, or answer it."""
        store, sink, member = self._store, push.sink, push.member
        if isinstance(sink, CachedGradient) and sink.gradient is None:
            missing = _NOT_KEPT if isinstance(push.message, Reapply) else _BARRED
            return self._replies.acknowledge(push, now, missing)
        level, base = store.current.level, sink.cover.level
        if level is not None and base is not None:
            push.staleness, stale = level - base, None
            push.mean_staleness = float(level - base)
        else:
            stale = self._note_staleness(push)
        if self._immediate:
            decision = APPLY
        else:
            decision = self._policy.push(member.number, push.staleness)
        if decision.use and store.rule.reads:
            decision = self._alone(decision)
        if decision.use:
            warned = self.warnings.give(store) if self.warnings.due else []
            return [*warned, self._issue(push, decision, stale)]
        if not decision.why:
            self.ignored += 1
            why = f"{self._algorithm.name} leaves it out: its staleness is {push.staleness:,}"
            effects = self._replies.acknowledge(push, now, why)
            sink.free()
            return effects
        kind = StaleGradient if self._recompute else Refused
        return self._replies.refuse(push, kind(decision.why, staleness=push.staleness), now)

    def _alone(self, decision: Decision) -> Decision:
        """Refuse to collect: the rule reads what each single gradient's worker was sent."""
        if decision.divide == 1 and not self._collected:
            return decision
        why = (
            f"{self._algorithm.name}: its rule reads what each gradient's worker was sent, so its"
            " policy must take a step with each gradient alone, at once (divide=1)"
        )
        return Decision(False, why=why)

    def _note_staleness(self, push: PendingPush) -> Ints | None:
        """Fill in a push's staleness; return it per tensor if the tensors differ in it."""
        cover, store = push.sink.cover, self._store
        stale = store.current.tensor_versions[cover.tensors] - cover.bases
        bytes_each = store.layout.nbytes_each[cover.tensors]
        push.staleness = int(stale.max())
        # In float64: billions of updates times billions of bytes are more than an int64 holds.
        push.mean_staleness = float((stale * bytes_each.astype(float)).sum() / bytes_each.sum())
        return stale if push.staleness != int(stale.min()) else None

    def _issue(
        self, push: PendingPush | None, decision: Decision, stale: Ints | None = None
    ) -> Apply:
        """Fix everything about the next update, and return its `Apply`."""
        store = self._store
        direct = decision.divide == 1 and not self._collected and push is not None
        gradient = None if push is None else push.sink.take()
        job, position = UpdateJob(store, store.cost, gradient=gradient), self.position
        if push is not None and position is not None:  # one applied again is no new example
            position.used(push.message.count if isinstance(push.message, Push) else 0)
        rate = self._rate(store.current.number if position is None else position.at())
        if push is not None:
            cover, staleness = push.sink.cover, push.staleness
            job.pushed = cover.tensors
            self._count(staleness, 1)
            known = self._even.get(staleness)
            if stale is None and cover.whole and known is not None and known[1] == rate:
                scales, _rate, steps = known
            else:
                scales, steps = self._steps(cover, staleness, stale, rate)
            if direct:
                job.steps, job.touched = steps, cover.tensors
                if store.rule.reads:
                    job.sent = self._read(push)
            else:
                job.weights = scales if self._linear else np.ones(len(cover.tensors))
                job.begins_sum = not self._collected
                self._sum[cover.tensors] = True
                self._modulated[0, cover.tensors] += scales
                self._modulated[1, cover.tensors] += 1
                self._collected += 1
        if decision.divide is not None:
            if not direct:
                touched = np.flatnonzero(self._sum)
                job.touched = store.layout.all if len(touched) == len(self._sum) else touched
                job.steps = self._collected_steps(touched, rate)
                job.factor = 1.0 if self._trims else 1.0 / decision.divide  # of a mean, or a sum
            job.clip = self._algorithm.clip
            if store.rule.scalars:
                job.scalars = self._scalars(job.touched)
            job.target = store.begin()
        if push is not None and store.rule.scalars:  # last: those are by the gradients before it
            self.recent_staleness.note(push.staleness)
        self.tickets += 1
        self._outstanding = (self.tickets, job, push, decision)
        return Apply(self.tickets, job)

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

    @property
    def queued(self) -> Sequence[QueueItem]:
        """The queue, which `state` leaves to its caller: its payloads are elsewhere."""
        return tuple(self._queue)

    def state(self, number: Callable[[Gradient], int]) -> dict[str, Any]:
        """Return the sum in progress and the statistics as plain values, for `restore`.

        ``number``: returns the number under which a gradient is kept. No update is outstanding.
        """
        assert self._outstanding is None, "the sum in progress is being changed"
        return {
            "tickets": self.tickets,
            "working": self._working is not None,
            "sum": self._sum.copy(),
            "collected": self._collected,
            "modulated": self._modulated.copy(),
            "staleness": list(self.staleness.items()),
            "totals": [self.total_staleness, self.ignored],
            "pace": self.pace.state(),
            "recent_staleness": self.recent_staleness.state(),
            "recall": self.recall.state(number),
            "screen": None if self._screen is None else self._screen.state(),
            "position": None if self.position is None else self.position.state(),
            "warnings": self.warnings.state(),
        }

    def restore(
        self, state: Mapping[str, Any], gradients: Sequence[Gradient], queue: Iterable[QueueItem]
    ) -> None:
        """Continue from what `state` returned, with this queue and the gradients by number.

        If work was outstanding, it is the `CaptureJob` of that state, and its result is awaited.
        """
        self.tickets = state["tickets"]
        self._working = (self.tickets, _ignored) if state["working"] else None
        self._queue = deque(queue)
        self._sum[:] = state["sum"]
        self._collected = state["collected"]
        self._modulated[:] = state["modulated"]
        self.staleness = Counter(dict(state["staleness"]))
        self.total_staleness, self.ignored = state["totals"]
        self.pace.restore(state["pace"])
        self.recent_staleness.restore(state["recent_staleness"])
        self.recall.restore(state["recall"], gradients)
        if self._screen is not None and state["screen"] is not None:
            self._screen.restore(state["screen"])
        if self.position is not None:
            self.position.restore(state["position"])
        self.warnings.restore(state["warnings"], self._store)

    # ------------------------------------------------------------ learning rates

    def _steps(
        self, cover: Cover, staleness: int, stale: Ints | None, rate: float
    ) -> tuple[Array, Array]:
        """Return the modulation of each tensor covered, and with it its learning rate."""
        if stale is not None:
            scales = np.array([self._algorithm.modulation(int(tau)) for tau in stale])
            steps = scales * rate
            return scales, steps if self._factors is None else steps * self._factors[cover.tensors]
        known = self._even.get(staleness)
        if known is None or known[1] != rate:
            known = self._even_steps(staleness, rate)
        if cover.whole:
            return known[0], known[2]
        count = len(cover.tensors)  # modulations are all the same, and so are rates as a rule
        rows = slice(count) if self._factors is None else cover.tensors
        return known[0][:count], known[2][rows]

    def _even_steps(self, staleness: int, rate: float) -> tuple[Array, float, Array]:
        """Compute and cache modulations and learning rates for tensors of equal staleness."""
        if len(self._even) > 1024:
            self._even.clear()
        scales = np.full(len(self._sum), self._algorithm.modulation(staleness))
        steps = scales * rate
        if self._factors is not None:
            steps *= self._factors
        known = self._even[staleness] = (scales, rate, steps)
        return known

    def _collected_steps(self, touched: Ints, rate: float) -> Array:
        """Return the learning rate of each tensor for a step with the collected sum."""
        steps = np.full(len(touched), rate)
        if self._factors is not None:
            steps *= self._factors[touched]
        if not self._linear:  # gradients that were weighted have their modulation already
            steps *= self._modulated[0, touched] / self._modulated[1, touched]
        return steps

    def _scalars(self, touched: Ints) -> Array | None:
        """Return the rule's scalars for the next update of each tensor, if it has any."""
        store = self._store
        if not store.rule.scalars:
            return None
        level, scalars = store.current.level, self._algorithm.scalars
        mean = self.recent_staleness.mean
        if level is None:
            versions = store.current.tensor_versions[touched].tolist()
            rows = {version: scalars(version + 1, mean) for version in set(versions)}
            mine = np.array([rows[version] for version in versions], np.float64)
            return np.hstack([mine.reshape(len(versions), -1), self._own_scalars[touched]])
        known_level, known_mean, found = self._level_scalars
        if found is None or known_level != level or known_mean != mean:
            row = np.array(scalars(level + 1, mean), np.float64)
            found = np.repeat(row[np.newaxis], len(self._sum), axis=0)
            if self._own_scalars.size:
                found = np.hstack([found, self._own_scalars])
            self._level_scalars = level, mean, found
        return found if touched is store.layout.all else found[touched]


def not_finite(tensor: str, pushes: int, rate: str) -> BadPush:
    """Return the refusal of a step that would make values of a tensor infinite, or NaN.

    ``rate``: the learning rate to look at, in words.
    """
    ofs = "this push" if pushes == 1 else f"these {pushes} pushes, whose sum it was"
    return BadPush(
        f"the update would make {tensor!r} infinite, or not a number: nothing of {ofs} was applied;"
        f" look for a gradient that is too large, or {rate}",
        tensor=tensor,
    )


def _ignored(sums: Ints, now: float) -> list[Effect]:
    """Take the result of work that changes nothing."""
    return []


def _bar(staleness: int) -> int:
    """Return the histogram bin of a large staleness: the power of two at or below it."""
    return 1 << (staleness.bit_length() - 1)
