"""Queue gradients and other work, and issue one job at a time.

The policy decides about each gradient when its turn comes, in the order of arrival. What it uses
becomes an update (`aiops.engine.update_maker`); the answers are sent when that is done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.algorithms.base import APPLY, Algorithm, Decision, Immediate, Policy, repeatable
from aiops.algorithms.checks import no_decision
from aiops.engine import validation
from aiops.engine.client_plan import ClientPlan
from aiops.engine.copy_request import CopyRequest
from aiops.engine.events import Applied, Apply, Effect, Job, Note, OnApplied, Received
from aiops.engine.gradient_cache import CachedGradient, GradientCache
from aiops.engine.held_pushes import HeldPushes
from aiops.engine.membership import Member
from aiops.engine.pace import Pace
from aiops.engine.push_closure import PushClosure
from aiops.engine.receive import PushSink
from aiops.engine.replies import PendingPush, Replies
from aiops.engine.run_warnings import RunWarnings
from aiops.engine.staleness import EXACT, bin_of
from aiops.engine.update_maker import UpdateMaker
from aiops.errors import BadPush, Refused, StaleGradient
from aiops.filters.screen import PushScreen
from aiops.kernels.scan import largest_magnitude
from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints
from aiops.store.capture_job import CaptureJob
from aiops.store.finite_guard import LIMIT, magnitude
from aiops.store.gradient import Gradient
from aiops.store.parameters import MeasureJob, Store
from aiops.wire.fields import MOST_FACTOR
from aiops.wire.messages import Push, Reapply

_BARRED = "its examples count with a push of another worker"
_NOT_KEPT = "the server does not keep this worker's last gradient any more"


class QueuedWork(Protocol):
    """Work on rows of a table, which takes its turn among the updates."""

    def issue(self) -> tuple[Job, OnApplied]:
        """Return the job, now that its turn has come, and the function that takes its result."""


class FollowingCopy(QueuedWork, Protocol):
    """A copy of the model that readers wait for, such as the delta replica.

    Attributes
    ----------
    due
        True if they wait for work that has not been issued yet.
    due_last
        True if there is work to do at the end, when nothing is queued any more.
    """

    @property
    def due(self) -> bool:
        """As above."""

    @property
    def due_last(self) -> bool:
        """As above."""

    def captured(self) -> None:
        """Note that the state is captured now: have nothing that a restored server lacks."""


QueueItem: TypeAlias = PendingPush | Decision | CaptureJob | QueuedWork
"""What takes its turn: a gradient, a step that the policy decided on alone, or other work."""


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
    copied
        The copy that is handed out between two jobs, if one is due.
    copies
        Those of the model, whose work comes before all that is queued.
    plan
        The client plan.
    closure
        Whether pushes are taken. While they are paused, no worker is overdue.
    screen
        Measures pushes, and decides which are used (``--filter``); None: all are.

    Attributes
    ----------
    ignored
        Gradients that the policy ignored.
    tickets
        The number of the last update that was begun.
    pace
        Updates per second.
    recall
        The gradients kept to be applied again.
    maker
        Makes updates of the gradients that are used.
    policy, screen, warnings, closure
        As above.
    immediate
        Whether the policy applies every gradient.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "_on_applied", "_queue", "tickets")

    def __init__(
        self,
        algorithm: Algorithm,
        workers: int | None,
        policy: Policy,
        store: Store,
        replies: Replies,
        held: HeldPushes,
        warnings: RunWarnings,
        copied: CopyRequest,
        copies: Sequence[FollowingCopy],
        plan: ClientPlan,
        closure: PushClosure,
        screen: PushScreen | None = None,
    ) -> None:
        self._algorithm, self.policy, self._store = algorithm, policy, store
        self._replies, self._copies, self._copied = replies, copies, copied
        self.held, self.recall, self.pace = held, GradientCache(plan.recall), Pace()
        self.maker = UpdateMaker(algorithm, workers, store, plan.most_batches)
        self.screen, self.warnings, self.closure = screen, warnings, closure
        warnings.begin(store)
        self._dtypes = [section.dtype for section in store.layout.sections]
        self.immediate = type(policy).push is Immediate.push
        self._recompute = bool(plan.fields.get("recompute"))
        self._queue: deque[QueueItem] = deque()
        self._on_applied: OnApplied | None = None  # of outstanding work that is no update
        self.tickets = 0
        self.ignored = 0

    @property
    def idle(self) -> bool:
        """True if no work is outstanding and none queued."""
        return self.maker.job is None and self._on_applied is None and not self._queue

    @property
    def working(self) -> bool:
        """True if work on rows or on a copy of the model is outstanding."""
        return self._on_applied is not None

    # ------------------------------------------------------------ the steady exchange

    @property
    def answers_at_once(self) -> bool:
        """True if algorithm and rule allow updates `at_once`."""
        clips, reads = self._algorithm.clips, self._store.rule.reads
        return repeatable(self.policy) and not (clips or reads or self.recall.bound)

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
        maker, held, store = self.maker, self.held, self._store
        if maker.job or self._on_applied or self._queue or held.pushes or maker.collected.count:
            return None
        if self.warnings.due or self.closure.why:
            return None
        if not self.immediate and self.policy.push(worker, staleness) != APPLY:
            return None
        steps, scalars = maker.whole(staleness, now)
        guard = store.guard
        largest = magnitude(gradient.sections) if guard.narrow else LIMIT
        if not guard.covers(steps, scalars, largest):
            return None  # the update is rehearsed first, or a new proof is sought
        screen = self.screen
        if screen is not None:  # the last condition: what the filters admit they have noted
            largest = max(map(largest_magnitude, surveyed, self._dtypes))
            if not screen.admits(worker, gradient.data, base, largest, store.current):
                return None
        position, used = maker.position, maker.staleness
        if position is not None:
            position.used(1)
            position.end(published=True)
        self.tickets += 1
        used.bins[staleness if staleness < EXACT else bin_of(staleness)] += 1
        used.total += staleness
        if scalars is not None:
            maker.numbers.recent_staleness.note(staleness)
        return steps, scalars

    def worked(self, now: float) -> None:
        """Count work on rows that was done at once."""
        self.tickets += 1
        if now >= self.pace.due:
            self.pace.note(now, self._store.version)

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
            fault = validation.fault(member, self._store, message, sink, self.closure.why)
            gradient: PushSink | CachedGradient = sink  # type: ignore[assignment]
        else:
            fault = validation.unready(member, self.closure.why)
            fault = fault or validation.beyond(self._store, message)
            gradient = self.recall.find(member.number)
        if message.lr_factors and fault is None:
            fault = self._misfactored(message, gradient)
        if self.screen is not None and fault is None:
            fault = self.screen.fault(member.number)
            member.excused = member.excused or fault is not None
        if fault is not None:
            if isinstance(sink, PushSink):
                sink.free()
            effects = self._replies.refuse_new(event, member, fault)
            return effects + (self.workers_changed(now) if self.screen is not None else [])
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

    def _misfactored(
        self, message: Push | Reapply, gradient: PushSink | CachedGradient
    ) -> BadPush | None:
        if isinstance(gradient, CachedGradient) and gradient.gradient is None:
            return None  # it is not used
        guarded = self.screen is not None or self.maker.trims
        most = 1.0 if guarded else MOST_FACTOR
        return validation.misfactored(message, len(gradient.cover.tensors), most)

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
        if self.closure.paused or not self.held.pushes:
            return []
        effects = self.held.excuse_overdue(now) + self.workers_changed(now)
        return effects + self.held.wake()  # for the worker that is overdue next

    def stop(self, now: float, *, kept: bool) -> list[Effect]:
        """Answer the pushes that are held, unless the state is ``kept``: no more are taken."""
        answered = [] if kept else self.held.stop(now)
        return answered + self.advance(now)

    def applied(self, event: Applied) -> list[Effect]:
        """Publish the version that the kernel wrote, and send the answers that waited for it."""
        now, store, maker, held = event.time, self._store, self.maker, self.held
        if now >= self.pace.due:
            self.pace.note(now, store.version)
        assert event.ticket == self.tickets, (
            "Applied answers another Apply than the outstanding one"
        )
        if self._on_applied is not None:
            on_applied, self._on_applied = self._on_applied, None
            return on_applied(event.sums, now) + self.advance(now)
        push, decision, collected = maker.push, maker.decision, maker.collected.count
        assert decision is not None, "Applied answers an Apply"
        published, bad = maker.end(event.sums)
        effects: list[Effect] = []
        if published and store.total <= self.warnings.total:
            self.warnings.due = True
        if bad is not None:
            effects = self._refuse_step(bad, push, collected, now)
        elif push is not None and not decision.hold:
            effects = self._replies.acknowledge(push, now)
        elif push is not None:
            effects = held.answer_or_hold(push, published, now)
        if published or bad is not None:
            if held.pushes:
                effects += held.release(now, published=published)
            if self._replies.readers:
                effects += self._replies.answer_readers()
        if push is not None and bad is None and isinstance(push.sink, PushSink):
            if self.recall.bound:
                self.recall.keep(push.member.number, push.sink)
            else:
                push.sink.free()
        # Last: the next update may be in place, and the answers above read the current version.
        if self._queue or self._copies or self._copied.due:
            effects += self.advance(now)
        return effects

    def _refuse_step(
        self, bad: int, push: PendingPush | None, collected: int, now: float
    ) -> list[Effect]:
        """Refuse a step whose result is not finite: its push, and all in the sum that are held.

        ``bad``: the tensor. ``collected``: the gradients in the sum.
        """
        held, tensor = self.held, self._store.layout.tensors[bad]
        fault = not_finite(tensor.name, max(collected, 1), self._algorithm.rate_hint)
        waiting = [each for each in held.pushes if collected and not each.made]
        held.pushes = [each for each in held.pushes if each not in waiting]
        if push is not None:
            waiting.append(push)
        effects: list[Effect] = []
        for each in waiting:
            self.maker.staleness.note(each.staleness, -1)
            effects += self._replies.refuse(each, fault, now)
        if collected > len(waiting) or push is None:
            effects.append(Note(str(fault)))
        return effects

    # ------------------------------------------------------------ the next update

    def advance(self, now: float) -> list[Effect]:
        """Issue the next job, if none is outstanding."""
        effects: list[Effect] = []
        if self.maker.position is not None:
            self.maker.position.now = now
        while self.maker.job is None and self._on_applied is None:
            if self._copied.due:
                effects += self._copied.take()
            copy = self._copy_due() if self._copies else None
            if copy is not None:
                effects.append(self._issue(*copy.issue()))
                continue
            if not self._queue:
                break
            item = self._queue.popleft()
            if isinstance(item, PendingPush):
                if self.screen is None or isinstance(item.sink, CachedGradient):
                    effects += self._decide(item, now)
                else:
                    effects += self._measure(self.screen, item, item.sink, now)
            elif isinstance(item, Decision):
                effects.append(self._issue(self.maker.begin(None, item), None))
            elif isinstance(item, CaptureJob):
                for each in self._copies:
                    each.captured()
                effects.append(self._issue(item, _ignored))
            else:
                effects.append(self._issue(*item.issue()))
        return effects

    def _copy_due(self) -> FollowingCopy | None:
        """Return a copy of the model whose work is due."""
        for each in self._copies:
            if each.due or (each.due_last and not self._queue):
                return each
        return None

    def _issue(self, job: Job, on_applied: OnApplied | None) -> Apply:
        """Return the `Apply` of a job; ``on_applied``: takes its result; None: it is an update."""
        self.tickets += 1
        self._on_applied = on_applied
        return Apply(self.tickets, job)

    def _measure(
        self, screen: PushScreen, push: PendingPush, sink: PushSink, now: float
    ) -> Sequence[Effect]:
        """Have the filters decide on a gradient, which is decoded and measured first if need be."""
        gradient = sink.take()
        if not (gradient.parts or screen.spread):
            return self._measured(screen, push, None, now)
        largest = None if gradient.parts else sink.largest
        params = screen.reader(self._store.current)
        job = MeasureJob(self._store, gradient, screen.measure, largest, params)
        return [self._issue(job, partial(self._measured, screen, push))]

    def _measured(
        self, screen: PushScreen, push: PendingPush, sums: Ints | None, now: float
    ) -> list[Effect]:
        """Have the policy decide about a gradient that passes the filters; ignore another.

        ``sums``: what its `MeasureJob` returned, on all servers; None: there was no need of one.
        """
        member, sink, values, params = push.member, push.sink, None, None
        assert isinstance(sink, PushSink), "gradients that are applied again are not measured"
        largest = sink.largest
        if sums is not None:
            first, values, rest = np.split(sums.view(np.float64), [1, 1 + screen.sample.size])
            largest, params = float(first[0]), rest if len(rest) else None
        given = sink.buffer, sink.cover, largest, values, self._store.current, params
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
        if self.immediate:
            decision = APPLY
        else:
            decision = self.policy.push(member.number, push.staleness)
            if type(decision) is not Decision:
                raise no_decision(self._algorithm.name, decision)
        if decision.use and store.rule.reads:
            decision = self._alone(decision)
        if decision.use:
            warned = self.warnings.give(store) if self.warnings.due else []
            job = self.maker.begin(push, decision, stale)
            self.tickets += 1
            return [*warned, Apply(self.tickets, job)]
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
        if decision.divide == 1 and not self.maker.collected.count:
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

    # ------------------------------------------------------------ state

    @property
    def queued(self) -> Sequence[QueueItem]:
        """The queue, which `state` leaves to its caller: its payloads are elsewhere."""
        return tuple(self._queue)

    def state(self, number: Callable[[Gradient], int]) -> dict[str, Any]:
        """Return the sum in progress and the statistics as plain values, for `restore`.

        ``number``: returns the number under which a gradient is kept. No update is outstanding.
        """
        used = self.maker.staleness
        return {
            **self.maker.state(),
            "tickets": self.tickets,
            "working": self._on_applied is not None,
            "staleness": list(used.bins.items()),
            "totals": [used.total, self.ignored],
            "pace": self.pace.state(),
            "recall": self.recall.state(number),
            "screen": None if self.screen is None else self.screen.state(),
            "warnings": self.warnings.state(),
        }

    def restore(
        self, state: Mapping[str, Any], gradients: Sequence[Gradient], queue: Iterable[QueueItem]
    ) -> None:
        """Continue from what `state` returned, with this queue and the gradients by number.

        If work was outstanding, it is the `CaptureJob` of that state, and its result is awaited.
        """
        self.tickets = state["tickets"]
        self._on_applied = _ignored if state["working"] else None
        self._queue = deque(queue)
        self.maker.restore(state)
        self.maker.staleness.bins = Counter(dict(state["staleness"]))
        self.maker.staleness.total, self.ignored = state["totals"]
        self.pace.restore(state["pace"])
        self.recall.restore(state["recall"], gradients)
        if self.screen is not None and state["screen"] is not None:
            self.screen.restore(state["screen"])
        self.warnings.restore(state["warnings"], self._store)


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
