"""Make the model's definition from a worker's offer or from the values given at the start."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.algorithms.model_support import names_obstacle, size_obstacle, tables_obstacle
from aiops.codecs.choice import CodecChoice
from aiops.common.frozen import value
from aiops.engine.admission import OfferSink
from aiops.engine.events import Initialised
from aiops.errors import BadPush, ConflictError, UsageError
from aiops.kernels.rule import Rule
from aiops.model.arena import aligned
from aiops.model.layout import Array, Bytes, Ints, Layout
from aiops.model.tables import ID_BYTES, Tables
from aiops.store.resources import Resources
from aiops.store.sparse_table import SparseTable
from aiops.wire.messages import Define


@value
class Definition:
    """A model to begin with.

    Attributes
    ----------
    layout
        The tensors.
    data
        Their values, in arena order.
    tables
        The tables; their rows are not among the values.
    """

    layout: Layout
    data: Bytes
    tables: Tables


def offered(
    message: Define,
    offer: OfferSink | None,
    algorithm: Algorithm,
    codecs: Sequence[CodecChoice],
    max_model: int,
) -> Definition:
    """Return the model that a worker offers to a server that has none.

    Raises
    ------
    BadPush
        When it has no values, more parameters than the algorithm can train, tables that are too
        large (``max_model`` bytes) or that the algorithm cannot have, or no tensor that a pattern
        of the settings or of the codecs matches.
    """
    tables = _tables_of(message)
    why = _names_obstacle(algorithm, codecs, [name for name, *_rest in message.tensors], tables)
    if why is not None:
        raise BadPush(f"this server's settings are for another model: {why}")
    if tables:
        why = tables_obstacle(algorithm, tables, alone=not message.tensors)
        if why is not None:
            raise BadPush(f"this server's model cannot have the table {min(tables)!r}: {why}")
        nbytes = sum(named.table.nbytes for named in tables.values())
        if nbytes > max_model:
            raise BadPush(
                f"tables of {nbytes} bytes, all rows counted, are larger than this server takes"
                f" ({max_model}): start it with a larger --max-model"
            )
    if offer is not None:
        why = size_obstacle(algorithm, offer.layout.parameters)
        if why is not None:
            raise BadPush(f"this server cannot train the model: {why}")
        return Definition(offer.layout, offer.buffer, tables)
    if tables and not message.tensors:
        return Definition(Layout((), empty=True), aligned(0), tables)
    raise BadPush("the offered model has no values: send all tensors")


def given(event: Initialised, algorithm: Algorithm, codecs: Sequence[CodecChoice]) -> Definition:
    """Return the model that a server is given at its start; `given_rows` has its rows.

    Raises
    ------
    ConflictError
        When it has tables, and the algorithm cannot have any, more parameters than it can train, or
        no tensor that a pattern of the settings or of the codecs matches.
    """
    layout = Layout(event.rows, empty=bool(event.tables))
    tables = Tables.from_description((row for row, _count in event.tables), layout.index)
    why = tables_obstacle(algorithm, tables, alone=not event.rows) if tables else None
    if why is not None:
        raise ConflictError(f"the model to begin with has tables, but {why}")
    why = size_obstacle(algorithm, layout.parameters)
    if why is not None:
        raise ConflictError(f"the model to begin with is too large: {why}")
    why = _names_obstacle(algorithm, codecs, [tensor.name for tensor in layout.tensors], tables)
    if why is not None:
        raise ConflictError(f"the settings are for another model: {why}")
    return Definition(layout, event.data[: layout.nbytes], tables)


def _names_obstacle(
    algorithm: Algorithm,
    codecs: Sequence[CodecChoice],
    tensors: Sequence[str],
    tables: Iterable[str],
) -> str | None:
    """Return which pattern is of another model, as a sentence; codecs are of tensors alone."""
    why = names_obstacle(algorithm, [*tensors, *tables])
    unmatched = (choice.unmatched(tensors) for choice in codecs)
    return why or next(filter(None, unmatched), None)


def given_rows(event: Initialised, tables: Tables) -> list[tuple[Ints, Array]]:
    """Return the rows that a server is given at its start, of each table: ids, and values."""
    counts = {row[0]: count for row, count in event.tables}
    given = [counts[named.name] for named in tables.each]  # in the order of their names
    nbytes = rows_bytes(tables, given)
    return rows_in(event.data[len(event.data) - nbytes :], tables, given)


def rows_bytes(tables: Tables, counts: Sequence[int]) -> int:
    """Return the bytes of rows with their ids, given the number of rows of each table."""
    each = (ID_BYTES + named.table.row_bytes for named in tables.each)
    return sum(map(operator.mul, counts, each))


def rows_in(data: Bytes, tables: Tables, counts: Sequence[int]) -> list[tuple[Ints, Array]]:
    """Return the rows that lie in memory, a number of each table: its ids, then their values."""
    found, place = list[tuple[Ints, Array]](), 0
    for count, named in zip(counts, tables.each, strict=True):
        table = named.table
        ends = place + count * ID_BYTES, place + count * (ID_BYTES + table.row_bytes)
        ids = np.frombuffer(data[place : ends[0]].tobytes(), np.int64)
        rows = np.frombuffer(data[ends[0] : ends[1]].tobytes(), table.dtype)
        found.append((ids, rows.reshape(count, table.width)))
        place = ends[1]
    return found


def compare(layout: Layout, tables: Tables, message: Define) -> None:
    """Refuse an offer of another model than the server's.

    Raises
    ------
    BadPush
        With the first difference.
    """
    offer = _tables_of(message)
    try:
        difference = layout.difference(Layout.shared(message.tensors, empty=bool(offer)))
        difference = difference or tables.difference(offer)
    except UsageError as error:
        difference = str(error)
    if difference:
        raise BadPush(f"the server's model is another one: {difference}")


def table_stores(
    tables: Tables, rule: Rule, backend: str, machine: Resources, shards: int = 1
) -> tuple[SparseTable, ...]:
    """Make room for the rows of tables, of which none takes memory yet.

    ``shards``: the servers that the rows lie on, each of which stores its share of ``max_rows``.

    Raises
    ------
    BadPush
        When the system has no room for them.
    """
    later, guard = machine.later, machine.guard
    try:
        return tuple(
            SparseTable(named, rule, backend, later=later, guard=guard, shards=shards)
            for named in tables.each
        )
    except MemoryError as error:
        nbytes = sum(named.table.nbytes for named in tables.each)
        raise BadPush(
            f"tables of {nbytes} bytes, and the rule's state for them, are larger than this"
            f" server's address space: {error}"
        ) from None


def _tables_of(message: Define) -> Tables:
    """Return the tables of an offer."""
    try:
        return Tables.from_description(
            message.tables, (name for name, _dtype, _shape in message.tensors)
        )
    except UsageError as error:
        raise BadPush(str(error)) from None
