"""The gradients that wait, the sum in progress, and the one update that is outstanding.

The policy is asked about each gradient when its turn comes, in the order of arrival. Everything
about an update (its version, the staleness of its gradient, its target) is fixed when it is issued.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

import numpy as np

from aiops.algorithms.base import Algorithm, Verdict
from aiops.answers import Answers, Pending
from aiops.crew import Crew
from aiops.errors import Refused, StaleGradient, Unavailable
from aiops.events import Applied, Apply, Effect, Note, WakeAt
from aiops.layout import Array, Cover, Ints
from aiops.rows import RowJob
from aiops.store import Job, Store

_EXACT = 1024
"""A staleness below this has a bar of its own in the histogram; above, powers of two have one."""


class Work(Protocol):
    """Work on rows of a table, which takes its turn among the updates."""

    def issue(self) -> RowJob:
        """Return what is to be done, now that its turn has come."""

    def applied(self, sums: Ints) -> None:
        """Hear that it is done."""


class Updates:
    """One engine's updates.

    Parameters
    ----------
    algorithm, workers
        Whose policy decides.
    crew
        Who is waited for.
    answers
        Tells workers what became of their gradients.
    effects
        The engine's list of effects, appended to.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        workers: int | None,
        crew: Crew,
        answers: Answers,
        effects: list[Effect],
    ) -> None:
        self._algorithm, self._crew, self._answers = algorithm, crew, answers
        self._effects = effects
        self._policy = algorithm.policy(workers)
        self._recompute = bool(algorithm.plan().get("recompute"))
        self._store: Store | None = None
        self._queue: deque[Pending | Verdict | Work] = deque()
        self._outstanding: tuple[int, Job, Pending | None, Verdict] | None = None
        self._working: tuple[int, Work] | None = None  # the same, when it is rows
        self._tickets = 0
        self._stopping = False
        self._sum = np.zeros(0, bool)  # which tensors the sum in progress holds
        self._collected = 0
        self._even: dict[int, tuple[Array, Array]] = {}  # modulation, step; by staleness
        self.held: list[Pending] = []  # used, and to be answered when the next version is there
        self._held_since = 0.0
        self.waited_for: frozenset[int] = frozenset()
        self.staleness: Counter[int] = Counter()  # gradients used, by what `_count` makes of it
        self.total_staleness = 0  # of all gradients used
        self.now = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding and nothing queued."""
        return self._outstanding is None and self._working is None and not self._queue

    @property
    def working(self) -> bool:
        """Whether rows of a table are being read or written."""
        return self._working is not None

    def begin(self, store: Store) -> None:
        """Hear that the model is defined."""
        self._store = store
        self._sum = np.zeros(len(store.layout.tensors), bool)

    # ------------------------------------------------------------ what happens

    def push(self, pending: Pending) -> None:
        """Take a gradient that passed every check."""
        self._answers.expect(pending)
        self._queue.append(pending)
        if pending.member.excused:
            pending.member.excused = False
            self.crew_changed()
        self._advance()

    def work(self, work: Work) -> None:
        """Have work on rows take its turn."""
        self._queue.append(work)
        self._advance()

    def crew_changed(self) -> None:
        """Tell the policy who is waited for now, if that is another set than before."""
        waited_for = self._crew.waited_for()
        if waited_for == self.waited_for or self._stopping:
            return
        self.waited_for = waited_for
        verdict = self._policy.crew(waited_for)
        if verdict is not None:
            self._queue.appendleft(verdict)
            self._advance()

    def tick(self) -> None:
        """Stop waiting for those who are overdue."""
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
        self._wake()

    def stop(self) -> None:
        """Tell those who wait that the next version will not come."""
        self._stopping = True
        held, self.held = self.held, []
        for pending in held:
            self._answers.refuse(pending, _not_made())

    def applied(self, event: Applied) -> None:
        """Publish what the kernel did, and answer whom that concerns."""
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
        if item is not None:
            self._answer_or_hold(item, verdict, published)
        if published:
            if self._collected:
                self._collected = 0
                self._sum[:] = False
            held, self.held = self.held, []
            for pending in held:
                self._answers.acknowledge(pending)
            self._answers.readable_again()
        if item is not None:
            item.sink.free()
        self._advance()

    # ------------------------------------------------------------ inside

    def _answer_or_hold(self, item: Pending, verdict: Verdict, published: bool) -> None:
        if published or not verdict.hold:
            self._answers.acknowledge(item)
        elif self._stopping:
            self._answers.refuse(item, _not_made())
        else:
            if not self.held:
                self._held_since = self.now
            self.held.append(item)
            self._wake()

    def _wake(self) -> None:
        due = self._crew.next_deadline(self._held_since, self._given()) if self.held else None
        if due is not None:
            self._effects.append(WakeAt(due))

    def _given(self) -> frozenset[int]:
        return frozenset(pending.member.number for pending in self.held)

    def _advance(self) -> None:
        """Issue the next kernel's work, if none is outstanding."""
        while self._outstanding is None and self._working is None and self._queue:
            item = self._queue.popleft()
            if isinstance(item, Verdict):
                self._issue(None, item)
                continue
            if not isinstance(item, Pending):
                self._tickets += 1
                self._working = (self._tickets, item)
                self._effects.append(Apply(self._tickets, item.issue()))
                continue
            stale = self._note_staleness(item)
            verdict = self._policy.push(item.member.number, item.staleness)
            if verdict.use:
                self._issue(item, verdict, stale)
            else:
                kind = StaleGradient if self._recompute else Refused
                self._answers.refuse(item, kind(verdict.why, staleness=item.staleness))

    def _note_staleness(self, item: Pending) -> Ints | None:
        """Fill in a push's staleness; return it per tensor if the tensors differ in it."""
        assert self._store is not None
        cover, current = item.sink.cover, self._store.current
        if cover.level is not None and current.level is not None:
            item.staleness = current.level - cover.level
            item.mean_staleness = float(item.staleness)
            return None
        stale = current.tensor_versions[cover.tensors] - cover.bases
        bytes_each = self._store.layout.nbytes_each[cover.tensors]
        item.staleness = int(stale.max())
        item.mean_staleness = float((stale * bytes_each).sum() / bytes_each.sum())
        return stale if item.staleness != int(stale.min()) else None

    def _count(self, staleness: int) -> None:
        """Count a gradient by its staleness; rare ones by powers of two, or there is no end."""
        exact = staleness < _EXACT
        self.staleness[staleness if exact else 1 << (staleness.bit_length() - 1)] += 1
        self.total_staleness += staleness

    def _scales(self, cover: Cover, staleness: int, stale: Ints | None) -> tuple[Array, Array]:
        """Return the modulation of each tensor covered, and with it its learning rate."""
        lr = self._algorithm.lr
        if stale is not None:
            scales = np.array([self._algorithm.modulation(int(tau)) for tau in stale])
            return scales, scales * lr
        known = self._even.get(staleness)
        if known is None:
            assert self._store is not None
            if len(self._even) > 1024:
                self._even.clear()
            scale = self._algorithm.modulation(staleness)
            scales = np.full(len(self._store.layout.tensors), scale)
            known = self._even[staleness] = (scales, scales * lr)
        if cover.whole:
            return known
        count = len(cover.tensors)
        return known[0][:count], known[1][:count]

    def _issue(self, item: Pending | None, verdict: Verdict, stale: Ints | None = None) -> None:
        """Fix everything about the next piece of kernel work, and send it off."""
        store, lr = self._store, self._algorithm.lr
        assert store is not None
        job = Job(store, None)
        direct = verdict.divide == 1 and not self._collected and item is not None
        if item is not None:
            cover = item.sink.cover
            job.gradient = item.sink.take()
            self._count(item.staleness)
            scales, steps = self._scales(cover, item.staleness, stale)
            if direct:
                job.steps, job.touched = steps, cover.tensors
            else:
                job.weights = scales
                self._sum[cover.tensors] = True
                self._collected += 1
        if verdict.divide is not None:
            if not direct:
                touched = np.flatnonzero(self._sum)
                job.touched = store.layout.all if len(touched) == len(self._sum) else touched
                job.steps = np.full(len(touched), lr)
                job.factor = 1.0 / verdict.divide
            job.base, job.target = store.current, store.begin()
        self._tickets += 1
        self._outstanding = (self._tickets, job, item, verdict)
        self._effects.append(Apply(self._tickets, job))


def _not_made() -> Unavailable:
    return Unavailable("the server is shutting down; the step was not made")
