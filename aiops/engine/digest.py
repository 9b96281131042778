"""The digest of a model: with the same one, parameters are the same to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from aiops.engine.engine import Engine
from aiops.model.layout import Bytes
from aiops.store.sparse_table import SparseTable, digest_of_rows

Stores: TypeAlias = Sequence[SparseTable]
"""The tables of one server, or one table on each of several."""


def digest(engine: Engine) -> str:
    """Return the SHA-256 of the parameters' bytes, one tensor after the other.

    Without a model it is the digest of no bytes. Each table adds the digest of its rows. The order
    is the arena's, which is the order of the tensors in a model file or a fetch.
    """
    data = None if engine.store is None else engine.store.current.arena.data
    return digest_of(data, ([table] for table in engine.tables))


def digest_of(data: Bytes | None, tables: Iterable[Stores]) -> str:
    """Return the same of an arena's bytes (None: there is no model) and of tables.

    ``tables``: each with the rows that lie on one server, or on several.
    """
    total = hashlib.sha256()
    if data is not None:
        total.update(memoryview(data))  # type: ignore[arg-type]
    for shares in tables:
        total.update(digest_of_rows(shares))
    return total.hexdigest()
