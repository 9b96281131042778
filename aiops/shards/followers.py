"""The followers of a lead: their addresses, which of them are lost, and their statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiops.common.generations import next_term
from aiops.errors import Unavailable
from aiops.model.placement import Placement
from aiops.shards.reports import OWN_GENERATION, PLACE
from aiops.wire.fields import ShardTable
from aiops.wire.messages import Error


class Followers:
    """The followers of one lead, by the numbers of their shards, from 1.

    Parameters
    ----------
    addresses
        The address of each follower for clients: host (empty: the lead's own) and port.

    Attributes
    ----------
    lost
        The followers that are lost, with the reason of each.
    places
        The number of each place that a standby has taken.
    generations
        That of each follower's own state, as it has said last.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = list(addresses)
        self.lost: dict[int, str] = {}
        self.places: dict[int, int] = {}
        self.generations: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def all(self) -> range:
        """Their numbers."""
        return range(1, len(self) + 1)

    def name(self, shard: int) -> str:
        """Return the name of a shard in messages."""
        host, port = self._addresses[shard - 1]
        where = f"{host}:{port}" if host else f"port {port}"
        return f"shard {shard} of {len(self) + 1} ({where})"

    def move(self, shard: int, host: str, port: int) -> None:
        """Have clients reach a follower at another address from here on."""
        self._addresses[shard - 1] = host, port

    def note(self, shard: int, holds: Mapping[str, Any]) -> None:
        """Note the place and the generation that a follower says it has."""
        for numbers, key in ((self.places, PLACE), (self.generations, OWN_GENERATION)):
            numbers[shard] = max(holds.get(key, 0), numbers.get(shard, 0))

    def next_place(self, shard: int, generation: int) -> int:
        """Return the number of a place that a standby takes which knows of a generation.

        It begins a term above those of all servers that had the place.
        """
        known = self.places.get(shard, 0), self.generations.get(shard, 0)
        return next_term(max(*known, generation), 0)

    def has_begun(self, shard: int) -> bool:
        """Return whether the server that was given a place last has been led there."""
        return self.generations.get(shard, 0) >= self.places.get(shard, 0)

    @property
    def why(self) -> str:
        """The reasons of the losses; empty if there are none."""
        return "; ".join(why for _shard, why in sorted(self.lost.items()))

    def unavailable(self, id: int, *, waits: bool = False) -> Error:
        """Return the answer to a request for parameters: some of them are lost.

        ``waits``: they come back. The answer ends the connection, which is to be made again.
        """
        text = (
            "its state is waited for" if waits else "start the servers again, from the last --save"
        )
        details = {"shards": sorted(self.lost)}
        return Error(id, Unavailable.code, f"{self.why}; {text}", details, waits)

    def table(self, placement: Placement | None) -> ShardTable:
        """Return the shard table for clients: host, port and first byte of each."""
        starts = placement.starts[1:] if placement is not None else [0] * len(self)
        return tuple((*where, start) for where, start in zip(self._addresses, starts, strict=True))

    def report(
        self, version: int, placement: Placement | None, versions: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return each shard's line of the statistics, the lead's first.

        ``version``: the model's; ``versions``: those that the followers have computed, if there is
        a model. ``behind`` is a shard's lag, in versions.
        """
        used, edges = list[int](), [0] * (len(self) + 2)
        if placement is not None:
            used, edges = placement.used[1:], placement.edges
        newest, lines = max([version, *versions]), []
        for shard, (host, port) in enumerate([("", 0), *self._addresses]):
            mine = versions[shard - 1] if shard in used else version
            lines.append(
                {
                    "shard": shard,
                    "host": host,
                    "port": port,
                    "bytes": edges[shard + 1] - edges[shard],
                    "version": mine,
                    "behind": newest - mine,
                    "gone": self.lost.get(shard, ""),
                }
            )
        return lines
