"""A session's tables: fetches and pushes of rows, and the versions of those received.

The rows of a table lie on one server, or on all shards of a model (`aiops.model.row_shards`). Then
each shard has a clock of the table and is sent every message about it, if need be without rows: so
the clocks of all shards count the same pushes, and each shard answers for its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aiops.client.known_run import KnownRun
from aiops.common.settings import whole_number
from aiops.errors import BadPush, RemoteProtocolError, UsageError
from aiops.model.layout import Array, Ints
from aiops.model.parts import LARGEST, Parts
from aiops.model.row_shards import RowsCut, cut_rows
from aiops.model.tables import (
    NamedTable,
    Table,
    Tables,
    fetch_parts,
    push_parts,
    rows_parts,
)
from aiops.wire.messages import TableRows
from aiops.wire.sinks import Sink


class FetchedRowsSink(Sink):
    """The rows that a request asks for: a matrix of their own, or the caller's ``out``.

    Parameters
    ----------
    named, count
        The table, and the number of rows.
    out
        The caller's matrix, or None.

    Attributes
    ----------
    out
        The matrix.
    versions
        The table's version on each shard, once all have answered; empty: there is one server.
    """

    out: Array

    __slots__ = ("_cut", "_data", "_named", "_staged", "out", "versions")

    def __init__(self, named: NamedTable, count: int, out: Array | None) -> None:
        shape, dtype = (count, named.table.width), np.dtype(named.table.dtype)
        if out is None:
            out = np.empty(shape, dtype)
        elif not isinstance(out, np.ndarray):
            raise UsageError(
                f"table {named.name!r}: out= must be a NumPy array, not {type(out).__name__}: make"
                f" one with numpy.empty({shape}, {dtype.name!r})"
            )
        elif out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
            raise UsageError(
                f"table {named.name!r}: out= must be a contiguous {dtype.name} array of shape"
                f" {shape}, not {out.dtype.name} of shape {out.shape}"
            )
        elif not out.flags.writeable:
            raise UsageError(f"table {named.name!r}: out= is read-only")
        self.out, self._named = out, named
        self.versions: Sequence[int] = ()
        self.cut(None)

    def cut(self, cut: RowsCut | None) -> None:
        """Begin to receive rows of several shards, which are cut like this; None: of one server."""
        self._cut, self._staged = cut, self.out if cut is None else np.empty_like(self.out)
        self._data = self._staged.reshape(-1).view(np.uint8).data

    def sink(self, parts: Parts, shard: int = 0) -> Sink | None:
        """Return where the rows of a shard belong, if they are what comes."""
        cut = self._cut
        count = len(self.out) if cut is None else cut.count(shard)
        meant = rows_parts(self._named.table, count, 0)
        if [part[:4] for part in parts] != [part[:4] for part in meant]:
            return None
        return self if cut is None else _ShardRowsSink(self.room(shard))

    def room(self, shard: int) -> memoryview:
        """Return the memory for a shard's rows."""
        if self._cut is None:
            return self._data
        row_bytes, edges = self._named.table.row_bytes, self._cut.edges
        return self._data[edges[shard] * row_bytes : edges[shard + 1] * row_bytes]

    def finish(self) -> None:
        """Put the rows of several shards in the order in which they were asked for."""
        if self._cut is not None and len(self.out):
            order = self._cut.order
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            # A row at a time: five times as fast as `out[order] = staged`, element by element.
            np.take(self._staged, places, axis=0, out=self.out, mode="clip")

    def view(self, part: int, offset: int) -> memoryview:
        """Return the rest of the matrix."""
        return self._data[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Nothing is to be done: they are in place."""

    def abandoned(self) -> None:
        """The rest comes on another connection."""


class _ShardRowsSink(Sink):
    """The rows of one shard of several."""

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


class RowsShare(NamedTuple):
    """One server's share of a request about rows.

    ``base``: the version of its table that gradients were computed at.
    """

    base: int
    parts: Parts
    payloads: list[list[memoryview]]


class RowsPortion(NamedTuple):
    """The rows of one server's share: those pushed and their gradients, and those wanted."""

    base: int
    pushed: Ints
    wanted: Ints
    gradients: Array

    @property
    def arrays(self) -> list[Array]:
        """The payloads, in the order of the message; those without rows are left out."""
        return [each for each in self[1:] if len(each)]

    def share(self, table: Table, pushes: bool) -> RowsShare:
        """Return it as it is sent."""
        counts = len(self.pushed), len(self.wanted)
        parts = push_parts(table, *counts) if pushes else fetch_parts(table, counts[1])
        return RowsShare(self.base, parts, [[_bytes(array)] for array in self.arrays])


class RowsAsked(NamedTuple):
    """A request about rows of one table.

    ``base``: the version of the table that gradients were computed at, by the lead's clock.
    ``pushed``: the rows pushed, and their gradients; None: it is a fetch. ``wanted``: the rows that
    the answer is to bring. ``into``: where they belong; None: none were asked for.
    """

    named: NamedTable
    base: int
    pushed: tuple[Ints, Array] | None
    wanted: Ints
    into: FetchedRowsSink | None

    @property
    def nbytes(self) -> int:
        """The bytes of all payloads, or of the answer's, if these are more."""
        pushed = 0 if self.pushed is None else sum(each.nbytes for each in self.pushed)
        rows = len(self.wanted) * self.named.table.row_bytes
        return max(pushed + self.wanted.nbytes, rows)


_NO_ROWS = np.empty(0, np.int64)


class Rows:
    """The tables of one session.

    Attributes
    ----------
    shards
        The shards that the rows of each table lie on.
    versions
        By table: the newest version of which rows have come; of several shards, the lead's.
    connection
        The one that is open; a push belongs to the one that its rows came by.
    """

    def __init__(self) -> None:
        self.tables: Tables = Tables({})
        self.connection: tuple[str, int] = ("", 0)
        self.connections: dict[str, tuple[str, int]] = {}
        self.versions: dict[str, int] = {}
        self._clocks: dict[str, list[int]] = {}  # by table: the same as `versions` of each shard
        self._reached: dict[str, int] = {}  # by table: the newest version that the lead told of
        self.shards = 1
        self._last_cut: tuple[Ints, RowsCut] | None = None

    def learn(self, tables: Tables) -> None:
        """Learn the model's tables."""
        self.tables = tables

    def forget(self, run: KnownRun) -> None:
        """Forget versions that are not any more what they were."""
        for name, version in [*self.versions.items()]:
            _client, epoch = self.connections[name]
            if run.lost(epoch, version, self.tables.named(name).index):
                del self.versions[name]
                self._clocks.pop(name, None)
                self._reached.pop(name, None)

    def fetch(self, name: str, ids: Any, out: Array | None) -> RowsAsked:
        """Return what asks for rows."""
        named = self.tables.named(name)
        wanted = named.check_ids(ids)
        return RowsAsked(named, 0, None, wanted, FetchedRowsSink(named, len(wanted), out))

    def push(
        self,
        name: str,
        ids: Any,
        grads: Any,
        *,
        version: int | None,
        wanted: Any = None,
        out: Array | None = None,
    ) -> RowsAsked:
        """Return what pushes gradients, and asks for rows if ``wanted``.

        Raises
        ------
        UsageError
            When it pushes no row, or rows that the table does not have, or the version is none.
        BadPush
            When rows lie on several shards, and one of them would refuse its gradients.
        """
        named = self.tables.named(name)
        pushed = named.check_ids(ids)
        if not len(pushed):
            raise UsageError(f"table {name!r}: the push holds no row: push at least one")
        gradients = named.check_gradients(grads, len(pushed))
        if version is None:
            base = self.versions.get(name, 0)
        elif type(version) is int and 0 <= version <= LARGEST:
            base = version  # without a call, as pushes are frequent
        else:
            base = whole_number(f"table {name!r}: version", version, 0, LARGEST)
        asked = None if wanted is None else named.check_ids(wanted)
        into = None if asked is None else FetchedRowsSink(named, len(asked), out)
        if self.shards > 1:
            self._check(named, base, pushed, gradients)
        return RowsAsked(
            named, base, (pushed, gradients), _NO_ROWS if asked is None else asked, into
        )

    def _check(self, named: NamedTable, base: int, pushed: Ints, gradients: Array) -> None:
        """Refuse what a shard would refuse, before any of them applies its part."""
        reached = max(self._reached.get(named.name, 0), self.versions.get(named.name, 0))
        if base > reached:
            raise BadPush(
                f"these rows of table {named.name!r} were fetched at version {base}, but the newest"
                f" that this client knows of is {reached}: fetch them again",
                table=named.name,
            )
        fault = named.bad_gradients(pushed, gradients)
        if fault is not None:
            raise fault

    def shares(self, asked: RowsAsked) -> list[RowsShare]:
        """Return what each server is sent, the lead's share first; rows go into ``asked.into``."""
        table, pushes = asked.named.table, asked.pushed is not None
        return [portion.share(table, pushes) for portion in self.portions(asked)]

    def portions(self, asked: RowsAsked) -> list[RowsPortion]:
        """Return the rows of each server's share, the lead's first; they go into ``asked.into``."""
        wanted, into = asked.wanted, asked.into
        ids, gradients = asked.pushed or (_NO_ROWS, _NO_ROWS)
        if self.shards == 1:
            return [RowsPortion(asked.base, ids, wanted, gradients)]
        cut = self._cut(wanted)
        if into is not None:
            into.cut(cut)
        brought = wanted if not len(wanted) else wanted.take(cut.order)
        shares = range(self.shards)
        if asked.pushed is None:
            edges = cut.edges
            return [
                RowsPortion(0, _NO_ROWS, brought[edges[n] : edges[n + 1]], _NO_ROWS) for n in shares
            ]
        pushed = self._cut(ids)
        ids, gradients = ids.take(pushed.order), gradients.take(pushed.order, axis=0)
        return [
            RowsPortion(
                base,
                ids[pushed.edges[n] : pushed.edges[n + 1]],
                brought[cut.edges[n] : cut.edges[n + 1]],
                gradients[pushed.edges[n] : pushed.edges[n + 1]],
            )
            for n, base in enumerate(self._bases(asked))
        ]

    def _cut(self, ids: Ints) -> RowsCut:
        """Return how ids are cut among the servers; of those cut last, this is known.

        Most often a push is of the rows that were fetched.
        """
        known = self._last_cut
        if known is not None and np.array_equal(known[0], ids):
            return known[1]
        cut = cut_rows(ids, self.shards)
        if len(ids):
            self._last_cut = ids.copy(), cut
        return cut

    def _bases(self, asked: RowsAsked) -> list[int]:
        """Return the version of the table on each shard at which gradients were computed.

        They are as many pushes old on each as they are on the lead.
        """
        clocks = self._clocks.get(asked.named.name, [0] * self.shards)
        return [asked.base, *(max(0, each + asked.base - clocks[0]) for each in clocks[1:])]

    def answered(self, named: NamedTable, message: TableRows) -> None:
        """Note the version of a table that a server has told of."""
        self._reached[named.name] = max(message.version, self._reached.get(named.name, 0))

    def arrived(self, named: NamedTable, message: TableRows, into: FetchedRowsSink) -> Array:
        """Return the rows that an answer has brought, and note by which connection they came.

        Raises
        ------
        RemoteProtocolError
            When it lacks them.
        """
        name = named.name
        if sum(part.stop for part in message.parts) < len(into.out):
            raise RemoteProtocolError("the answer lacks rows that were asked for")
        if into.versions:
            into.finish()
            clocks = self._clocks.get(name, [0] * len(into.versions))
            self._clocks[name] = [*map(max, clocks, into.versions)]
        self.connections[name] = self.connection
        self.versions[name] = max(message.version, self.versions.get(name, 0))
        return into.out


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
