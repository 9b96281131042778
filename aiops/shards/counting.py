"""Count the traffic between clients and followers, before statistics are reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.engine.events import Received
from aiops.errors import RemoteProtocolError
from aiops.wire.fields import LONGEST
from aiops.wire.traffic import Traffic


class PushCounts:
    """One count of all followers, and the requests for statistics that wait for it.

    Parameters
    ----------
    number
        The number of this count; answers to an earlier one are ignored.
    followers
        The number of followers that count.

    Attributes
    ----------
    asked
        The requests for statistics.
    clients
        The traffic counted so far, by client.
    """

    def __init__(self, number: int, followers: int) -> None:
        self.number = number
        self._missing = set(range(1, followers + 1))
        self._volume = 0
        self.asked: list[Received] = []
        self.clients: dict[str, Traffic] = {}

    def counted(self, number: int, shard: int, clients: Mapping[str, Any]) -> bool:
        """Add a follower's count; return whether that was the last.

        Raises
        ------
        RemoteProtocolError
            When it is more traffic than can have crossed.
        """
        if number != self.number or shard not in self._missing:
            return False
        self._missing.discard(shard)
        for client, counts in clients.items():
            traffic = Traffic.from_counts(counts)
            self._volume += traffic.volume
            if self._volume > LONGEST:  # no message could carry the number
                raise RemoteProtocolError("counted.clients: more than can have crossed")
            self.clients.setdefault(client, Traffic()).add(traffic)
        return not self._missing
