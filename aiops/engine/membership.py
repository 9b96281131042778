"""Who takes part: workers, what they have pushed, and who is waited for.

A *member* is a client by the id it chose, whatever connections it has used. Only workers are
waited for. A worker stops being waited for when it leaves, when its connection ends, or when a
barrier has waited for it longer than the deadline (it is then *excused* until it speaks again).
Workers that ``--workers N`` announces and that have not come yet are waited for too, under
negative numbers, for as long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from aiops.bandwidth.byte_accounting import Ledger
from aiops.model.layout import Layout
from aiops.store.snapshots import Lease
from aiops.wire.messages import REMEMBERED, Message
from aiops.wire.traffic import Traffic

DEPARTED = 4096
"""Members that are remembered after they left; who left first is forgotten first."""

SHOWN = 256
"""Members that have left, at most, to each of whom a report gives a line: the last ones."""

Said: TypeAlias = tuple[int, bool, int, float, float | None, bytes]
"""What an acknowledgement says that is said again when its push is repeated: version, used,
staleness, mean_staleness, vbar, vbars."""

_LONGEST_NAME = 64  # characters kept: thousands of names must fit into one report


@dataclass(slots=True)
class Member:
    """A client of this server, present or past."""

    number: int
    client: str
    name: str
    worker: bool
    peer: int | None = None
    epoch: int = 0
    answered: float = 0.0  # when it was last given an answer to a push, or joined
    excused: bool = False
    last_seq: int = 0
    answers: OrderedDict[int, Message | Said] = field(default_factory=OrderedDict)
    pushes: int = 0
    refused: int = 0
    ignored: int = 0
    staleness: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    before: Traffic = field(default_factory=Traffic)  # of its earlier connections
    apart: Traffic = field(default_factory=Traffic)  # with other shards of the model, when counted
    ledger: Ledger = field(default_factory=Ledger)
    sent: Lease | None = None  # on the version it computes at, where a rule needs it

    def exchanged(self, now: float, seq: int, said: Said) -> None:
        """Hear that a push was used, and is answered: it was not repeated, and not waited for."""
        self.last_seq = seq
        self.pushes += 1
        self.staleness = said[2]
        self.answered = now
        self.answers[seq] = said
        if len(self.answers) > REMEMBERED:
            self.answers.popitem(last=False)

    def remember(self, seq: int, answer: Message | Said) -> None:
        """Keep an answer, in case the push is repeated after a lost connection."""
        self.answers[seq] = answer
        if len(self.answers) > REMEMBERED:
            self.answers.popitem(last=False)

    def forget_sent(self) -> None:
        """Let go of the version that it was sent."""
        if self.sent is not None:
            self.sent.release()
            self.sent = None

    def bytes_in(self) -> int:
        """Bytes received from it over all its connections."""
        return self.traffic.bytes_in + self.before.bytes_in + self.apart.bytes_in

    def bytes_out(self) -> int:
        """Bytes sent to it over all its connections."""
        return self.traffic.bytes_out + self.before.bytes_out + self.apart.bytes_out

    def report(self, now: float) -> dict[str, Any]:
        """Return its line of the statistics."""
        return {
            "worker": self.number,
            "name": self.name,
            "role": "worker" if self.worker else "observer",
            "present": self.peer is not None,
            "excused": self.excused,
            "pushes": self.pushes,
            "refused": self.refused,
            "ignored": self.ignored,
            "staleness": self.staleness,
            "bytes_pushed": self.bytes_in(),
            "bytes_fetched": self.bytes_out(),
            "ledger": self.ledger.brief(),
            "seconds_since_answer": round(max(0.0, now - self.answered), 3),
        }


class Membership:
    """All members, and who among them is waited for.

    Parameters
    ----------
    expected
        How many workers take part (``--workers``), or None when nobody said.
    deadline
        Seconds that a barrier waits for one worker.

    Attributes
    ----------
    at
        Returns the member behind a connection, or None.
    """

    def __init__(self, expected: int | None, deadline: float) -> None:
        self.expected = expected
        self.deadline = deadline
        self.late = False  # the deadline for those who never came has passed
        self._members: OrderedDict[str, Member] = OrderedDict()
        self._by_peer: dict[int, Member] = {}
        self.at = self._by_peer.get
        self._numbers = 0
        self.ever = 0  # workers that have come so far
        self._layout: Layout | None = None
        # What workers that are gone had to do with single tensors, and all of those forgotten.
        self._past = Ledger()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def lines(self, now: float) -> tuple[list[dict[str, Any]], int]:
        """Return the lines of a report, by number, and how many of those gone have none.

        A line takes the server some microseconds, and thousands may have come and gone.
        """
        gone = islice((m for m in reversed(self._members.values()) if m.peer is None), SHOWN)
        shown = sorted([*self._by_peer.values(), *gone], key=lambda member: member.number)
        return [member.report(now) for member in shown], len(self._members) - len(shown)

    def present(self) -> list[Member]:
        """Return the workers that are connected."""
        return [m for m in self._by_peer.values() if m.worker]

    def join(
        self, peer: int, client: str, epoch: int, name: str, worker: bool, traffic: Traffic
    ) -> tuple[Member, int | None]:
        """Seat a client at a connection; return it, and the connection that is to be dropped.

        That is its old one, or the new one when it is the older (``epoch``) and only came late.
        """
        member = self._members.get(client)
        replaced = None
        if member is None:
            self._numbers += 1
            shown = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
            member = self._members[client] = Member(self._numbers, client, shown, worker)
            member.ledger.layout = self._layout
            self.ever += worker
            self._forget()
        elif member.peer is not None and epoch < member.epoch:
            return member, peer
        elif member.peer is not None:
            replaced = member.peer
            self.leave(replaced)
        self._members.move_to_end(client)
        member.peer, member.epoch, member.traffic = peer, epoch, traffic
        member.excused = False
        self._by_peer[peer] = member
        return member, replaced

    def leave(self, peer: int) -> Member | None:
        """Unseat whoever is at a connection; return it."""
        member = self._by_peer.pop(peer, None)
        if member is not None:
            member.peer = None
            self._members.move_to_end(member.client)
            member.before.add(member.traffic)
            member.traffic = Traffic()
            member.ledger.settle(self._past if member.worker else Ledger(self._layout))
        return member

    def defined(self, layout: Layout) -> None:
        """Hear what the model is."""
        self._layout = self._past.layout = layout
        for member in self:
            member.ledger.layout = layout

    def ledger(self) -> dict[str, Any]:
        """Return the account of all workers together, and what crossed for observers."""
        total, watching = Ledger(self._layout), Traffic()
        total.add(self._past)
        for member in self:
            if member.worker:
                total.add(member.ledger)
                total.traffic.add(member.traffic)
                total.traffic.add(member.before)
                total.traffic.add(member.apart)
            else:
                watching.add(member.traffic)
                watching.add(member.before)
                watching.add(member.apart)
        aside = {"pushed": watching.bytes_in, "fetched": watching.bytes_out}
        return {**total.report(), "observers": aside}

    def waited_for(self) -> frozenset[int]:
        """Return the numbers of the workers that a barrier waits for now."""
        here = [m.number for m in self._by_peer.values() if m.worker and not m.excused]
        return frozenset(here).union(range(-self.awaited, 0))

    def overdue(self, now: float, since: float, given: frozenset[int]) -> list[Member]:
        """Return the workers that a barrier, waiting since then, has waited for too long."""
        return [m for m in self._computing(given) if now - max(m.answered, since) >= self.deadline]

    def next_deadline(self, since: float, given: frozenset[int]) -> float | None:
        """Return when the next worker will be overdue, or None when nobody can be."""
        due = [max(m.answered, since) for m in self._computing(given)]
        if self.awaited:
            due.append(since)
        return min(due) + self.deadline if due else None

    @property
    def awaited(self) -> int:
        """How many announced workers have not come yet, and are still waited for."""
        return 0 if self.late else max(0, (self.expected or 0) - self.ever)

    def _computing(self, given: frozenset[int]) -> list[Member]:
        return [m for m in self.present() if not m.excused and m.number not in given]

    def _forget(self) -> None:
        """Drop the longest departed when there are too many to remember."""
        excess = len(self._members) - len(self._by_peer) - DEPARTED
        if excess > 0:
            gone = (m.client for m in self._members.values() if m.peer is None)
            for client in list(islice(gone, excess)):
                member = self._members.pop(client)
                if member.worker:
                    self._past.add(member.ledger)
                    self._past.traffic.add(member.before)
                    self._past.traffic.add(member.apart)
