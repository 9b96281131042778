"""Cut messages about rows of tables among the shards of a model: a row lies on one by its hash.

The shard of a row is a function of the row's number and the number of shards alone, which never
changes: clients and servers each compute it. The number, as an unsigned integer of 64 bits, is
mixed as the last step of MurmurHash3 does; of the result the high 32 bits, times the number of
shards, shifted right by 32, are the shard. So rows of any stride spread evenly, and a batch too.

In the header of a message to or from the lead, the rows of each follower are announced by parts
without bytes: in the codec ``shard`` the rows that are pushed to it, or that it sends, and in
``shard:wanted`` those that it is asked for. Their `Part.version` is the number of the follower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aiops.errors import BadPush
from aiops.model.layout import Ints
from aiops.model.parts import Part, Parts
from aiops.model.placement import SHARD
from aiops.model.tables import ID_BYTES, NamedTable, rows_parts

WANTED = SHARD + ":wanted"
"""The codec of parts that announce rows that a follower is asked for."""

SPREAD_TABLES = "spread_tables"
"""The key of a plan: True in a client's, if rows of tables are spread; in a follower's, the tables.
"""

_MIX = np.uint64(0xFF51_AFD7_ED55_8CCD), np.uint64(0xC4CE_B9FE_1A85_EC53)
_33, _32 = np.uint64(33), np.uint64(32)


def shards_of(ids: Ints, shards: int) -> Ints:
    """Return the shard that each row lies on, int64[len(ids)]: 0 is the lead."""
    mixed = ids.astype(np.uint64)
    for factor in _MIX:
        mixed ^= mixed >> _33
        mixed *= factor
    mixed ^= mixed >> _33
    return (mixed >> _32).astype(np.int64) * shards >> 32


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
    where = shards_of(ids, shards).astype(np.uint16)
    counts = np.bincount(where, minlength=shards)
    order = np.argsort(where, kind="stable")
    return RowsCut(order, [0, *np.cumsum(counts).tolist()])


# ---------------------------------------------------------------- parts


class ShardRows(NamedTuple):
    """The number of rows that a message pushes to one shard, and of those it is to send back."""

    pushed: int
    wanted: int


def own_parts(named: NamedTable, rows: ShardRows) -> Parts:
    """Return the parts that bring a shard its rows: ids, ids to send back, gradients, each if any.

    They are those of a push, or of a fetch if no rows are pushed.
    """
    pushed, wanted = rows
    table, found = named.table, list[Part]()
    if pushed:
        found.append(Part(0, pushed, "raw", pushed * ID_BYTES, 0))
    if wanted:
        found.append(Part(0, wanted, "raw", wanted * ID_BYTES, 0))
    if pushed:
        found.append(Part(0, pushed, "raw", pushed * table.row_bytes, 0))
    return tuple(found)


def own_rows(named: NamedTable, parts: Parts) -> ShardRows:
    """Return how many rows the parts bring that `own_parts` has made.

    Raises
    ------
    BadPush
        When it has not, or they are too many.
    """
    pushed = parts[0].stop if len(parts) > 1 else 0
    wanted = parts[len(parts) // 2].stop if len(parts) in (1, 3) else 0
    rows = ShardRows(pushed, wanted)
    if max(rows) > named.table.most:
        raise BadPush(
            f"table {named.name!r}: {max(rows):,} rows in one message; at most"
            f" {named.table.most:,} of this width are allowed"
        )
    if [part[:4] for part in parts] != [part[:4] for part in own_parts(named, rows)]:
        raise BadPush(f"table {named.name!r}: its rows on one shard are announced as other parts")
    return rows


def announced_rows(rows: Sequence[ShardRows]) -> Parts:
    """Return the parts that announce to the lead what each shard is sent; its own needs none."""
    return tuple(
        Part(0, count, codec, 0, shard)
        for shard, each in enumerate(rows)
        for count, codec in zip(each, (SHARD, WANTED), strict=True)
        if shard and count
    )


def spread_rows(named: NamedTable, parts: Parts, shards: int, *, push: bool) -> list[ShardRows]:
    """Return how many rows of a message each shard is sent, from its header at the lead.

    Raises
    ------
    BadPush
        When the header is not one of this table, or has too many rows.
    """
    own = tuple(part for part in parts if part.codec not in (SHARD, WANTED))
    found = [own_rows(named, own), *[ShardRows(0, 0)] * (shards - 1)]
    for _start, stop, codec, _nbytes, shard in parts[len(own) :]:
        if 0 < shard < shards:
            name = "pushed" if codec == SHARD else "wanted"
            found[shard] = found[shard]._replace(**{name: stop})
    if parts != (*own, *announced_rows(found)):
        raise BadPush(f"table {named.name!r}: the rows of followers are announced out of order")
    pushed, wanted = (sum(each) for each in zip(*found, strict=True))
    if max(pushed, wanted) > named.table.most:
        raise BadPush(
            f"table {named.name!r}: {max(pushed, wanted):,} rows in one message; at most"
            f" {named.table.most:,} of this width are allowed"
        )
    if bool(pushed) != push or not pushed + wanted:
        what = "pushes no row" if push else "names no row, or brings gradients"
        raise BadPush(f"table {named.name!r}: the message {what}")
    return found


def answer_parts(named: NamedTable, wanted: Sequence[int], version: int) -> Parts:
    """Return the parts of the lead's answer: its own rows, and those that followers send."""
    announced = (Part(0, n, SHARD, 0, shard) for shard, n in enumerate(wanted) if shard and n)
    return (*rows_parts(named.table, wanted[0], version), *announced)
