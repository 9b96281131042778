"""The rows of a simulated cluster whose tables are spread over shards: pushed, fetched and counted.

A cell of the model has several rows of a table, of which each shard is likely to have some. A push
of rows is one to all rows of a cell. So a share that one shard lacks, or has twice, is seen.
"""

from __future__ import annotations

import numpy as np

from aiops.client.asyncio.client import AsyncClient
from aiops.client.asyncio.worker import AsyncWorker
from aiops.client.request_kinds import Receipt
from aiops.errors import NotReady, Restarted
from aiops.model.layout import Array, Ints
from aiops.model.tables import Table

TABLE = "rows"
"""The table's name."""

ROWS = 8
"""The rows of one cell."""

SPREAD = ("asgd", "fasgd", "momentum", "adam")
"""The variants of clusters that take tables, and do not scale a push by its staleness, which is
another on each shard."""


def tables_of(cells: int) -> dict[str, Table]:
    """Return the table for a number of cells."""
    return {TABLE: Table(cells * ROWS, 1, dtype="float64", init="zeros")}


async def push_to_cell(worker: AsyncWorker, cell: int) -> tuple[Receipt, Array]:
    """Push to the rows of a cell; return the receipt, and the rows as they are then.

    What the servers have lost is offered again. A push that is given up was applied nowhere.
    """
    ids, ones = _rows_of(cell), np.ones((ROWS, 1))
    while True:
        try:
            return await worker.exchange_rows(TABLE, ids, ones, ids)
        except (NotReady, Restarted):
            await worker.fetch_rows(TABLE, ids)


async def fetch_cells(client: AsyncClient, cells: int) -> Array:
    """Return all rows, float64[cells, ROWS]."""
    rows = await client.fetch_rows(TABLE, np.arange(cells * ROWS))
    return np.array(rows).reshape(cells, ROWS)


def counted(rows: Array) -> Array:
    """Return the amount of each cell, float64[cells].

    It is that of all of its rows. If some lack a push, it is lost, and the cell has 0; if some have
    more than one, or it is none of a push, the cell has that.

    >>> counted(np.array([[-1.0, -1.0], [0.0, -1.0], [-1.0, -2.0]])).tolist()
    [-1.0, 0.0, -2.0]
    """
    low, high = rows.min(1), rows.max(1)
    lacking = (low == -1) & (high == 0)
    return np.where(lacking, 0.0, np.where(high > 0, high, low))


def _rows_of(cell: int) -> Ints:
    return cell * ROWS + np.arange(ROWS)
