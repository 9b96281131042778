"""The rows of a table that a mini-batch names, for the embedding layers of PyTorch and JAX."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from aiops.client.request_kinds import Receipt
from aiops.common.frozen import value
from aiops.errors import Restarted, UsageError, nearest
from aiops.model.layout import Array, Ints
from aiops.model.tables import Table

_log = logging.getLogger("aiops.client")


class RowSource(Protocol):
    """The part of a `Client` or a `Worker` that reads rows."""

    @property
    def tables(self) -> Any:
        """The model's tables by name."""

    @property
    def row_versions(self) -> Any:
        """By table: the newest version of which rows have come."""

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table."""


class RowTarget(Protocol):
    """The part of a `Worker` that pushes gradients of rows."""

    def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        version: int | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> Receipt:
        """Push gradients of rows of a table."""


@value
class FetchedRows:
    """Each row that some ids name, once.

    Attributes
    ----------
    name
        Of the table.
    ids
        int64[n], rising: the ids, each once.
    index
        int64[k]: for each of the k ids that were given, its place in ``ids``.
    rows
        ``dtype[n, width]``: the parameters of ``ids``.
    version
        Of the table; of rows fetched in several messages, the oldest.
    """

    name: str
    ids: Ints
    index: Ints
    rows: Array
    version: int


def table_of(source: RowSource, name: str) -> Table:
    """Return the description of a table; raise `UsageError`, with the nearest, if there is none."""
    tables = source.tables
    if name not in tables:
        known = nearest(name, tables) if tables else "it has no tables at all"
        raise UsageError(f"the model has no table {name!r}; {known}")
    found: Table = tables[name]
    return found


def fetch_unique(source: RowSource, name: str, ids: Array, room: int = 0) -> FetchedRows:
    """Fetch each row that the ids name, once.

    Parameters
    ----------
    source
        A client or a worker.
    name
        The table's name.
    ids
        Integers, of any shape; ``index`` is in their order.
    room
        Rows are followed by zeros up to this number of rows; default 0: by none.

    Raises
    ------
    UsageError
        When they are no integers, or one is out of range. Otherwise as `Client.fetch_rows`.
    """
    table = table_of(source, name)
    if ids.dtype.kind not in "iu" and ids.size:
        raise UsageError(f"table {name!r}: ids must be integers, not {ids.dtype.name}")
    unique, index = np.unique(ids.reshape(-1), return_inverse=True)
    count, width = len(unique), table.width
    rows = np.zeros((max(count, room), width), table.dtype)
    version = source.row_versions.get(name, 0)
    for start in range(0, count, table.most):
        stop = min(start + table.most, count)
        source.fetch_rows(name, unique[start:stop], rows[start:stop])
        if start == 0:
            version = source.row_versions[name]
    return FetchedRows(
        *(name, unique.astype(np.int64, copy=False), index.astype(np.int64, copy=False)),
        *(rows, version),
    )


def push_unique(
    target: RowTarget,
    table: Table,
    name: str,
    ids: Ints,
    grads: Array,
    version: int,
    lr_factor: float = 1.0,
) -> Receipt | None:
    """Push the gradients of fetched rows.

    Parameters
    ----------
    target
        The worker that fetched them.
    table, name
        The table's description and name.
    ids, version
        Those of the `FetchedRows`.
    grads
        ``dtype[len(ids), width]``.
    lr_factor
        What the learning rate is multiplied by.

    Returns
    -------
    The last `Receipt`. None if nothing was pushed: there are no rows, or the server was restarted
    since they came, and they belong to a run that is lost.

    Raises
    ------
    As `Client.push_rows`.
    """
    receipt = None
    try:
        for start in range(0, len(ids), table.most):
            some = slice(start, start + table.most)
            given = name, ids[some], grads[some], version
            receipt = target.push_rows(*given, lr_factor=lr_factor)
    except Restarted as error:
        _log.info("gradients of rows were dropped: %s", error)
        return None
    return receipt
