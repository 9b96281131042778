"""A conversation's part for tables: rows asked for and pushed, and the versions they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from aiops.errors import RemoteProtocolError, UsageError
from aiops.model.layout import Array
from aiops.model.parts import Parts
from aiops.model.tables import NamedTable, Tables, fetch_parts, push_parts, rows_parts
from aiops.wire import messages
from aiops.wire.messages import Message, TableRows
from aiops.wire.sinks import Sink


class RowsInto(Sink):
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


IntoT = TypeVar("IntoT", bound=RowsInto | None)


@dataclass(slots=True)
class Asked(Generic[IntoT]):
    """What a request about rows consists of; the conversation sends it."""

    what: str
    make: Callable[[int], Message]
    finish: Callable[[Message], Any]
    payloads: list[list[memoryview]]
    into: IntoT


class Rows:
    """The tables of a conversation.

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
        self.came_by: dict[str, tuple[str, int]] = {}
        self.versions: dict[str, int] = {}

    def learn(self, tables: Tables) -> None:
        """Learn the model's tables."""
        self.tables = tables

    def fetch(self, name: str, ids: Any, out: Array | None) -> Asked[RowsInto]:
        """Ask for rows; the result is the matrix of them."""
        named = self.tables.named(name)
        wanted = named.check_ids(ids)
        into = RowsInto(named, len(wanted), out)
        parts = fetch_parts(named.table, len(wanted)) if len(wanted) else ()

        def make(id: int) -> Message:
            return messages.FetchRows(id, named.index, parts)

        def finish(message: Message) -> Array:
            self._note(named, _rows(message, into))
            return into.out

        return Asked("the rows it fetches", make, finish, [[_bytes(wanted)]], into)

    def push(
        self,
        seq: int,
        name: str,
        ids: Any,
        grads: Any,
        *,
        version: int | None,
        wanted: Any = None,
        out: Array | None = None,
        receipt: Callable[[TableRows], Any],
    ) -> Asked[RowsInto | None]:
        """Push gradients, and ask for rows if ``wanted``; the result is a receipt, or both."""
        named = self.tables.named(name)
        pushed = named.check_ids(ids)
        if not len(pushed):
            raise UsageError(f"table {name!r}: the push holds no row: push at least one")
        gradients = named.check_gradients(grads, len(pushed))
        base = self.versions.get(name, 0) if version is None else int(version)
        payloads = [[_bytes(pushed)], [_bytes(gradients)]]
        into: RowsInto | None = None
        count = 0
        if wanted is not None:
            asked = named.check_ids(wanted)
            count = len(asked)
            into = RowsInto(named, count, out)
            if count:
                payloads.insert(1, [_bytes(asked)])
        parts = push_parts(named.table, len(pushed), count)

        def make(id: int) -> Message:
            return messages.PushRows(id, seq, named.index, base, parts)

        def finish(message: Message) -> Any:
            rows = _rows(message, into)
            if into is None:
                return receipt(rows)
            self._note(named, rows)
            return receipt(rows), into.out

        return Asked("the answer to its push of rows", make, finish, payloads, into)

    def _note(self, named: NamedTable, message: TableRows) -> None:
        name = named.name
        self.came_by[name] = self.connection
        self.versions[name] = max(message.version, self.versions.get(name, 0))


def _rows(message: Message, into: RowsInto | None) -> TableRows:
    """Return an answer that has brought what was asked for."""
    assert isinstance(message, TableRows)
    if into is not None and len(into.out) and not message.parts:
        raise RemoteProtocolError("the answer lacks the rows that were asked for")
    return message


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
