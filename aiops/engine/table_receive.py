"""Receive ids and gradients of rows: one buffer from a pool, which also holds the reply.

The payloads lie in the buffer in the order of the message (ids, ids to send back, gradients),
followed by room for the rows of the answer. So a request for rows has that room before its payload
is read. It is held until the client has read the answer, which may be slow: the buffer comes from a
pool of its own, so that pushes which ask for no rows do not wait for it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from aiops import kernels
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.receive import SURVEY, PushSink, check_codecs
from aiops.errors import BadPush
from aiops.kernels.scan import Surveyor
from aiops.model.arena import aligned
from aiops.model.layout import Array, Bytes, Ints
from aiops.model.tables import ID_BYTES, NamedTable, Table, Tables, counts
from aiops.wire.messages import FetchRows, PushRows

_LEAST = 4096  # bytes: sizes are rounded up to powers of two, so that buffers can be used again


class RowsSink(PushSink):
    """The sink of one message about rows."""

    __slots__ = ("_named", "_whole", "grads", "out", "pushed", "version", "wanted")

    def __init__(
        self,
        whole: Bytes,
        named: NamedTable,
        pushed: int,
        wanted: int,
        version: int,
        pool: BufferPool | None,
        check_ids: Surveyor,
        survey: Surveyor,
    ) -> None:
        self._whole, self._named, self._pool, self.version = whole, named, pool, version
        self.fault = None
        table = named.table
        lengths = [n for n in (pushed * ID_BYTES, wanted * ID_BYTES) if n]
        ids, gradients = sum(lengths), pushed * table.row_bytes
        received = ids + gradients
        self.buffer = whole[:received]
        self._offsets = list(accumulate([*lengths, gradients], initial=0))
        typed = self.buffer[:ids].view(np.int64)
        self.pushed: Ints = typed[:pushed]
        self.wanted: Ints = typed[pushed:]
        flat = self.buffer[ids:].view(table.dtype)
        self.grads: Array = flat.reshape(pushed, table.width)
        end = received + wanted * table.row_bytes
        self.out: Array = whole[received:end].view(table.dtype).reshape(wanted, table.width)
        self._runs = [(0, typed, check_ids)]
        if pushed:
            self._runs.append((ids, flat, survey))
        self._done, self._least = 0, {}

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Survey large payloads block by block, and small ones at once at their end."""
        size = len(self.buffer)
        if size > SURVEY or self._offsets[part] + offset + nbytes == size:
            super().filled(part, offset, nbytes)

    @property
    def table(self) -> Table:
        """The table."""
        return self._named.table

    @property
    def pushes(self) -> int:
        """The number of rows that are pushed."""
        return len(self.pushed)

    @property
    def wants(self) -> int:
        """The number of rows that the answer brings."""
        return len(self.wanted)

    @property
    def answer(self) -> memoryview:
        """The bytes of the rows to send, once they have been gathered."""
        begin = len(self.buffer)
        return self._whole[begin : begin + self.out.nbytes].data

    def answer_later(self) -> Bytes:
        """Return the same as an array; the buffer goes back when the array is collected."""
        pool, whole = self._pool, self._whole
        assert pool is not None, "rows are answered once"
        self._pool = None
        begin = len(self.buffer)
        rows = whole[begin : begin + self.out.nbytes]
        weakref.finalize(rows, pool.give_threadsafe, whole).atexit = False
        return rows

    def free(self) -> None:
        """Put the buffer back."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.give(self._whole)

    def pin(self) -> bool:
        """Return False: the buffer goes back when the answer in it is sent."""
        return False

    def _bad_value(self, begin: int, typed: Array, index: int) -> BadPush:
        named = self._named
        if begin == 0:
            count = len(self.pushed)
            place = index if index < count else index - count
            return BadPush(named.no_such_row(int(typed[index]), place), table=named.name)
        row = int(self.pushed[index // named.table.width])
        return named.bad_value(row, index, float(typed[index]))


@dataclass(frozen=True, slots=True)
class RowsRoom:
    """The room that a message about rows needs: bytes of a buffer, and the pool to take it from."""

    number: int  # of the table
    pushed: int
    wanted: int
    version: int
    nbytes: int
    pool: BufferPool

    @property
    def buffer_bytes(self) -> int:
        """The size of the buffer: a power of two, so that it can be used again."""
        return max(_LEAST, 1 << (self.nbytes - 1).bit_length())


class TableAdmission:
    """Provides sinks for the payloads of messages about rows.

    Parameters
    ----------
    tables
        The model's tables.
    pool, row_pool
        Buffers of pushes, and of requests that are answered with rows.
    backend
        The kernels that survey payloads.
    """

    def __init__(
        self, tables: Tables, pool: BufferPool, row_pool: BufferPool, backend: str = "auto"
    ) -> None:
        self._tables, self._pool, self._row_pool = tables.each, pool, row_pool
        self.each = tables.each
        self._surveys = [
            (
                kernels.bounded(named.table.rows, backend),
                kernels.surveyor(np.dtype(named.table.dtype), backend),
            )
            for named in tables.each
        ]

    def room(self, message: FetchRows | PushRows) -> RowsRoom:
        """Return the room that a message needs; nothing is allocated.

        Raises
        ------
        BadPush
            When the message does not fit the model's tables.
        """
        number = message.table
        if number >= len(self._tables):
            raise BadPush(f"the model has no table number {number}; it has {len(self._tables)}")
        check_codecs(message.parts)
        named = self._tables[number]
        push = isinstance(message, PushRows)
        pushed, wanted = counts(named, message.parts, push)
        version = message.version if isinstance(message, PushRows) else 0
        nbytes = (pushed + wanted) * (ID_BYTES + named.table.row_bytes)
        pool = self._row_pool if wanted else self._pool
        return RowsRoom(number, pushed, wanted, version, nbytes, pool)

    def without_rows(self, message: FetchRows | PushRows) -> RowsSink:
        """Return the sink of a message whose rows all lie on other shards."""
        room = self.room(message)
        given = aligned(0), self._tables[room.number], room.pushed, room.wanted, room.version, None
        return RowsSink(*given, *self._surveys[room.number])

    def sink_for(self, room: RowsRoom) -> RowsSink | None:
        """Return the sink of a message that needs this room; None: the pool has none now."""
        whole = room.pool.take(room.buffer_bytes)
        if whole is None:
            return None
        named, surveys = self._tables[room.number], self._surveys[room.number]
        given = named, room.pushed, room.wanted, room.version, room.pool
        return RowsSink(whole, *given, *surveys)
