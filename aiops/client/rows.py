"""A session's tables: fetches and pushes of rows, and the versions of those received."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aiops.client.known_run import KnownRun
from aiops.errors import RemoteProtocolError, UsageError
from aiops.model.layout import Array
from aiops.model.parts import Parts
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


class RowsPull(NamedTuple):
    """Rows that are asked for: what is sent, and where they belong."""

    named: NamedTable
    parts: Parts
    payloads: list[list[memoryview]]
    into: FetchedRowsSink


class RowsPush(NamedTuple):
    """Gradients of rows: what is sent, and where the rows that are wanted belong, if any are.

    ``base``: the version of the table that they were computed at.
    """

    named: NamedTable
    base: int
    parts: Parts
    payloads: list[list[memoryview]]
    into: FetchedRowsSink | None


class Rows:
    """The tables of one session.

    Attributes
    ----------
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
        count = 0
        if wanted is not None:
            asked = named.check_ids(wanted)
            count = len(asked)
            into = FetchedRowsSink(named, count, out)
            if count:
                payloads.insert(1, [_bytes(asked)])
        return RowsPush(named, base, push_parts(named.table, len(pushed), count), payloads, into)

    def arrived(self, named: NamedTable, message: TableRows, into: FetchedRowsSink) -> Array:
        """Return the rows that an answer has brought, and note by which connection they came.

        Raises
        ------
        RemoteProtocolError
            When it lacks them.
        """
        if len(into.out) and not message.parts:
            raise RemoteProtocolError("the answer lacks the rows that were asked for")
        name = named.name
        self.connections[name] = self.connection
        self.versions[name] = max(message.version, self.versions.get(name, 0))
        return into.out


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
