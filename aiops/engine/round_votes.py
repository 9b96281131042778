"""Settle rounds of averaging: the members of a round take its mean over all together, or not.

A worker that trains on the server's data set reports with `settle_round` that all of the mean has
come, and lists the examples whose effect was in its copy. When all members have reported so, the
round is *taken*: the examples count as seen in the same event, and only then does each member add
the mean to its model. If one reports that it has given the round up, leaves, or joins another
round, no model is changed, and the examples stay with their workers.

So an example counts exactly when its effect is in the model of every member, and a worker that
dies takes along only effects that do not count.

A worker whose connection is lost asks again. The outcomes of the last `MOST_KEPT` rounds that were
taken are kept for that; a round that is not among them was not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiops.engine.events import Effect, Reply
from aiops.wire.fields import Examples
from aiops.wire.ring_messages import RoundSettled, SettleRound

MOST_KEPT = 1024
"""Rounds that were taken whose outcome is kept."""

Count: TypeAlias = Callable[[Mapping[int, Examples]], Collection[int]]
"""Counts the examples of a round, by connection; or returns those whose are not theirs any more,
and counts none."""


@dataclass(slots=True)
class _OpenRound:
    """A round that is not settled: its members, and the reports of those that have the mean."""

    peers: tuple[int, ...]
    counts: bool
    reports: dict[int, tuple[int, Examples]] = field(default_factory=dict)  # request id, examples


class RoundVotes:
    """The rounds of one server that are to be settled."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenRound] = {}
        self._taken: dict[int, bool] = {}  # by number: whether its examples counted

    def open(self, number: int, peers: Collection[int], *, counts: bool) -> None:
        """Begin a round; ``counts``: whether its examples are seen once it is taken."""
        self._open[number] = _OpenRound(tuple(peers), counts)

    @property
    def counted(self) -> bool:
        """True if the examples of one of the last rounds have been seen."""
        return any(self._taken.values())

    def report(self, peer: int, message: SettleRound, count: Count) -> list[Effect]:
        """Take a member's report; answer all members if it settles the round."""
        number = message.number
        this_round = self._open.get(number)
        if this_round is None or peer not in this_round.peers:
            taken = this_round is None and number in self._taken
            return [_answer(peer, message.id, taken=taken, counted=taken and self._taken[number])]
        this_round.reports[peer] = message.id, message.seen
        if not message.whole:
            return self._void(number)
        if len(this_round.reports) < len(this_round.peers):
            return []
        counts = this_round.counts
        seen = {each: ranges for each, (_id, ranges) in this_round.reports.items()}
        outdated = count(seen) if counts else ()
        if outdated:
            return self._void(number, outdated)
        del self._open[number]
        self._taken[number] = counts
        while len(self._taken) > MOST_KEPT:
            del self._taken[next(iter(self._taken))]
        return [
            _answer(each, id, taken=True, counted=counts)
            for each, (id, _seen) in this_round.reports.items()
        ]

    def left(self, peer: int) -> list[Effect]:
        """Void the round of a member that has left, or joins another one."""
        found = [number for number, one in self._open.items() if peer in one.peers]
        effects: list[Effect] = []
        for number in found:
            self._open[number].reports.pop(peer, None)
            effects += self._void(number)
        return effects

    def resumed(self) -> None:
        """Forget the open rounds, in a server that was started again."""
        self._open.clear()

    def state(self) -> list[Any]:
        """Return everything as plain values, for `restore`."""
        opened = [
            [number, list(one.peers), one.counts, [[p, *r] for p, r in one.reports.items()]]
            for number, one in self._open.items()
        ]
        return [opened, dict(self._taken)]

    def restore(self, state: list[Any]) -> None:
        """Continue from what `state` returned."""
        opened, taken = state
        self._taken = dict(taken)
        self._open = {
            number: _OpenRound(
                tuple(peers),
                counts,
                {peer: (id, tuple(map(tuple, seen))) for peer, id, seen in reports},
            )
            for number, peers, counts, reports in opened
        }

    def _void(self, number: int, outdated: Collection[int] = ()) -> list[Effect]:
        """Answer those who have reported that the round is not taken."""
        return [
            _answer(peer, id, taken=False, outdated=peer in outdated)
            for peer, (id, _seen) in self._open.pop(number).reports.items()
        ]


def _answer(
    peer: int, id: int, *, taken: bool, counted: bool = False, outdated: bool = False
) -> Reply:
    return Reply(peer, RoundSettled(id, taken, counted, outdated))
