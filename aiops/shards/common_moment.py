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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiops.model.parts import LARGEST
from aiops.wire.server_messages import ShardState


class CommonMoment:
    """The moments that the followers of a lead support, which bound the row that it goes on from.

    Parameters
    ----------
    states
        By shard, what each follower has said. One that never had a state of the run bounds nothing:
        it is to be given its part again, or refused.
    """

    def __init__(self, states: Mapping[int, ShardState]) -> None:
        known = {shard: state for shard, state in states.items() if "reached" in state.holds}
        self._reached = {shard: _integer(state.holds["reached"]) for shard, state in known.items()}
        self._done = {shard: (state.update, not state.measured) for shard, state in known.items()}
        self._portions = {
            shard: frozenset(state.holds.get("portions", ())) for shard, state in known.items()
        }

    def newest(self, shards: Iterable[int]) -> int:
        """Return the newest row up to which all of these followers support every row."""
        return min([LARGEST, *(self._reached.get(shard, LARGEST) for shard in shards)])

    def ahead(self, row: int) -> list[int]:
        """Return the followers that have carried out orders of later rows than this one."""
        return [shard for shard, reached in self._reached.items() if reached > row]

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
        return [shard for shard in shards if self._reached.get(shard, LARGEST) < row]


def _integer(found: object) -> int:
    return found if type(found) is int else 0
