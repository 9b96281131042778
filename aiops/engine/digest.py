"""The digest of a model: with the same one, parameters are the same to the last bit."""

from __future__ import annotations

import hashlib

from aiops.engine.engine import Engine


def digest(engine: Engine) -> str:
    """Return the SHA-256 of the parameters' bytes, one tensor after the other.

    Without a model it is the digest of no bytes. Each table adds the digest of its rows. The order
    is the arena's, which is the order of the tensors in a model file or a fetch.
    """
    total = hashlib.sha256()
    if engine.store is not None:
        total.update(memoryview(engine.store.current.arena.data))  # type: ignore[arg-type]
    for table in engine.tables:
        total.update(table.digest())
    return total.hexdigest()
