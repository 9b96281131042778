"""Cut messages about rows of tables among the shards of a model: a row lies on one by its hash.

The shard of a row is a function of the row's number and the number of shards alone, which never
changes: clients and servers each compute it. The number, as an unsigned integer of 64 bits, is
mixed as the last step of MurmurHash3 does; of the result the high 32 bits, times the number of
shards, shifted right by 32, are the shard. So rows of any stride spread evenly, and a batch too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from aiops.model.layout import Ints

SPREAD_TABLES = "spread_tables"
"""The key of a plan: True in a client's, if rows of tables are spread; in a follower's, the tables.
"""

GIVEN_ROWS = "rows"
"""The key of a follower's plan: of each table, the number of rows that come with the model."""

_MIX = np.uint64(0xFF51_AFD7_ED55_8CCD), np.uint64(0xC4CE_B9FE_1A85_EC53)
_33, _32 = np.uint64(33), np.uint64(32)


def shards_of(ids: Ints, shards: int) -> Ints:
    """Return the shard that each row lies on, int64[len(ids)]: 0 is the lead."""
    mixed = ids.astype(np.uint64)
    scratch = mixed >> _33
    for factor in _MIX:
        mixed ^= scratch
        mixed *= factor
        np.right_shift(mixed, _33, out=scratch)
    mixed ^= scratch
    mixed >>= _32
    mixed *= np.uint64(shards)
    mixed >>= _32
    return mixed.view(np.int64)


class RowsCut(NamedTuple):
    """Row numbers in the order of their shards.

    ``order``: where each was, int64; those of one shard keep their order. ``edges``: those of shard
    s are [edges[s], edges[s + 1]).
    """

    order: Ints
    edges: list[int]

    def count(self, shard: int) -> int:
        """Return the number of rows of a shard."""
        return self.edges[shard + 1] - self.edges[shard]


def cut_rows(ids: Ints, shards: int) -> RowsCut:
    """Return how the numbers of rows are cut among shards, of which there are at most 65,536."""
    if not len(ids):
        return RowsCut(ids, [0] * (shards + 1))
    where = shards_of(ids, shards).astype(np.uint8 if shards <= 1 << 8 else np.uint16)
    counts = np.bincount(where, minlength=shards).tolist()
    order = np.argsort(where, kind="stable")  # of integers this small, by counting them
    return RowsCut(order, [*accumulate(counts, initial=0)])
