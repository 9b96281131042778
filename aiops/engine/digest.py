"""The digest of a model: with the same one, parameters are the same to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from aiops.engine.engine import Engine
from aiops.model.layout import Bytes
from aiops.store.sparse_table import SparseTable


def digest(engine: Engine) -> str:
    """Return the SHA-256 of the parameters' bytes, one tensor after the other.

    Without a model it is the digest of no bytes. Each table adds the digest of its rows. The order
    is the arena's, which is the order of the tensors in a model file or a fetch.
    """
    data = None if engine.store is None else engine.store.current.arena.data
    return digest_of(data, engine.tables)


def digest_of(data: Bytes | None, tables: Iterable[SparseTable]) -> str:
    """Return the same of an arena's bytes (None: there is no model) and of tables."""
    total = hashlib.sha256()
    if data is not None:
        total.update(memoryview(data))  # type: ignore[arg-type]
    for table in tables:
        total.update(table.digest())
    return total.hexdigest()
