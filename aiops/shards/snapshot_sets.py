"""Decide which snapshots a sharded model needs: those that are whole on all of its servers.

The snapshots of one cut, which the row of the lead's journal names, are a set. A set is whole when
each server that holds a part of the model has synced its own. Until then the servers keep all that
an earlier set needs: so whatever is lost, there is one moment that all of them can go back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KEPT = 2
"""Sets that stay: if a snapshot of the newest is damaged, the one before it is as good."""

_MOST = 1024
"""Snapshots of one server that are known."""


class SnapshotSets:
    """The sets of one sharded model.

    Attributes
    ----------
    servers
        The numbers of the shards that hold a part of the model, the lead's (0) among them.
    cut
        The last cut of which all servers were to have snapshots; 0: there is none yet.
    """

    def __init__(self) -> None:
        self.servers: Sequence[int] = []
        self._cuts: dict[int, set[int]] = {}  # by shard
        self._missing: set[int] = set()  # shards that are writing their snapshots of the last cut
        self.cut = 0
        self._said: tuple[int, ...] = ()

    @property
    def writing(self) -> bool:
        """True while a server is still to say whether it has its snapshot of the last cut."""
        return bool(self._missing)

    @property
    def whole(self) -> tuple[int, ...]:
        """The cuts of the newest `KEPT` sets that are whole, rising."""
        mine = [self._cuts.get(shard, set()) for shard in self.servers]
        return tuple(sorted(set.intersection(*mine))[-KEPT:]) if mine else ()

    def begin(self, cut: int) -> None:
        """Note that all servers capture their states."""
        self.cut, self._missing = cut, set(self.servers)

    def saved(self, shard: int, cut: int, *, well: bool) -> None:
        """Note that a server has synced its snapshot of a cut, or has none of it."""
        if well:
            self._note(shard, {*self._cuts.get(shard, ()), cut})
        if cut == self.cut:
            self._missing.discard(shard)

    def holds(self, shard: int, cuts: Iterable[int]) -> None:
        """Note which snapshots a server has that was started, or lost its lead."""
        self._note(shard, cuts)
        self._missing.discard(shard)

    def _note(self, shard: int, cuts: Iterable[int]) -> None:
        """Note the newest of a server's snapshots: it may say that it has any number of them."""
        self._cuts[shard] = {*sorted(cuts)[-_MOST:]}

    def lost(self, shard: int) -> None:
        """Wait no more for the snapshot of a server that is lost."""
        self._missing.discard(shard)

    def kept(self) -> tuple[int, ...]:
        """Return the cuts of the sets to keep, if it is time to remove all else; else empty."""
        whole = self.whole
        if self._missing or len(whole) < KEPT or whole == self._said:
            return ()
        self._said = whole
        for cuts in self._cuts.values():
            cuts -= {cut for cut in cuts if cut < whole[-1] and cut not in whole}
        return whole
