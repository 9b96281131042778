"""Send all rows of tables that lie on a follower to its lead, to be saved with the lead's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiops.engine.events import Effect, OnApplied, Reply
from aiops.engine.registration import rows_in
from aiops.errors import RemoteProtocolError
from aiops.model.arena import aligned
from aiops.model.layout import Array, Bytes, Ints
from aiops.model.parts import Part
from aiops.model.placement import RAW
from aiops.model.tables import ID_BYTES, StoredTable, Tables
from aiops.store.sparse_table import CopyRowsJob, RowsCopy, SparseTable
from aiops.wire.server_messages import StoredRows
from aiops.wire.sinks import Sink


class StoredRowsWork:
    """A request for all rows, which takes its turn among the updates of rows.

    They are copied by one job, so they are of one moment, and so is what the copy takes of memory.

    Parameters
    ----------
    stores
        The tables.
    id, lead
        The request's, and the connection that it is answered on.
    """

    def __init__(self, stores: Sequence[SparseTable], id: int, lead: int) -> None:
        self._job, self._id, self._lead = CopyRowsJob(stores), id, lead

    def issue(self) -> tuple[CopyRowsJob, OnApplied]:
        """Return the job, now that its turn has come."""
        return self._job, self._applied

    def _applied(self, sums: Ints, now: float) -> list[Effect]:
        """Send the rows: a message for each copy, or one without rows if there are none."""
        copies = self._job.copies
        if not copies:
            return [Reply(self._lead, StoredRows(self._id, 0, 0))]
        effects = list[Effect]()
        for left, copy in zip(range(len(copies) - 1, -1, -1), copies, strict=True):
            part = Part(0, copy.rows, RAW, len(copy.data), 0)
            message = StoredRows(self._id, copy.table, left, (part,))
            effects.append(Reply(self._lead, message, rows=RowsToSend(copy)))
        return effects


class RowsToSend:
    """The memory of rows that are sent as they lie."""

    def __init__(self, copy: RowsCopy) -> None:
        self._data = copy.data

    @property
    def answer(self) -> memoryview:
        """The bytes to send."""
        return self._data.data

    def answer_later(self) -> Bytes:
        """Return the same as an array, which may be kept."""
        return self._data

    def free(self) -> None:
        """Do nothing: it belongs to no pool."""


class CollectedRows:
    """The rows of followers as they come.

    Parameters
    ----------
    tables
        The model's.
    shards
        The followers that have rows.

    Attributes
    ----------
    missing
        Those that have not sent all.
    """

    def __init__(self, tables: Tables, shards: Sequence[int]) -> None:
        self._tables, self.missing = tables, set(shards)
        self._found: list[list[tuple[Ints, Array]]] = [[] for _ in tables.each]

    def sink(self, message: StoredRows) -> RowsPieceSink:
        """Return the sink of rows.

        Raises
        ------
        RemoteProtocolError
            When they are rows of no table.
        """
        number, parts = message.table, message.parts
        if number < len(self._tables.each) and len(parts) == 1:
            table = self._tables.each[number].table
            count = parts[0].stop
            if count <= table.rows and parts[0].nbytes == count * (ID_BYTES + table.row_bytes):
                return RowsPieceSink(parts[0].nbytes)
        raise RemoteProtocolError(f"stored_rows: they are no rows of table {number}")

    def came(self, shard: int, message: StoredRows, sink: Sink | None) -> None:
        """Take rows that are complete."""
        if isinstance(sink, RowsPieceSink):
            named = self._tables.each[message.table]
            alone = Tables({named.name: named.table})
            self._found[message.table] += rows_in(sink.data, alone, [message.parts[0].stop])
        if not message.left:
            self.missing.discard(shard)

    def with_rows(self, own: Sequence[StoredTable]) -> list[StoredTable]:
        """Return the lead's own rows and all that have come, by table in the order of their ids."""
        found = []
        for (named, ids, rows), others in zip(own, self._found, strict=True):
            every = np.concatenate([ids, *(each for each, _rows in others)])
            order = np.argsort(every, kind="stable")
            values = np.concatenate([rows, *(theirs for _ids, theirs in others)])
            found.append((named, every[order], values.take(order, axis=0)))
        return found


class RowsPieceSink(Sink):
    """The sink of a message with stored rows."""

    def __init__(self, nbytes: int) -> None:
        self.data = aligned(nbytes)

    def view(self, part: int, offset: int) -> memoryview:
        """Return the rest of the memory."""
        return self.data[offset:].data

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: parameters of a shard are not surveyed."""

    def abandoned(self) -> None:
        """Do nothing: the lead learns of the loss by `aiops.engine.events.Lost`."""
