"""The sink of a message about rows that come to several shards; it receives the lead's rows.

The lead orders the rows' updates of all shards at once, one push after the other, so a fetch brings
the rows of one version of the table. A push may be refused by any shard, but only before it is
ordered: each has looked at its gradients, and at the sums of those of one row, when they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiops.engine.table_receive import RowsSink
from aiops.model.arena import aligned
from aiops.model.layout import Bytes
from aiops.model.row_shards import ShardRows
from aiops.model.tables import ID_BYTES, NamedTable
from aiops.wire.messages import FetchRows, PushRows
from aiops.wire.server_messages import FinishPush


class SpreadRows(RowsSink):
    """The sink of one message about rows, of which followers receive some.

    Parameters
    ----------
    whole, facts
        The buffer of the lead's rows (None: it has none of them), and what `RowsSink` is given.
    number
        The number by which orders name the message.
    peer
        The connection that it comes on.
    message
        Its header.
    rows
        The rows of each shard.
    since
        The time at which the header came.
    finish
        Called with the order that frees the rows on the followers.

    Attributes
    ----------
    header
        The same as ``message``.
    missing, nbytes
        Followers that have not reported their rows, and the bytes of these.
    arrived
        True once the lead has its rows.
    """

    __slots__ = (
        *("_finish", "arrived", "header", "message", "missing", "nbytes", "number", "peer"),
        *("rows", "since"),
    )

    def __init__(
        self,
        whole: Bytes | None,
        facts: tuple[Any, ...],
        number: int,
        peer: int,
        message: FetchRows | PushRows,
        rows: Sequence[ShardRows],
        since: float,
        finish: Callable[[FinishPush], None],
    ) -> None:
        super().__init__(aligned(0) if whole is None else whole, *facts)
        if whole is None:
            self._pool = None
        named: NamedTable = facts[0]
        self.number, self.peer, self.rows, self.since = number, peer, rows, since
        self.header = self.message = message
        self.missing = {shard for shard, each in enumerate(rows) if shard and any(each)}
        self.nbytes = sum(
            each.pushed * (ID_BYTES + named.table.row_bytes) + each.wanted * ID_BYTES
            for each in rows[1:]
        )
        self.arrived, self._finish = False, finish

    @property
    def named(self) -> NamedTable:
        """The table."""
        return self._named

    @property
    def pushes(self) -> int:
        """The number of rows that are pushed, to all shards."""
        return sum(each.pushed for each in self.rows)

    @property
    def wants(self) -> int:
        """The number of rows that the answer brings, from all shards."""
        return sum(each.wanted for each in self.rows)

    def has_arrived(self) -> None:
        """Note that the lead has its rows."""
        self.arrived = True
        self.check_sums()

    def answer_later(self) -> Bytes:
        """Return the lead's rows; see `RowsSink`."""
        found = super().answer_later()
        self._finish(FinishPush(self.number, False))
        return found

    def free(self) -> None:
        """Put the buffers back, on all shards."""
        super().free()
        self._finish(FinishPush(self.number, False))

    def abandoned(self) -> None:
        """Put the lead's buffer back; the others follow when the connection's end is handled."""
        super().free()
