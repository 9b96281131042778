"""Count the traffic between clients and followers, before statistics are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiops.engine.events import Order, Received
from aiops.errors import RemoteProtocolError
from aiops.shards.reports import is_small
from aiops.wire.fields import LONGEST
from aiops.wire.server_messages import CountTraffic, TrafficCounted
from aiops.wire.traffic import Traffic


class TrafficCount:
    """The last count of all followers, and the requests for statistics that wait for it.

    Parameters
    ----------
    followers
        The number of followers.

    Attributes
    ----------
    clients
        The traffic that was counted when all followers last did, by client.
    states
        By shard, what its follower last told of the state that it keeps.
    tables
        By shard, the counts of the rows of tables that lie there, by the table's name.
    """

    def __init__(self, followers: int) -> None:
        self._followers = range(1, followers + 1)
        self._number, self._since = 0, math.inf  # since when a request waits for the one under way
        self._missing: set[int] = set()
        self._volume = 0
        self._counting: dict[str, Traffic] = {}
        self._asked: list[Received] = []
        self._later: list[Received] = []  # that have come since it began
        self.clients: dict[str, Traffic] = {}
        self.states: dict[int, Mapping[str, Any]] = {}
        self.tables: dict[int, Mapping[str, Any]] = {}

    def ask(self, event: Received, now: float) -> list[Order]:
        """Have a request wait for a count that begins after it; return the orders of that.

        It may have come long before ``now``, and waited behind a push of its client. One that is
        under way may lack what its client has pushed since.
        """
        if self._missing:
            self._later.append(event)
            self._since = min(self._since, now)
            return []
        self._asked.append(event)
        return self._begin(now)

    def begin(self) -> list[Order]:
        """Begin a count that no request waits for, unless one is under way."""
        return [] if self._missing else self._begin(math.inf)

    def next(self, now: float) -> list[Order]:
        """Begin another count if requests have come while one was under way that has ended."""
        if not self._later:
            return []
        self._asked, self._later = self._later, []
        return self._begin(now)

    def _begin(self, since: float) -> list[Order]:
        self._number, self._missing = self._number + 1, set(self._followers)
        self._since = since
        self._volume, self._counting = 0, {}
        message = CountTraffic(self._number)
        return [Order(shard, message) for shard in self._followers]

    def counted(self, shard: int, message: TrafficCounted) -> bool:
        """Add a follower's count; return whether that was the last.

        Raises
        ------
        RemoteProtocolError
            When it is more traffic than can have crossed.
        """
        if message.id != self._number or shard not in self._missing:
            return False
        if not is_small(message.state) or not is_small(message.tables):
            raise RemoteProtocolError("traffic_counted: more than statistics tell")
        self.states[shard] = message.state
        self.tables[shard] = _checked(message.tables)
        for client, counts in message.clients.items():
            traffic = Traffic.from_counts(counts)
            self._volume += traffic.volume
            if self._volume > LONGEST:  # no message could carry the number
                raise RemoteProtocolError("counted.clients: more than can have crossed")
            self._counting.setdefault(client, Traffic()).add(traffic)
        self._missing.discard(shard)
        if not self._missing:
            self.clients = self._counting  # a part of a count would make the sums fall
        return not self._missing

    def late(self, time: float) -> set[int]:
        """Return the followers that a request has waited for since this time, or longer."""
        return self._missing if self._since <= time else set()

    def of_all(self, report: Mapping[str, Any], *, kept: bool) -> dict[str, Any]:
        """Return the lead's statistics with its followers' last counts; ``kept``: of a state."""
        found = {**report, "tables": tables_of_all(report["tables"], [*self.tables.values()])}
        if kept:
            states = [self.states.get(shard, {}) for shard in self._followers]
            found["state"] = state_of_all(report.get("state") or {}, states)
        return found

    def end(self) -> list[Received]:
        """End the count; return the requests that waited for it, or for one after it.

        Those that have come since it began wait for the `next`, if it is whole.
        """
        asked, self._asked = self._asked, []
        if self._missing:
            asked, self._later = [*asked, *self._later], []
            self._missing.clear()
        return asked


COUNTS = ("made", "evicted", "bytes", "rows_pushed")
"""The statistics of a table that are sums over the shards that its rows lie on."""


def _checked(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a follower's counts of rows.

    Raises
    ------
    RemoteProtocolError
        When one is missing, or is none.
    """
    for counts in tables.values():
        numbers = [counts.get(name) for name in COUNTS] if isinstance(counts, Mapping) else [None]
        if not all(type(each) is int and 0 <= each <= LONGEST for each in numbers):
            raise RemoteProtocolError("traffic_counted.tables: they are no counts of rows")
    return tables


def tables_of_all(
    lead: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the statistics of tables: the lead's, with the counts of the rows on all shards."""
    found = []
    for line in lead:
        others = [each[line["name"]] for each in shards if line["name"] in each]
        sums = {name: line[name] + sum(each[name] for each in others) for name in COUNTS}
        found.append({**line, **sums})
    return found


_PROMISES = ("applied", "written", "durable", "replicated")
"""What acknowledgements may mean, rising."""


def state_of_all(lead: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statistics of a model's state: the lead's, and those of its followers.

    An acknowledgement promises what all shards promise, and the journal of the model has ended if
    that of one shard has.
    """
    acks = [each["acks"] for each in (lead, *shards) if each.get("acks") in _PROMISES]
    ended = [
        f"shard {number}: {each['ended']}"
        for number, each in enumerate(shards, 1)
        if each.get("ended")
    ]
    found = {**lead, "shards": [*shards]}
    if acks:
        found["acks"] = min(acks, key=_PROMISES.index)
    if ended and not lead.get("ended"):
        found["ended"] = "; ".join(ended)
    return found
