"""A session's tables: fetches and pushes of rows, and the versions of those received."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aiops.client.known_run import KnownRun
from aiops.errors import RemoteProtocolError, UsageError
from aiops.model.layout import Array, Ints
from aiops.model.parts import Parts
from aiops.model.placement import SHARD
from aiops.model.row_shards import RowsCut, ShardRows, answer_parts, cut_rows
from aiops.model.tables import NamedTable, Tables, fetch_parts, push_parts, rows_parts
from aiops.wire.messages import TableRows
from aiops.wire.sinks import Sink


class FetchedRowsSink(Sink):
    """The rows that a request asks for: a matrix of their own, or the caller's ``out``."""

    __slots__ = ("_data", "_named", "out")

    def __init__(self, named: NamedTable, count: int, out: Array | None) -> None:
        shape, dtype = (count, named.table.width), np.dtype(named.table.dtype)
        if out is None:
            out = np.empty(shape, dtype)
        elif out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
            raise UsageError(
                f"table {named.name!r}: out= must be a contiguous {dtype.name} array of shape"
                f" {shape}, not {out.dtype.name} of shape {out.shape}"
            )
        elif not out.flags.writeable:
            raise UsageError(f"table {named.name!r}: out= is read-only")
        self.out, self._named = out, named
        self._data = out.reshape(-1).view(np.uint8).data

    def sink(self, parts: Parts) -> Sink | None:
        """Return where the rows belong, if that is what comes."""
        meant = rows_parts(self._named.table, len(self.out), 0)
        return self if [part[:4] for part in parts] == [part[:4] for part in meant] else None

    def view(self, part: int, offset: int) -> memoryview:
        """Return the rest of the matrix."""
        return self._data[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Nothing is to be done: they are in place."""

    def abandoned(self) -> None:
        """The rest comes on another connection."""


class SpreadRowsSink(FetchedRowsSink):
    """The same of rows that several shards send: each its own, in the order of the shards.

    Parameters
    ----------
    named, out
        As of `FetchedRowsSink`.
    cut
        How the rows are cut among the shards.

    Attributes
    ----------
    missing
        The other shards whose rows have not come.
    """

    __slots__ = ("_cut", "_rows", "missing")

    def __init__(self, named: NamedTable, cut: RowsCut, out: Array | None) -> None:
        super().__init__(named, len(cut.order), out)
        self._cut, self._rows = cut, np.empty_like(self.out)
        self._data = self._rows.reshape(-1).view(np.uint8).data
        self.missing: set[int] = set()

    def sink(self, parts: Parts) -> Sink | None:
        """Return where the rows belong, if all of them come."""
        wanted = [self._cut.count(shard) for shard in range(len(self._cut.edges) - 1)]
        meant = answer_parts(self._named, wanted, 0)
        if [(*part[:4], part[2] == SHARD and part[4]) for part in parts] != [
            (*part[:4], part[2] == SHARD and part[4]) for part in meant
        ]:
            return None
        self.missing = {shard for shard, count in enumerate(wanted) if shard and count}
        return self

    def portion(self, shard: int, parts: Parts) -> Sink | None:
        """Return where the rows of another shard belong, if they are what comes."""
        count = self._cut.count(shard)
        meant = rows_parts(self._named.table, count, 0)
        if [part[:4] for part in parts] != [part[:4] for part in meant]:
            return None
        begin = self._cut.edges[shard] * self._named.table.row_bytes
        return RowsPortionSink(self._data[begin : begin + count * self._named.table.row_bytes])

    def finish(self) -> None:
        """Put the rows in the order in which they were asked for."""
        self.out[self._cut.order] = self._rows


class RowsPortionSink(Sink):
    """The rows of one shard."""

    __slots__ = ("_data",)

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def view(self, part: int, offset: int) -> memoryview:
        """Return the rest of them."""
        return self._data[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: they are in place."""

    def abandoned(self) -> None:
        """Do nothing: the rest comes on another connection."""


class SpreadPayloads(NamedTuple):
    """The rows of a message that each shard is sent, and their payloads."""

    rows: list[ShardRows]
    payloads: list[list[list[memoryview]]]


class RowsPull(NamedTuple):
    """Rows that are asked for: what is sent, and where they belong."""

    named: NamedTable
    parts: Parts
    payloads: list[list[memoryview]]
    into: FetchedRowsSink
    spread: SpreadPayloads | None = None


class RowsPush(NamedTuple):
    """Gradients of rows: what is sent, and where the rows that are wanted belong, if any are.

    ``base``: the version of the table that they were computed at.
    """

    named: NamedTable
    base: int
    parts: Parts
    payloads: list[list[memoryview]]
    into: FetchedRowsSink | None
    spread: SpreadPayloads | None = None


class Rows:
    """The tables of one session.

    Attributes
    ----------
    shards
        The shards that the rows of each table lie on.
    versions
        By table: the newest version of which rows have come.
    connection
        The one that is open; a push belongs to the one that its rows came by.
    """

    def __init__(self) -> None:
        self.tables: Tables = Tables({})
        self.connection = ("", 0)
        self.connections: dict[str, tuple[str, int]] = {}
        self.versions: dict[str, int] = {}
        self.shards = 1

    def learn(self, tables: Tables) -> None:
        """Learn the model's tables."""
        self.tables = tables

    def forget(self, run: KnownRun) -> None:
        """Forget versions that are not any more what they were."""
        for name, version in [*self.versions.items()]:
            _client, epoch = self.connections[name]
            if run.lost(epoch, version, self.tables.named(name).index):
                del self.versions[name]

    def fetch(self, name: str, ids: Any, out: Array | None) -> RowsPull:
        """Return what asks for rows."""
        named = self.tables.named(name)
        wanted = named.check_ids(ids)
        if self.shards > 1 and len(wanted):
            cut = cut_rows(wanted, self.shards)
            spread = self._spread(None, None, (wanted, cut))
            return RowsPull(named, (), [[]], SpreadRowsSink(named, cut, out), spread)
        into = FetchedRowsSink(named, len(wanted), out)
        parts = fetch_parts(named.table, len(wanted)) if len(wanted) else ()
        return RowsPull(named, parts, [[_bytes(wanted)]], into)

    def push(
        self,
        name: str,
        ids: Any,
        grads: Any,
        *,
        version: int | None,
        wanted: Any = None,
        out: Array | None = None,
    ) -> RowsPush:
        """Return what pushes gradients, and asks for rows if ``wanted``."""
        named = self.tables.named(name)
        pushed = named.check_ids(ids)
        if not len(pushed):
            raise UsageError(f"table {name!r}: the push holds no row: push at least one")
        gradients = named.check_gradients(grads, len(pushed))
        base = self.versions.get(name, 0) if version is None else int(version)
        payloads = [[_bytes(pushed)], [_bytes(gradients)]]
        into: FetchedRowsSink | None = None
        count, asked = 0, None if wanted is None else named.check_ids(wanted)
        if self.shards > 1:
            return self._spread_push(named, base, (pushed, gradients), asked, out)
        if asked is not None:
            count = len(asked)
            into = FetchedRowsSink(named, count, out)
            if count:
                payloads.insert(1, [_bytes(asked)])
        return RowsPush(named, base, push_parts(named.table, len(pushed), count), payloads, into)

    def _spread_push(
        self,
        named: NamedTable,
        base: int,
        pushed: tuple[Ints, Array],
        asked: Ints | None,
        out: Array | None,
    ) -> RowsPush:
        into: FetchedRowsSink | None = None
        wanted = None
        if asked is not None and len(asked):
            wanted = asked, cut_rows(asked, self.shards)
            into = SpreadRowsSink(named, wanted[1], out)
        elif asked is not None:
            into = FetchedRowsSink(named, 0, out)
        cut = cut_rows(pushed[0], self.shards)
        spread = self._spread((pushed[0], cut), pushed[1], wanted)
        return RowsPush(named, base, (), [[]], into, spread)

    def _spread(
        self,
        pushed: tuple[Ints, RowsCut] | None,
        gradients: Array | None,
        wanted: tuple[Ints, RowsCut] | None,
    ) -> SpreadPayloads:
        """Return what each shard is sent: ids, ids to send back, gradients, each if any."""
        arrays = list[tuple[RowsCut, Array]]()
        for each in (pushed, wanted):
            if each is not None:
                ids: Array = each[0]
                arrays.append((each[1], ids[each[1].order]))
        if pushed is not None and gradients is not None:
            arrays.append((pushed[1], gradients[pushed[1].order]))
        rows, payloads = list[ShardRows](), list[list[list[memoryview]]]()
        for shard in range(self.shards):
            counts = (0 if each is None else each[1].count(shard) for each in (pushed, wanted))
            rows.append(ShardRows(*counts))
            payloads.append(
                [
                    [_bytes(array[cut.edges[shard] : cut.edges[shard + 1]])]
                    for cut, array in arrays
                    if cut.count(shard)
                ]
            )
        return SpreadPayloads(rows, payloads)

    def arrived(self, named: NamedTable, message: TableRows, into: FetchedRowsSink) -> Array:
        """Return the rows that an answer has brought, and note by which connection they came.

        Raises
        ------
        RemoteProtocolError
            When it lacks them.
        """
        if len(into.out) and not message.parts:
            raise RemoteProtocolError("the answer lacks the rows that were asked for")
        if isinstance(into, SpreadRowsSink):
            into.finish()
        name = named.name
        self.connections[name] = self.connection
        self.versions[name] = max(message.version, self.versions.get(name, 0))
        return into.out


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
