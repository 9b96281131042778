"""Find the newest moment that all servers of a sharded model can go back to.

A moment is a row of the lead's journal. With ``--acks written`` a loss of power takes the newest
rows of each server, of one more than of another. What is left of each is the beginning of one
history, which the lead has ordered: each order that a follower journals has the newest row of the
lead's then. So a follower with an order of row r has all that the lead had relied on up to row r.
Rows that follow depend on it by what it reports: that an update is done, a norm measured, a portion
there. The lead replays its journal up to the first row that one of its followers does not support.

A follower may be ahead. What it has done since is undone (`aiops.wire.server_messages.RollBack`):
it begins with a snapshot that is not later, and replays its rows up to the first order of a later
row of the lead's. What the lead had relied on is before that order, since reports wait for rows.

**Histories.** A lead that went back writes other rows under the numbers of those that it has lost.
Its followers went back with it, but a standby that has not been fed since has the earlier rows
still, and may be promoted. So a server's history is the list of the lead's generations, each with
the row behind which it began, and two servers have the same rows up to the first at which one of
them began a generation that the other does not have. Of a follower that has orders of later rows
nothing counts behind that row, and it goes back to it. If the lead's rows are the earlier ones, it
goes no further itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from aiops.model.parts import LARGEST
from aiops.wire.server_messages import ShardState

History: TypeAlias = tuple[tuple[int, int], ...]
"""The generations of a lead, rising, each with the row of its journal behind which it began."""


class CommonMoment:
    """The moments that the followers of a lead support, which bound the row that it goes on from.

    Parameters
    ----------
    states
        By shard, what each follower has said. One that never had a state of the run bounds nothing:
        it is to be given its part again, or refused.
    history
        The lead's. Empty: it has none, or it is that of the followers.

    Attributes
    ----------
    end
        The row up to which the lead's rows are those of all followers that had a later lead.
    strange
        The followers that have no generation of the lead's.
    """

    def __init__(self, states: Mapping[int, ShardState], history: History = ()) -> None:
        known = {shard: state for shard, state in states.items() if "reached" in state.holds}
        self._reached: dict[int, int] = {n: state.holds["reached"] for n, state in known.items()}
        self._done = {shard: (state.update, not state.measured) for shard, state in known.items()}
        self._portions = {
            shard: frozenset(state.holds.get("portions", ())) for shard, state in known.items()
        }
        self._common = dict.fromkeys(known, LARGEST)
        self.end, self.strange = LARGEST, list[int]()
        for shard, state in known.items():
            theirs: History = state.holds.get("history", ())
            if history and theirs:
                self._compare(shard, history, theirs)

    def _compare(self, shard: int, mine: History, theirs: History) -> None:
        """Note up to which row a follower's history is the lead's."""
        shared = {generation for generation, _row in mine} & {each for each, _row in theirs}
        if not shared:
            self.strange.append(shard)
            return
        others = [row for generation, row in mine if generation > max(shared)]
        later = [row for generation, row in theirs if generation > max(shared)]
        self._common[shard] = common = min([LARGEST, *others, *later])
        if later:
            self.end = min(self.end, common)
        if self._reached[shard] > common:
            self._done[shard], self._portions[shard] = (0, False), frozenset()

    def newest(self, shards: Iterable[int]) -> int:
        """Return the newest row up to which all of these followers support every row."""
        return min([self.end, *(self._supported(shard) for shard in shards)])

    def ahead(self, row: int) -> dict[int, int]:
        """Return the followers that are to go back, if the lead does to a row, and each one's row.

        They have carried out orders of later rows, or of rows that are none of the lead's.
        """
        rows = {shard: min(row, common) for shard, common in self._common.items()}
        return {shard: rows[shard] for shard in rows if self._reached[shard] > rows[shard]}

    def has_portions(self, row: int, shards: Iterable[int], number: int) -> bool:
        """Return whether these followers have their portions of the push of a row."""
        return all(number in self._portions[shard] for shard in self._asked(row, shards))

    def has_done(self, row: int, shards: Iterable[int], ticket: int, *, measured: bool) -> bool:
        """Return whether these followers have done an update, or measured its norm, by a row."""
        return all(
            self._done[shard] >= (ticket, not measured) for shard in self._asked(row, shards)
        )

    def _asked(self, row: int, shards: Iterable[int]) -> list[int]:
        """Return those of some followers that have no order of a row, nor of a later one."""
        return [shard for shard in shards if self._supported(shard) < row]

    def _supported(self, shard: int) -> int:
        """Return the newest row of the lead's of which a follower has an order."""
        if shard not in self._reached:
            return LARGEST
        return min(self._reached[shard], self._common[shard])
