"""The messages between a server that keeps its state and its standby, and those that swap them.

See `aiops.wire.messages` for the form of the classes.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from aiops.common.frozen import value
from aiops.model.parts import Parts
from aiops.wire.fields import Blob, Bytes32, Nonce, Plain, Text, UInt
from aiops.wire.messages import Message

# ---------------------------------------------------------------- from a standby to its primary


@value
class StandbyHello(Message):
    """The first message of a standby: what it holds of a run. The primary feeds it from then on."""

    kind = "standby_hello"
    role: ClassVar[str] = "standby"
    protocol: UInt
    client: Text
    epoch: UInt
    name: Text
    pongs: bool
    nonce: Nonce
    agent: Text
    run: Text
    generation: UInt
    row: UInt
    generation_proof: Bytes32 = b""


@value
class RowsKept(Message):
    """All rows up to ``written`` are in the standby's journal, and those up to ``synced`` synced.

    ``applied``: the last that its engine has handled.
    """

    kind = "rows_kept"
    written: UInt
    synced: UInt
    applied: UInt


# ---------------------------------------------------------------- from a primary to its standby


@value
class StandbyWelcome(Message):
    """The standby is fed from behind ``row`` on; if it holds other rows, it drops all that it has.

    ``snapshot``: the bytes of the snapshot of the state after ``row``, which comes first; 0: none.
    ``starts``: the generations of the run, each with the row and the versions that it began at.
    ``secret``: the run's, with which the standby proves its generation once it is promoted.
    ``generation_proof`` is made with it, as in a `welcome`.
    The state is that of shard ``shard`` of ``shards``; 0 of 1: a whole model.
    """

    kind = "standby_welcome"
    protocol: UInt
    proof: Blob
    run: Text
    generation: UInt
    row: UInt
    snapshot: UInt
    starts: Plain
    secret: Bytes32 = field(default=b"", repr=False)
    shard: UInt = 0
    shards: UInt = 1
    generation_proof: Bytes32 = b""


@value
class SnapshotPart(Message):
    """The next bytes of the snapshot that was announced; its parts say which."""

    kind = "snapshot_part"
    parts: Parts = ()


@value
class JournalRows(Message):
    """The rows from ``first`` to ``last``: the parts, one behind the other, are a segment."""

    kind = "journal_rows"
    first: UInt
    last: UInt
    newest: UInt
    parts: Parts = ()


# ---------------------------------------------------------------- from clients and other servers


@value
class Promote(Message):
    """Request that this standby becomes the server."""

    kind = "promote"


@value
class Promoted(Message):
    """The standby is the server from here on: of this generation, at this version."""

    kind = "promoted"
    generation: UInt
    version: UInt


@value
class TakePlace(Message):
    """Request of a lead the place of a follower that is lost, for the standby of that follower.

    The standby will be reached at ``host`` and ``port``, and knows of this ``generation`` of its
    primary. The rest is what it holds, as in `shard_state`.
    """

    kind = "take_place"
    run: Text
    shard: UInt
    shards: UInt
    host: Text
    port: UInt
    generation: UInt
    version: UInt
    update: UInt
    measured: bool
    holds: Plain
    place_proof: Bytes32 = b""


@value
class PlaceGiven(Message):
    """The standby has the place, in the term of its own generations that begins with ``place``.

    The lead leads no other server there any more, nor the one that had the place.
    """

    kind = "place_given"
    place: UInt


@value
class Fence(Message):
    """A standby of this run was promoted, to this generation: a server of a lower one ends.

    ``primary``: the URL of the server now.
    """

    kind = "fence"
    run: Text
    generation: UInt
    primary: Text
    generation_proof: Bytes32 = b""
