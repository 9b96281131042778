"""The engine: events in, effects out. It decides everything, and does nothing by itself.

The server, replay, the simulator and a unit test all drive this one class::

    for effect in engine.handle(event):
        ...carry it out; run an Apply, and come back with Applied...

Every event carries its time, and the list of events is the journal: the same events give the same
effects and, because the kernels are deterministic, the same parameters to the last bit. One `Apply`
is outstanding at a time; everything about it is fixed when it is issued.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiops import messages
from aiops.algorithms.base import Algorithm, Verdict
from aiops.crew import Crew, Member
from aiops.errors import BadPush, NotReady, Refused, StaleGradient, Unavailable, UsageError
from aiops.events import (
    Applied,
    Apply,
    Drop,
    Effect,
    Event,
    Initialised,
    Joined,
    Left,
    Note,
    Options,
    Received,
    Reply,
    Stopping,
    Tick,
    WakeAt,
    Warm,
)
from aiops.intake import Incoming, Intake, Offer
from aiops.layout import Arena, Array, Cover, Ints, Layout
from aiops.messages import (
    Ack,
    Define,
    Describe,
    Error,
    Fetch,
    Leave,
    Message,
    Model,
    Params,
    Ping,
    Pong,
    Push,
    Report,
    Stats,
    Welcome,
)
from aiops.store import Job, Store
from aiops.wire import Discard, Sink


@dataclass(slots=True)
class Pending:
    """A push on its way through the engine, and whom to answer."""

    peer: int | None
    message: Push
    sink: Incoming
    member: Member
    staleness: int = 0
    mean_staleness: float = 0.0


class Engine:
    """One server's decisions.

    Parameters
    ----------
    algorithm
        Policy, rule and client plan.
    options
        See `Options`.

    Raises
    ------
    ConflictError
        When the algorithm and the options cannot work together.
    """

    def __init__(self, algorithm: Algorithm, options: Options | None = None) -> None:
        self.algorithm, self.options = algorithm, options or Options()
        algorithm.check(self.options.workers)
        self.policy = algorithm.policy(self.options.workers)
        self.plan = {**algorithm.plan(), "patience": self.options.worker_deadline}
        self.crew = Crew(self.options.workers, self.options.worker_deadline)
        self.intake = Intake(self.options.max_model)
        self.store: Store | None = None
        self.now = self.started = 0.0
        self.staleness: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.stopping = False
        self._effects: list[Effect] = []
        self._queue: deque[Pending | Verdict] = deque()
        self._pending: dict[tuple[str, int], Pending] = {}  # by client and seq, unanswered
        self._outstanding: tuple[int, Job, Pending | None, Verdict] | None = None
        self._tickets = 0
        self._held: list[Pending] = []
        self._held_since = 0.0
        self._readers: list[tuple[int, Message]] = []  # fetches that wait for an update in place
        self._sum = np.zeros(0, bool)  # which tensors the sum in progress holds
        self._collected = 0
        self._even: dict[int, Array] = {}  # modulation by staleness, one row per tensor
        self._waited_for: frozenset[int] = frozenset()
        self._seconds: deque[tuple[int, int]] = deque(maxlen=12)  # (second, version at its start)

    def handle(self, event: Event) -> list[Effect]:
        """Take in an event; return what is to be done, in order."""
        self.now = event.time
        self.started = self.started or event.time
        effects: list[Effect] = []
        self._effects = effects
        _HANDLERS[type(event)](self, event)
        return effects

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding and nothing queued."""
        return self._outstanding is None and not self._queue

    # ------------------------------------------------------------ who is there

    def _on_joined(self, event: Joined) -> None:
        hello = event.hello
        worker = hello.role == "worker"
        member, replaced = self.crew.join(
            event.peer, hello.client, hello.epoch, hello.name, worker, event.traffic
        )
        if replaced is not None:
            self._effects.append(Drop(replaced, f"{hello.name!r} came back on a new connection"))
        member.answered = self.now
        welcome = Welcome(
            id=hello.id,
            protocol=messages.PROTOCOL,
            proof=event.proof,
            policy=self.algorithm.name,
            settings=self.algorithm.settings(),
            plan=self.plan,
            version=self.store.version if self.store else 0,
            model=self.store.layout.rows if self.store else (),
            last_seq=member.last_seq,
        )
        self._effects.append(Reply(event.peer, welcome))
        self._crew_changed()

    def _on_left(self, event: Left) -> None:
        member = self.crew.leave(event.peer)
        self._readers = [(peer, m) for peer, m in self._readers if peer != event.peer]
        if member is not None:
            for pending in self._pending.values():
                if pending.peer == event.peer:
                    pending.peer = None
            self._crew_changed()

    def _on_tick(self, event: Tick) -> None:
        if not self._held:
            return
        given = frozenset(pending.member.number for pending in self._held)
        late = self.crew.overdue(self.now, self._held_since, given)
        for member in late:
            member.excused = True
            self._effects.append(
                Note(
                    f"worker {member.name!r} has not pushed for {self.crew.deadline:g} s:"
                    " the others no longer wait for it (--worker-deadline)"
                )
            )
        if self.crew.awaited and self.now - self._held_since >= self.crew.deadline:
            self._effects.append(
                Note(
                    f"{self.crew.awaited} of {self.options.workers} workers have not come within"
                    f" {self.crew.deadline:g} s: going on without them"
                )
            )
            self.crew.late = True
        self._crew_changed()
        self._wake()

    def _on_stopping(self, event: Stopping) -> None:
        self.stopping = True
        for pending in self._held:
            self._refuse(pending, Unavailable("the server is shutting down; the step was not made"))
        self._held.clear()

    def _crew_changed(self) -> None:
        waited_for = self.crew.waited_for()
        if waited_for == self._waited_for:
            return
        self._waited_for = waited_for
        verdict = self.policy.crew(waited_for)
        if verdict is not None:
            self._queue.appendleft(verdict)
            self._advance()

    def _wake(self) -> None:
        given = frozenset(pending.member.number for pending in self._held)
        due = self.crew.next_deadline(self._held_since, given) if self._held else None
        if due is not None:
            self._effects.append(WakeAt(due))

    # ------------------------------------------------------------ messages

    def _on_received(self, event: Received) -> None:
        handler = _MESSAGES.get(type(event.message))
        if handler is None:
            self._effects.append(Drop(event.peer, f"{event.message.kind!r} is not a request"))
            return
        handler(self, event)

    def _on_ping(self, event: Received) -> None:
        self._effects.append(Reply(event.peer, Pong(event.message.id)))

    def _on_pong(self, event: Received) -> None:
        """It is alive; that is all."""

    def _on_leave(self, event: Received) -> None:
        self._on_left(Left(event.time, event.peer))
        self._effects.append(Drop(event.peer, "it said goodbye"))

    def _on_stats(self, event: Received) -> None:
        self._effects.append(Reply(event.peer, Report(event.message.id, self.report())))

    def _on_fetch(self, event: Received) -> None:
        if self.store is None:
            self._deny(event, NotReady("nobody has defined the model yet: a worker must do it"))
        elif not self.store.readable:
            self._readers.append((event.peer, event.message))
        else:
            self._send_params(event.peer, event.message)

    def _send_params(self, peer: int, message: Message) -> None:
        assert self.store is not None
        assert isinstance(message, Fetch)
        store = self.store
        if message.have == store.version:
            self._effects.append(Reply(peer, Params(message.id, store.version)))
        else:
            lease = store.lease()
            params = Params(message.id, store.version, lease.version.parts)
            self._effects.append(Reply(peer, params, lease))

    def _on_initialised(self, event: Initialised) -> None:
        self._define(Layout(event.rows), event.data)

    def _on_define(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, Define)
        member = self.crew.at(event.peer)
        offer = sink if isinstance(sink, Offer) else None
        try:
            fault = getattr(sink, "fault", None)
            if isinstance(fault, Refused):
                raise fault
            if member is None or not member.worker:
                raise BadPush("only a worker may define the model; this client is an observer")
            if self.store is not None:
                self._compare(self.store.layout, message)
            elif offer is None:
                raise BadPush("the offered model has no values: send all tensors")
            else:
                self._define(offer.layout, offer.buffer)
        except Refused as error:
            self._deny(event, error)
        else:
            assert self.store is not None
            created = offer is not None and self.store.layout is offer.layout
            model = Model(message.id, created, self.store.version, self.store.layout.rows)
            self._effects.append(Reply(event.peer, model))
        finally:
            if offer is not None:
                offer.free()

    def _on_describe(self, event: Received) -> None:
        if self.store is None:
            self._deny(event, NotReady("nobody has defined the model yet: a worker must do it"))
        else:
            id, store = event.message.id, self.store
            self._effects.append(
                Reply(event.peer, Model(id, False, store.version, store.layout.rows))
            )

    @staticmethod
    def _compare(layout: Layout, message: Define) -> None:
        try:
            difference = layout.difference(Layout(message.tensors))
        except UsageError as error:
            difference = str(error)
        if difference:
            raise BadPush(f"the server's model is another one: {difference}")

    def _define(self, layout: Layout, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        options = self.options
        self.store = Store(
            layout,
            self.algorithm.rule(),
            backend=options.backend,
            live=options.live,
            relaxed=options.relaxed,
        )
        self.store.current.arena = Arena(layout, data)
        self.store.adopt()
        self.intake.defined(layout)
        self._sum = np.zeros(len(layout.tensors), bool)
        self._effects.append(Warm(self.store.warm))

    # ------------------------------------------------------------ pushes

    def _on_push(self, event: Received) -> None:
        message, sink = event.message, event.sink
        assert isinstance(message, Push)
        member = self.crew.at(event.peer)
        if member is None or self._repeated(event, member, message):
            if isinstance(sink, Incoming):
                sink.free()
            return
        member.last_seq = message.seq
        fault = self._fault(member, sink)
        if fault is not None:
            if isinstance(sink, Incoming):
                sink.free()
            member.refused += 1
            self.refused[fault.code] += 1
            member.remember(message.seq, self._deny(event, fault))
            return
        assert isinstance(sink, Incoming)
        pending = Pending(event.peer, message, sink, member)
        self._pending[member.client, message.seq] = pending
        self._queue.append(pending)
        if member.excused:
            member.excused = False
            self._crew_changed()
        self._advance()

    def _repeated(self, event: Received, member: Member, message: Push) -> bool:
        """Answer a push that came before (on a connection since lost) without applying it."""
        pending = self._pending.get((member.client, message.seq))
        if pending is not None:
            pending.peer, pending.message = event.peer, message
            return True
        if message.seq > member.last_seq:
            return False
        answer = member.answers.get(message.seq)
        if isinstance(answer, Ack):
            again = Ack(
                message.id,
                answer.version,
                answer.staleness,
                answer.mean_staleness,
                answer.vbar,
                answer.vbars,
            )
            self._acknowledge(event.peer, message, again)
        elif isinstance(answer, Error):
            error = Error(message.id, answer.code, answer.text, answer.details, False)
            self._effects.append(Reply(event.peer, error))
        else:
            self._deny(
                event,
                BadPush(
                    f"push {message.seq} is older than what the server remembers of this client"
                    f" (its last was {member.last_seq}); it was not applied again"
                ),
            )
        return True

    def _fault(self, member: Member, sink: Sink | None) -> Refused | None:
        """Return why a push cannot be taken whatever the policy, or None."""
        if not member.worker:
            return BadPush("an observer may not push; connect with role='worker'")
        if self.stopping:
            return Unavailable("the server is shutting down and takes no more pushes")
        if isinstance(sink, Discard) and isinstance(sink.fault, Refused):
            return sink.fault
        if not isinstance(sink, Incoming) or self.store is None:
            return BadPush("the push holds no tensor: push at least one")
        if sink.fault is not None:
            return sink.fault
        cover, current = sink.cover, self.store.current
        if cover.level is not None and current.level is not None and cover.level <= current.level:
            return None
        ahead = np.flatnonzero(cover.bases > current.tensor_versions[cover.tensors])
        if len(ahead):
            tensor = self.store.layout.tensors[int(cover.tensors[ahead[0]])].name
            return BadPush(
                f"{tensor!r} was computed at version {cover.bases[ahead[0]]}, but the server is at"
                f" {current.tensor_versions[cover.tensors[ahead[0]]]}: fetch the parameters again"
                " (was the server restarted?)",
                tensor=tensor,
            )
        return None

    def _advance(self) -> None:
        """Issue the next kernel's work, if none is outstanding."""
        while self._outstanding is None and self._queue:
            item = self._queue.popleft()
            if isinstance(item, Verdict):
                self._issue(None, item)
                continue
            assert self.store is not None
            stale = self._note_staleness(item)
            verdict = self.policy.push(item.member.number, item.staleness)
            if verdict.use:
                self._issue(item, verdict, stale)
            else:
                kind = StaleGradient if self.plan["recompute"] else Refused
                self._refuse(item, kind(verdict.why, staleness=item.staleness))

    def _note_staleness(self, item: Pending) -> Ints | None:
        """Fill in a push's staleness; return it per tensor if the tensors differ in it."""
        assert self.store is not None
        cover, current = item.sink.cover, self.store.current
        if cover.level is not None and current.level is not None:
            item.staleness = current.level - cover.level
            item.mean_staleness = float(item.staleness)
            return None
        stale = current.tensor_versions[cover.tensors] - cover.bases
        bytes_each = self.store.layout.nbytes_each[cover.tensors]
        item.staleness = int(stale.max())
        item.mean_staleness = float((stale * bytes_each).sum() / bytes_each.sum())
        return stale if item.staleness != int(stale.min()) else None

    def _scales(self, cover: Cover, staleness: int, stale: Ints | None) -> Array:
        """Return the modulation of each tensor covered."""
        if stale is not None:
            return np.array([self.algorithm.modulation(int(tau)) for tau in stale])
        known = self._even.get(staleness)
        if known is None or len(known) < len(cover.tensors):
            assert self.store is not None
            if len(self._even) > 1024:
                self._even.clear()
            scale = self.algorithm.modulation(staleness)
            known = self._even[staleness] = np.full(len(self.store.layout.tensors), scale)
        return known[: len(cover.tensors)]

    def _issue(self, item: Pending | None, verdict: Verdict, stale: Ints | None = None) -> None:
        """Fix everything about the next piece of kernel work, and send it off."""
        store = self.store
        assert store is not None
        job = Job(store, None)
        direct = verdict.divide == 1 and not self._collected and item is not None
        if item is not None:
            cover = item.sink.cover
            job.gradient = item.sink.take()
            self.staleness[item.staleness] += 1
            scales = self._scales(cover, item.staleness, stale)
            if direct:
                job.steps, job.touched = scales * self.algorithm.lr, cover.tensors
            else:
                job.weights = scales
                self._sum[cover.tensors] = True
                self._collected += 1
        if verdict.divide is not None:
            if not direct:
                touched = np.flatnonzero(self._sum)
                all_of_them = len(touched) == len(self._sum)
                job.touched = store.layout.all if all_of_them else touched
                job.steps = np.full(len(job.touched), self.algorithm.lr)
                job.factor = 1.0 / verdict.divide
            job.base, job.target = store.current, store.begin()
        self._tickets += 1
        self._outstanding = (self._tickets, job, item, verdict)
        self._effects.append(Apply(self._tickets, job))

    def _on_applied(self, event: Applied) -> None:
        assert self._outstanding is not None
        ticket, job, item, verdict = self._outstanding
        assert ticket == event.ticket, "Applied answers another Apply than the outstanding one"
        assert self.store is not None
        self._outstanding = None
        published = job.target is not None
        if job.target is not None:
            if self.now - (self._seconds[-1][0] if self._seconds else -1) >= 1:
                self._seconds.append((int(self.now), self.store.version))
            self.store.commit(job.target, job.touched, event.sums)
        if item is not None:
            self._hold_or_acknowledge(item, verdict, published)
        if published:
            if self._collected:
                self._collected = 0
                self._sum[:] = False
            held, self._held = self._held, []
            for pending in held:
                self._answer(pending)
            readers, self._readers = self._readers, []
            for peer, message in readers:
                self._send_params(peer, message)
        if item is not None:
            item.sink.free()
        self._advance()

    def _hold_or_acknowledge(self, item: Pending, verdict: Verdict, published: bool) -> None:
        if published or not verdict.hold:
            self._answer(item)
        elif self.stopping:
            self._refuse(item, Unavailable("the server is shutting down; the step was not made"))
        else:
            if not self._held:
                self._held_since = self.now
            self._held.append(item)
            self._wake()

    # ------------------------------------------------------------ answers

    def _answer(self, pending: Pending) -> None:
        """Acknowledge a push whose gradient has been used."""
        assert self.store is not None
        member = pending.member
        member.pushes += 1
        member.staleness = pending.staleness
        ack = Ack(
            pending.message.id,
            self.store.version,
            pending.staleness,
            pending.mean_staleness,
            self.store.vbar(),
            self.store.vbars(),
        )
        self._settle(pending, ack)
        if pending.peer is not None:
            self._acknowledge(pending.peer, pending.message, ack)

    def _acknowledge(self, peer: int, message: Push, ack: Ack) -> None:
        """Send an acknowledgement, with the current parameters if they were asked for."""
        assert self.store is not None
        if not message.fetch or message.have == self.store.version:
            self._effects.append(Reply(peer, ack))
            return
        if not self.store.readable:  # only for a repeated push: the usual one comes between updates
            self._readers.append((peer, Fetch(message.id, message.have)))
            return
        lease = self.store.lease()
        full = Ack(
            ack.id,
            self.store.version,
            ack.staleness,
            ack.mean_staleness,
            ack.vbar,
            ack.vbars,
            lease.version.parts,
        )
        self._effects.append(Reply(peer, full, lease))

    def _refuse(self, pending: Pending, fault: Refused) -> None:
        """Refuse a push that was queued; one to be recomputed brings the parameters with it."""
        pending.member.refused += 1
        self.refused[fault.code] += 1
        message, lease = pending.message, None
        error = Error(message.id, fault.code, str(fault), fault.details, False, self._version())
        self._settle(pending, error)
        pending.sink.free()
        if pending.peer is None:
            return
        wants = message.fetch and message.have != self._version()
        if isinstance(fault, StaleGradient) and wants and self.store and self.store.readable:
            lease = self.store.lease()
            parts = lease.version.parts
            error = Error(
                *(error.id, error.code, error.text, error.details, False), error.version, parts
            )
        self._effects.append(Reply(pending.peer, error, lease))

    def _settle(self, pending: Pending, answer: Ack | Error) -> None:
        member = pending.member
        member.answered = self.now
        member.remember(pending.message.seq, answer)
        self._pending.pop((member.client, pending.message.seq), None)

    def _deny(self, event: Received, fault: Refused) -> Error:
        """Refuse a request."""
        error = Error(
            event.message.id, fault.code, str(fault), fault.details, False, self._version()
        )
        self._effects.append(Reply(event.peer, error))
        return error

    def _version(self) -> int:
        return self.store.version if self.store else 0

    # ------------------------------------------------------------ statistics

    def report(self) -> dict[str, Any]:
        """Return the statistics that ``aiops stats`` shows."""
        store, pool = self.store, self.intake.pool
        applied = sum(self.staleness.values())
        mean = sum(tau * n for tau, n in self.staleness.items()) / applied if applied else 0.0
        return {
            "policy": self.algorithm.name,
            "settings": self.algorithm.settings(),
            "version": self._version(),
            "seconds": round(self.now - self.started, 3),
            "updates_per_second": round(self._rate(), 3),
            "gradients": applied,
            "refused": dict(self.refused),
            "staleness": {str(tau): n for tau, n in sorted(self.staleness.items())},
            "mean_staleness": mean,
            "vbar": store.vbar() if store else None,
            "parameters": store.layout.parameters if store else 0,
            "tensors": len(store.layout.tensors) if store else 0,
            "kernels": store.backend if store else "",
            "versions_alive": store.alive if store else 0,
            "versions_copied": store.copies if store else 0,
            "receive_bytes": pool.out,
            "receive_bytes_peak": pool.peak,
            "waiting": len(self._held),
            "waited_for": sorted(self._waited_for),
            "workers": [member.report(self.now) for member in self.crew],
        }

    def _rate(self) -> float:
        """Return updates per second over the last ten seconds or so."""
        if not self._seconds:
            return 0.0
        second, version = self._seconds[0]
        return (self._version() - version) / max(self.now - second, 1e-9)


_HANDLERS: dict[type, Callable[[Engine, Any], None]] = {
    Initialised: Engine._on_initialised,
    Joined: Engine._on_joined,
    Received: Engine._on_received,
    Left: Engine._on_left,
    Tick: Engine._on_tick,
    Applied: Engine._on_applied,
    Stopping: Engine._on_stopping,
}

_MESSAGES: dict[type[Message], Callable[[Engine, Received], None]] = {
    Push: Engine._on_push,
    Fetch: Engine._on_fetch,
    Define: Engine._on_define,
    Describe: Engine._on_describe,
    Stats: Engine._on_stats,
    Ping: Engine._on_ping,
    Pong: Engine._on_pong,
    Leave: Engine._on_leave,
}
