"""Keep the members: clients, their connections and answers, and the workers barriers wait for.

A *member* is a client, known by the id that it chose, over all connections that it has used. Only
workers are waited for. A worker stops being waited for when it leaves, when its connection ends, or
when a barrier has waited for it longer than the deadline (it is then *excused* until it pushes or
joins again).
Workers that ``--workers N`` announces and that have not come yet are waited for too, under
negative numbers, for as long.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias

from aiops.bandwidth.byte_accounting import Ledger
from aiops.common.gathering import Gathering, gathered, slices
from aiops.engine.logged import LoggedNumbers
from aiops.errors import Refused, Unavailable
from aiops.model.layout import Layout
from aiops.store.snapshots import Lease
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.fields import MAX_LOGGED
from aiops.wire.messages import REMEMBERED, Error, Log, Message
from aiops.wire.traffic import Traffic

DEPARTED = 4096
"""Members that are remembered after they left. Those that have never pushed are forgotten first, as
nothing is lost with them, and of the others those that left first."""

SHOWN = 256
"""The most members that have left for which a report has a line: the last ones."""

ARRIVALS = 256
"""The last clients that came or went, which `Membership.arrivals` lists."""

Acknowledged: TypeAlias = tuple[int, bool, int, float, float | None, bytes, str]
"""The fields of an acknowledgement that are kept to answer a repeated push: version, used,
staleness, mean_staleness, vbar, vbars, why."""

MOST_LOGGED = 1e300
"""The largest number that is taken of those that clients log: sums of as many as there may be
clients are finite, for people and in JSON."""

_LONGEST_NAME = 64  # characters kept: thousands of names must fit into one report


class PushOutcome(Protocol):
    """Takes the outcome of a push: `aiops.engine.data_sets` has examples that depend on it."""

    @property
    def barred(self) -> bool:
        """True if the push must not be used."""

    def settle(self, used: bool) -> None:
        """Take the outcome, once."""


@dataclass(slots=True)
class Member:
    """A client of this server, present or past."""

    number: int
    client: str
    name: str
    worker: bool
    peer: int | None = None
    epoch: int = 0
    answered: float = 0.0  # when a push of it was last answered, or it joined
    excused: bool = False
    last_seq: int = 0
    answers: OrderedDict[int, Message | Acknowledged] = field(default_factory=OrderedDict)
    pushes: int = 0
    refused: int = 0
    ignored: int = 0
    staleness: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    earlier_traffic: Traffic = field(default_factory=Traffic)  # of its earlier connections
    shard_traffic: Traffic = field(default_factory=Traffic)  # with other shards, when last counted
    ledger: Ledger = field(default_factory=Ledger)
    sent: Lease | None = None  # on the version that it computes at, if the rule reads it
    rolled_back: int = 0  # as `Recorder.rolled_back`, of this member; it is no state
    covers: dict[int, PushOutcome] = field(default_factory=dict)  # by the push's number
    # What it has logged last, for people: no state, and a replay lacks it.
    logged: dict[str, float] = field(default_factory=dict)
    logged_at: float = 0.0
    compute: float | None = None
    idle: float | None = None

    def exchanged(self, now: float, seq: int, acknowledged: Acknowledged) -> None:
        """Note a steady exchange: a new push that was used, and answered at once."""
        self.last_seq = seq
        self.pushes += 1
        self.staleness = acknowledged[2]
        self.answered = now
        self.answers[seq] = acknowledged
        if len(self.answers) > REMEMBERED:
            self.answers.popitem(last=False)

    def log(self, now: float, message: Log) -> None:
        """Take the numbers that it has logged; of more names than may be, the last stay.

        Those beyond `MOST_LOGGED` are left out, as a client leaves out those that are not finite.
        """
        self.logged_at = now
        for name, value in message.values:
            self.logged.pop(name, None)
            if abs(value) <= MOST_LOGGED:
                self.logged[name] = value
        for name in [*self.logged][:-MAX_LOGGED]:
            del self.logged[name]
        if message.compute is not None:
            self.compute, self.idle = message.compute, message.idle

    def remember(self, seq: int, answer: Message | Acknowledged) -> None:
        """Keep an answer, in case the push is repeated after a lost connection."""
        if seq in self.covers:
            used = answer[1] if isinstance(answer, tuple) else not isinstance(answer, Error)
            self.covers.pop(seq).settle(used)
        self.answers[seq] = answer
        if len(self.answers) > REMEMBERED:
            self.answers.popitem(last=False)

    def bars(self, seq: int) -> bool:
        """Return whether a new push must not be used; settle what covers pushes before it.

        Those never come any more: sequence numbers rise.
        """
        for number in [n for n in self.covers if self.last_seq < n < seq]:
            self.covers.pop(number).settle(used=False)
        return seq in self.covers and self.covers[seq].barred

    def forget_sent(self) -> None:
        """Release the version that it was sent."""
        if self.sent is not None:
            self.sent.release()
            self.sent = None

    def bytes_in(self) -> int:
        """Bytes received from it over all its connections."""
        return self.traffic.bytes_in + self.earlier_traffic.bytes_in + self.shard_traffic.bytes_in

    def bytes_out(self) -> int:
        """Bytes sent to it over all its connections."""
        return (
            self.traffic.bytes_out + self.earlier_traffic.bytes_out + self.shard_traffic.bytes_out
        )

    def counts(self) -> dict[str, int]:
        """Return the counts of its line that only rise."""
        return {
            "pushes": self.pushes,
            "refused": self.refused,
            "ignored": self.ignored,
            "bytes_pushed": self.bytes_in(),
            "bytes_fetched": self.bytes_out(),
        }

    def row(self) -> tuple[Any, ...]:
        """Return its row of `Membership.rows`."""
        state = "observer" if not self.worker else "silent" if self.excused else "worker"
        return (
            *(self.number, self.name, state, self.pushes, self.refused, self.ignored),
            *(self.staleness, self.bytes_in(), self.bytes_out(), self.answered),
            *(self.compute, self.idle, dict(self.logged)),  # another thread reads it
        )

    def report(self, now: float) -> dict[str, Any]:
        """Return its line of the statistics."""
        return {
            "worker": self.number,
            "name": self.name,
            "role": "worker" if self.worker else "observer",
            "present": self.peer is not None,
            "excused": self.excused,
            "rolled_back": self.rolled_back,
            "staleness": self.staleness,
            **self.counts(),
            "ledger": self.ledger.brief(),
            "compute_seconds": self.compute,
            "idle_seconds": self.idle,
            "logged": dict(self.logged),
            "seconds_since_answer": round(max(0.0, now - self.answered), 3),
        }

    def state(self, number: Callable[[Lease], int]) -> list[Any]:
        """Return the member as plain values, for `from_state`; ``number``: as `Membership.state`.

        Its connection is not among them: `Membership` has it.
        """
        # Few and flat lists: thousands of members with 64 answers each are written at once.
        answers, messages = self.answers, dict[int, bytes]()
        fields = [answer for answer in answers.values() if type(answer) is tuple]
        if len(fields) < len(answers):
            messages = {s: encode(a) for s, a in answers.items() if isinstance(a, Message)}
        kept = [list(answers), list(chain.from_iterable(fields)), messages]
        return [
            *(self.number, self.client, self.name, self.worker, self.epoch, self.answered),
            *(self.excused, self.last_seq, self.pushes, self.refused, self.ignored),
            *(self.staleness, kept, self.ledger.state()),
            [each.state() for each in (self.traffic, self.earlier_traffic, self.shard_traffic)],
            None if self.sent is None else number(self.sent),
        ]

    @classmethod
    def from_state(
        cls, state: Sequence[Any], layout: Layout | None, lease: Callable[[int], Lease]
    ) -> Member:
        """Return a member that continues from what `state` returned; as `Membership.restore`."""
        number, client, name, worker, epoch, answered, excused, last_seq, *rest = state
        pushes, refused, ignored, staleness, answers, ledger, traffic, sent = rest
        now, earlier, shards = map(Traffic.from_state, traffic)
        member = cls(
            *(number, client, name, worker, None, epoch, answered, excused, last_seq),
            _answers(*answers),
            *(pushes, refused, ignored, staleness, now, earlier, shards, Ledger(layout)),
            None if sent is None else lease(sent),
        )
        member.ledger.restore(ledger)
        return member


def _answers(
    seqs: list[int], fields: list[Any], messages: Mapping[int, bytes]
) -> OrderedDict[int, Message | Acknowledged]:
    """Return the remembered answers: the fields of acknowledgements, and messages."""
    acknowledged = zip(*[iter(fields)] * 7, strict=True)
    found: OrderedDict[int, Message | Acknowledged] = OrderedDict()
    for seq in seqs:
        found[seq] = decode(messages[seq]) if seq in messages else next(acknowledged)
    return found


class GoneTraffic:
    """The sums over members that are not connected: of workers by tensor, of observers in all."""

    __slots__ = ("observers", "workers")

    def __init__(self, layout: Layout | None = None) -> None:
        self.workers, self.observers = Ledger(layout), Traffic()

    def add(self, member: Member) -> None:
        """Add what crossed a member's connections, but for the open one."""
        if member.worker:
            self.workers.add(member.ledger)
        sums = self.workers.traffic if member.worker else self.observers
        sums.add(member.earlier_traffic)
        sums.add(member.shard_traffic)


class Membership:
    """All members of one server.

    Parameters
    ----------
    expected
        The number of workers that take part (``--workers``), or None if it is open.
    deadline
        Seconds that a barrier waits for one worker.

    Attributes
    ----------
    at
        Returns the member behind a connection, or None.
    refused
        Pushes refused, by the code of the error.
    arrivals
        The clients that came and went lately: a number that rises, how (``joined``, ``returned``,
        ``left`` with a goodbye, or ``lost``), and the name. They are for people, and no state.
    arrived
        How many have come and gone so far: the last number.
    logged
        The numbers that clients have logged. They are for people, and no state.
    """

    def __init__(self, expected: int | None, deadline: float) -> None:
        self.expected = expected
        self.deadline = deadline
        self.late = False  # the deadline for announced workers that never came has passed
        self._members: OrderedDict[str, Member] = OrderedDict()
        self._by_peer: dict[int, Member] = {}
        self.at = self._by_peer.get
        self._numbers = 0
        self.ever = 0  # workers that have come so far
        self.refused: Counter[str] = Counter()
        self._layout: Layout | None = None
        # Per-tensor accounts of workers that have left, and all traffic of forgotten members.
        self._past = GoneTraffic()
        # That, and all of the remembered members that have left: a report would else add up
        # thousands. None: it is to be added up again.
        self._gone: GoneTraffic | None = None
        self._first: dict[str, int] = {}  # by name, the worker that had it first
        self.arrivals: deque[tuple[int, str, str]] = deque(maxlen=ARRIVALS)
        self.arrived = 0
        self.logged = LoggedNumbers()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def lines(self, now: float) -> tuple[list[dict[str, Any]], int]:
        """Return the lines of a report, by number, and the number of departed members without one.

        The number is bounded (`SHOWN`): a line takes microseconds, and thousands may have left.
        """
        gone = islice((m for m in reversed(self._members.values()) if m.peer is None), SHOWN)
        shown = sorted([*self._by_peer.values(), *gone], key=lambda member: member.number)
        return [member.report(now) for member in shown], len(self._members) - len(shown)

    def present_lines(self, now: float, most: int) -> Gathering[dict[str, Any]]:
        """Return the lines of the first ``most`` workers that are connected, and sums of the rest.

        It is bounded as `lines` is not: of the rest only attributes are looked at. It pauses after
        each slice of lines.

        Returns
        -------
        ``workers``: the lines, by number, each with a ``label`` that no other worker has had.
        ``others``: the number of the rest, and the largest of their times and stalenesses.
        ``worker_counts``: the numbers of those that are connected: workers that are not excused,
        those that are, and observers.
        """
        here = sorted(self.present(), key=_number)
        shown, rest, lines = here[:most], here[most:], list[dict[str, Any]]()
        for some in slices(shown):
            lines += [member.report(now) | {"label": self._label(member)} for member in some]
            yield
        silent = sum(member.excused for member in here)
        answered = min((member.answered for member in rest), default=now)
        return {
            "workers": lines,
            "others": {
                "workers": len(rest),
                "staleness": max((member.staleness for member in rest), default=0),
                "seconds_since_answer": round(max(0.0, now - answered), 3),
            },
            "worker_counts": {
                "active": len(here) - silent,
                "silent": silent,
                "observer": len(self._by_peer) - len(here),
            },
        }

    def rows(self, most: int) -> list[tuple[Any, ...]]:
        """Return numbers and names of the first ``most`` clients that are connected, for a page.

        Each is the fields of `aiops.dashboard.document.WorkerRow`, in their order. It takes a few
        microseconds a client: no ledger is looked at.
        """
        here = sorted(self._by_peer.values(), key=_worker_first)[:most]
        return [member.row() for member in here]

    def log(self, now: float, member: Member, message: Log) -> None:
        """Take what a client has logged."""
        member.log(now, message)
        if member.logged:
            self.logged.note(member)
            self.logged.forget(len(self._by_peer))

    def note_arrival(self, how: str, member: Member) -> None:
        """Note that a client came or went."""
        self.arrived += 1
        self.arrivals.append((self.arrived, how, member.name))

    def counts(self) -> dict[int, dict[str, int]]:
        """Return what has been counted of each worker, by number, under the names of its line."""
        return {member.number: member.counts() for member in self if member.worker}

    def _label(self, member: Member) -> str:
        """Return a name by which metrics tell workers apart, also those that come and go."""
        first = self._first.get(member.name) == member.number
        return member.name if first else f"{member.name} (#{member.number})"

    def peers(self) -> list[int]:
        """Return the numbers of the connections that clients are on."""
        return [*self._by_peer]

    def traffic(self, peer: int) -> Traffic:
        """Return what has crossed a client's connection; of any other, counts for nothing."""
        member = self._by_peer.get(peer)
        return Traffic() if member is None else member.traffic

    def present(self) -> list[Member]:
        """Return the workers that are connected."""
        return [m for m in self._by_peer.values() if m.worker]

    def join(
        self, peer: int, client: str, epoch: int, name: str, worker: bool, traffic: Traffic
    ) -> tuple[Member, int | None]:
        """Bind a client to a connection; return its member, and the connection to drop, if any.

        That is the client's old connection; or the new one, if its ``epoch`` is lower, because it
        was opened earlier and has only arrived late.
        """
        member = self._members.get(client)
        replaced = None
        if member is None:
            self._numbers += 1
            shown = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
            member = self._members[client] = Member(self._numbers, client, shown, worker)
            member.ledger.layout = self._layout
            self.logged.joined(member)
            self.ever += worker
            if worker:
                self._first.setdefault(shown, self._numbers)
        elif member.peer is not None and epoch < member.epoch:
            return member, peer
        elif member.peer is not None:
            replaced = member.peer
            self.leave(replaced)
            self._gone = None
        else:
            self._gone = None  # without this one, which is back
        self._members.move_to_end(client)
        member.peer, member.epoch, member.traffic = peer, epoch, traffic
        member.excused = False
        self._by_peer[peer] = member
        self._forget()
        return member, replaced

    def leave(self, peer: int) -> Member | None:
        """Unbind the member behind a connection; return it, or None if there is none."""
        member = self._by_peer.pop(peer, None)
        if member is not None:
            member.peer = None
            self._members.move_to_end(member.client)
            member.earlier_traffic.add(member.traffic)
            member.traffic = Traffic()
            if self._gone is not None:
                self._gone.add(member)
            member.ledger.settle(self._past.workers if member.worker else Ledger(self._layout))
        return member

    def defined(self, layout: Layout) -> None:
        """Take the model's layout, for the per-tensor accounts."""
        self._layout = self._past.workers.layout = layout
        self._gone = None
        for member in self:
            member.ledger.layout = layout

    def find(self, client: str) -> Member | None:
        """Return the member of a client, if it is remembered."""
        return self._members.get(client)

    def state(self, number: Callable[[Lease], int]) -> dict[str, Any]:
        """Return all members as plain values, for `restore`.

        ``number``: returns the number under which the version of a lease is kept.
        """
        return {
            "members": [member.state(number) for member in self],
            "present": {peer: member.client for peer, member in self._by_peer.items()},
            "numbers": self._numbers,
            "ever": self.ever,
            "late": self.late,
            "refused": dict(self.refused),
            "past": self._past.workers.state(),
            "past_observers": self._past.observers.state(),
        }

    def restore(self, state: Mapping[str, Any], lease: Callable[[int], Lease]) -> None:
        """Continue from what `state` returned, with the layout that `defined` has given.

        ``lease``: returns a lease on a version, by its number as above.
        """
        members = (Member.from_state(row, self._layout, lease) for row in state["members"])
        self._members = OrderedDict((member.client, member) for member in members)
        self._by_peer.clear()
        self.logged.clear()
        for peer, client in state["present"].items():
            member = self._by_peer[peer] = self._members[client]
            member.peer = peer
        self._numbers, self.ever, self.late = state["numbers"], state["ever"], state["late"]
        self.refused = Counter(state["refused"])
        self._first = {m.name: m.number for m in sorted(self, key=_number)[::-1] if m.worker}
        self._past.workers.restore(state["past"])
        self._past.observers = Traffic.from_state(state["past_observers"])
        self._gone = None

    def ledger(self) -> dict[str, Any]:
        """Return the traffic of all workers together, by tensor, and of observers."""
        return gathered(self.gather_ledger(tensors=True))

    def gather_ledger(self, *, tensors: bool) -> Gathering[dict[str, Any]]:
        """Return what `ledger` does; ``tensors``: by tensor.

        It pauses after each slice of clients. One that comes or goes in a pause is counted as it
        was before.
        """
        total = self._sums(self._members_gone())
        for some in slices([*self._by_peer.values()]):
            for member in some:
                total.add(member)
                (total.workers.traffic if member.worker else total.observers).add(member.traffic)
            yield
        watching = total.observers
        observers = {"pushed": watching.bytes_in, "fetched": watching.bytes_out}
        return {**total.workers.report(tensors=tensors), "observers": observers}

    def counted_by_shards(self, clients: Mapping[str, Traffic]) -> None:
        """Take the traffic of clients with other shards, as it was last counted there."""
        for client, traffic in clients.items():
            member = self._members.get(client)
            if member is None:
                continue
            if member.peer is None and traffic.counts() != member.shard_traffic.counts():
                self._gone = None
            member.shard_traffic = traffic

    def _members_gone(self) -> GoneTraffic:
        """Return the sums over all that are not connected, added up only where they changed."""
        if self._gone is None:
            self._gone = self._sums(self._past)
            for member in self:
                if member.peer is None:
                    self._gone.add(member)
        return self._gone

    def _sums(self, first: GoneTraffic) -> GoneTraffic:
        found = GoneTraffic(self._layout)
        found.workers.add(first.workers)
        found.observers.add(first.observers)
        return found

    def refuse(self, member: Member, seq: int, fault: Refused, answer: Error) -> None:
        """Count the refusal of a new push, and keep it as the answer to its sequence number.

        A push that is `Unavailable` has not been looked at, and uses up no number: the client sends
        it again, to this server or to its successor with the same state.
        """
        self.count_refusal(member, fault)
        if not isinstance(fault, Unavailable):
            member.last_seq = seq
            member.remember(seq, answer)

    def count_refusal(self, member: Member, fault: Refused) -> None:
        """Count a push of a member that was refused."""
        member.refused += 1
        self.refused[fault.code] += 1

    def waited_for(self) -> frozenset[int]:
        """Return the numbers of the workers that a barrier waits for now."""
        here = [m.number for m in self._by_peer.values() if m.worker and not m.excused]
        return frozenset(here).union(range(-self.awaited, 0))

    def overdue(self, now: float, since: float, pushed: frozenset[int]) -> list[Member]:
        """Return the workers for which a barrier that began at ``since`` has waited too long.

        ``pushed``: the numbers of the workers that have pushed; they are not overdue.
        """
        # The sum is that of `next_deadline`: by a difference it may be too soon at that time.
        return [m for m in self._computing(pushed) if now >= max(m.answered, since) + self.deadline]

    def next_deadline(self, since: float, pushed: frozenset[int]) -> float | None:
        """Return when the next worker will be overdue, or None if none can be."""
        due = [max(m.answered, since) for m in self._computing(pushed)]
        if self.awaited:
            due.append(since)
        return min(due) + self.deadline if due else None

    @property
    def awaited(self) -> int:
        """The number of announced workers that have not come yet, and are still waited for."""
        return 0 if self.late else max(0, (self.expected or 0) - self.ever)

    def _computing(self, pushed: frozenset[int]) -> list[Member]:
        return [m for m in self.present() if not m.excused and m.number not in pushed]

    def _forget(self) -> None:
        """Drop members that have left, if there are too many to remember."""
        excess = len(self._members) - len(self._by_peer) - DEPARTED
        if excess > 0:
            gone = [member for member in self if member.peer is None]
            silent = (member for member in gone if not member.last_seq)
            others = (member for member in gone if member.last_seq)
            for member in list(islice(chain(silent, others), excess)):
                del self._members[member.client]
                if self._first.get(member.name) == member.number:
                    del self._first[member.name]
                self._past.add(member)  # so `_gone` stays what it is


def _number(member: Member) -> int:
    return member.number


def _worker_first(member: Member) -> tuple[bool, int]:
    return not member.worker, member.number
