"""Collect one version of the whole model from its shards, for example to save it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aiops.engine.events import Order
from aiops.errors import RemoteProtocolError
from aiops.model.arena import Arena
from aiops.model.parts import Parts
from aiops.model.placement import RAW, Placement
from aiops.model.tables import StoredTable
from aiops.shards.orders import send_params
from aiops.shards.stored_rows import CollectedRows
from aiops.store.snapshots import Lease
from aiops.wire.server_messages import SendRows, StoredRows
from aiops.wire.sinks import Sink


class Collecting:
    """A version that is being collected.

    Parameters
    ----------
    number
        The number by which orders name this collection.
    placement
        The bytes that each shard holds.
    lease
        On the version; the lead's part is copied at once, and the lease released.
    evaluation
        Whether it is a version for evaluation, of followers as of the lead.
    rows
        Takes the rows of tables that lie on followers; None: none do.
    failure
        The reason why it cannot be collected, if that is known already.

    Attributes
    ----------
    orders
        Those that have the followers send their portions.
    arena
        All of it, when it is `done` without a `failure`.
    version
        Its number.
    missing
        The shards whose portions have not come.
    rows
        The rows of tables that lie on them, if they are spread.
    on_change
        Called when something has come, and when it has failed.
    """

    def __init__(
        self,
        number: int,
        placement: Placement,
        lease: Lease,
        failure: str,
        rows: CollectedRows | None = None,
        *,
        evaluation: bool = False,
    ) -> None:
        self._placement, self.rows = placement, rows
        version = lease.version
        self.version = version.number
        self.arena = Arena(placement.layout)
        mine = version.arena.data
        self.arena.data[: len(mine)] = mine
        self.missing = set(placement.used[1:])
        self.failure = failure
        self.orders: list[Order] = []
        if not self.done:
            pieces = placement.divide(version.parts)
            order = partial(send_params, number, "", 0, version.number, evaluation=evaluation)
            self.orders = [Order(n, order(pieces[n][0])) for n in placement.used[1:]]
            lacking = () if rows is None else sorted(rows.missing)
            self.orders += [Order(shard, SendRows(number)) for shard in lacking]
        lease.release()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def late(self) -> set[int]:
        """The shards that have not sent all."""
        return self.missing if self.rows is None else self.missing | self.rows.missing

    @property
    def done(self) -> bool:
        """True if no portion is waited for any more: all have come, or it has failed."""
        return not self.late or bool(self.failure)

    def sink(self, shard: int, parts: Parts) -> _Portion:
        """Return the sink of a portion.

        Raises
        ------
        RemoteProtocolError
            When it is of other bytes than this shard holds.
        """
        self._check(shard, parts)
        return _Portion(self.arena, parts)

    def _check(self, shard: int, parts: Parts) -> None:
        """Check that these are all bytes that a shard holds."""
        at, high = self._placement.edges[shard : shard + 2]
        for part in parts:
            if (part.start, part.nbytes, part.codec) != (at, part.stop - part.start, RAW):
                at = -1
                break
            at = part.stop
        if at != high:
            raise RemoteProtocolError(f"shard {shard} sent other bytes than it holds")

    def came(self, shard: int, parts: Parts) -> bool:
        """Note that a shard's portion has come; return whether that was the last.

        Raises
        ------
        RemoteProtocolError
            When it is not all that this shard holds.
        """
        self._check(shard, parts)
        self.missing.discard(shard)
        self.on_change()
        return self.done

    def rows_came(self, shard: int, message: StoredRows, sink: Sink | None) -> bool:
        """Take rows that a shard has sent; return whether nothing is waited for any more."""
        if self.rows is not None:
            self.rows.came(shard, message, sink)
        self.on_change()
        return self.done

    def with_rows(self, mine: Sequence[StoredTable]) -> Sequence[StoredTable]:
        """Return the rows of tables on all servers, given those on the lead."""
        return mine if self.rows is None else self.rows.with_rows(mine)

    def fail(self, why: str) -> None:
        """End it without all portions, for this reason."""
        self.failure = self.failure or why
        self.on_change()


class _Portion(Sink):
    """The sink of one shard's portion."""

    def __init__(self, arena: Arena, parts: Parts) -> None:
        self._data, self._parts = arena.data.data, parts

    def view(self, part: int, offset: int) -> memoryview:
        """Return where the rest of a part goes."""
        return self._data[self._parts[part].start + offset : self._parts[part].stop]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: parameters of a shard are not surveyed."""

    def abandoned(self) -> None:
        """Do nothing: the lead learns of the loss by `aiops.engine.events.Lost`."""
