"""The messages between the servers of one model, and between its shards and their clients.

See `aiops.wire.messages` for the form of the classes.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, TypeAlias

from aiops.common.frozen import value
from aiops.model.parts import Parts, Ranges
from aiops.wire.fields import (
    Blob,
    Bytes32,
    Nonce,
    Plain,
    Real,
    Rows,
    ShardTable,
    Text,
    UInt,
    Versions,
)
from aiops.wire.messages import Hello, Message
from aiops.wire.standby_messages import StandbyHello

# ---------------------------------------------------------------- between shards and clients


@value
class ShardHello(Message):
    """The first message to a follower: the connection to the lead that this one belongs to."""

    kind = "shard_hello"
    role: ClassVar[str] = "client of a shard"
    protocol: UInt
    client: Text
    epoch: UInt
    name: Text
    run: Text
    pongs: bool
    nonce: Nonce
    agent: Text
    generation: UInt = 0  # of the run, as the lead's welcome had it
    worker: bool = True  # else an observer


@value
class ShardWelcome(Message):
    """The follower has accepted the connection.

    ``last_seq``: the highest number of the client's pushes of rows that lie here; 0: none counts.
    """

    kind = "shard_welcome"
    protocol: UInt
    proof: Blob
    last_seq: UInt = 0


@value
class ShardParts(Message):
    """The parts of a push, or of an answer, that this shard holds, under the request's ``id``."""

    kind = "shard_parts"
    version: UInt
    parts: Parts = ()


# ---------------------------------------------------------------- from a lead to its followers


@value
class LeadHello(Message):
    """The first message of a lead to a follower, which takes orders from it from then on."""

    kind = "lead_hello"
    role: ClassVar[str] = "lead"
    protocol: UInt
    client: Text  # the lead's own id
    epoch: UInt
    name: Text
    run: Text
    pongs: bool
    nonce: Nonce
    agent: Text
    policy: Text
    settings: Plain
    generation: UInt = 0  # the number of starts of a lead with a state; 0 without
    standby: bool = False  # it is the standby of a lead, and looks for those of its followers
    lead_proof: Bytes32 = b""  # that it is the lead of this generation; empty: it has no secret
    place: UInt = 0  # the number of the follower's place, the newest that the lead knows of


@value
class ShareSecret(Message):
    """The run's secret, for a follower that has no state of the run yet.

    From here on the follower has no lead of this run that does not prove with it that it is one.
    """

    kind = "share_secret"
    secret: Bytes32 = field(repr=False)


@value
class LoadShard(Message):
    """The model's description, and the bytes of it that this follower holds: the payloads.

    ``row``, in this order and in others: the newest row of the lead's journal when it was decided;
    0 if the lead keeps no state.
    """

    kind = "load_shard"
    plan: Plain
    model: Rows
    shards: ShardTable
    shard: UInt
    parts: Parts = ()
    row: UInt = 0


@value
class ExpectPush(Message):
    """A client's request will bring `shard_parts`, which are push ``id`` by the lead's count.

    Buffers are given in the order of these. Without ``ranges`` what arrives is discarded.
    """

    kind = "expect_push"
    client: Text
    epoch: UInt
    request: UInt
    ranges: Ranges


@value
class RunUpdate(Message):
    """Compute update ``id`` with push ``push`` (0: none) and with the gradients collected.

    ``version`` is the model's before the update: a follower publishes what it computed when an
    order names that version.
    """

    kind = "run_update"
    push: UInt
    version: UInt
    work: Plain
    row: UInt = 0


@value
class SendParams(Message):
    """Send a client its parts of the answer to request ``id``, of this version.

    ``client`` is empty when the lead itself is the receiver. With ``evaluation`` the parameters are
    those where the model is evaluated.
    """

    kind = "send_params"
    client: Text
    epoch: UInt
    version: UInt
    ranges: Ranges
    evaluation: bool = False


@value
class SendIncrements(Message):
    """Send a client its parts of a coded answer, from the version of the delta replica.

    ``ranges`` are sent as they are, ``increments`` as increments.
    """

    kind = "send_increments"
    client: Text
    epoch: UInt
    version: UInt
    ranges: Ranges
    increments: Ranges


@value
class HoldVersion(Message):
    """Keep a version with which gradients will be compared, or (``keep`` false) let it go."""

    kind = "hold_version"
    version: UInt
    keep: bool
    replica: bool
    row: UInt = 0


@value
class FinishPush(Message):
    """Push ``id`` by the lead's count has been applied, or will not come.

    ``keep``: its buffer is free again, but the gradient may be applied once more.
    """

    kind = "finish_push"
    keep: bool
    row: UInt = 0


@value
class NoteHistory(Message):
    """The generations of the lead: the orders that follow are of the last of them.

    A lead that has lost rows writes others under their numbers. So a row of its journal is known by
    its number and the generation that wrote it. ``generations`` rise, each began behind a row of
    ``began``, and ``row`` is the last of these. It is the first order of a start, but for
    `LoadShard`.
    """

    kind = "note_history"
    generations: Versions
    began: Versions
    row: UInt = 0


@value
class KeepSets(Message):
    """The snapshots of these rows of the lead's journal (``cuts``) are on all shards.

    Earlier ones are not needed, nor what the journal has for them alone.
    """

    kind = "keep_sets"
    cuts: Versions


@value
class RollBack(Message):
    """Go back to the newest moment that is no later than ``row`` of the lead's journal.

    The lead, or another follower, has lost what followed. The follower ends the connection, undoes
    the orders of later rows, and says in another `shard_state` what it holds then.
    """

    kind = "roll_back"
    row: UInt


@value
class CountTraffic(Message):
    """Request what has crossed between this follower and each client."""

    kind = "count_traffic"


@value
class SendRows(Message):
    """Request all rows of tables that lie on this follower, as they are now."""

    kind = "send_rows"


@value
class ClosePushes(Message):
    """Refuse clients' pushes of rows from here on, for this reason: ``why`` is a sentence.

    Empty: take them again. The lead ends, or is paused, and refuses its own share of them.
    """

    kind = "close_pushes"
    why: Text


@value
class SendAway(Message):
    """End the connections of a client, and take no other of it: an administrator sent it away.

    ``why`` is a sentence.
    """

    kind = "send_away"
    client: Text
    why: Text


@value
class PaceClients(Message):
    """This follower's shares of the bandwidth budgets: bytes per second, both ways.

    ``total``: of all clients together; ``each``: of each client; 0: without a limit. ``weights``:
    by client, the changed weights by which their connections share it.
    """

    kind = "pace_clients"
    total: UInt
    each: UInt
    weights: Plain


@value
class ShardState(Message):
    """The state that a follower holds, for the lead that it has welcomed.

    ``run`` (empty: it holds none), ``shard`` and ``shards`` say of what. ``version`` is the newest
    that it has computed, ``update`` the last that it has done (0: none), or (``measured``) has
    measured or rehearsed.
    ``holds`` has the numbers of the pushes of which it has the ``portions``, and the ``versions``
    that it keeps: number, and true for one of the delta replica. Its ``snapshots`` are the rows of
    the lead's journal of which it has one. ``reached`` is the row of its last order, and of
    ``history`` the last generation is that which gave it: each with the row behind which it began.
    A follower that keeps a state has these two alone if it has lost its model. ``kept``: it keeps a
    state of its own.
    """

    kind = "shard_state"
    kept: bool
    run: Text
    shard: UInt
    shards: UInt
    version: UInt
    update: UInt
    measured: bool
    holds: Plain


@value
class PushArrived(Message):
    """All of this shard's parts of push ``id`` are there; ``fault``: why they cannot be used.

    ``largest``: the largest magnitude in them. ``values``: float64, those of them that the lead's
    filters look at, at the positions of ``seed``; both empty if there are no filters, or a part is
    coded.
    """

    kind = "push_arrived"
    fault: Plain
    largest: Real = 0.0
    seed: Blob = b""
    values: Blob = b""


@value
class UpdateDone(Message):
    """A round of update ``id`` is computed; a rehearsal brings the follower's ``proof``.

    A step brings the ``values`` of the new version that the lead's filters look at, if any: they
    are float64, at the positions of ``seed``.
    """

    kind = "update_done"
    sums: Blob
    proof: Blob
    seed: Blob = b""
    values: Blob = b""


@value
class SnapshotSaved(Message):
    """The snapshot of row ``id`` of the lead's journal is on the disk, unless there is a ``why``.

    That is the reason for which it is not.
    """

    kind = "snapshot_saved"
    why: Text


@value
class TrafficCounted(Message):
    """The traffic by client: its bytes in and out, messages in and out, and these by kind.

    ``state``: of the statistics, what concerns the state that this follower keeps; else empty.
    ``tables``: by name, the counts of the rows that lie here: made, evicted, bytes, rows_pushed.
    """

    kind = "traffic_counted"
    clients: Plain
    state: Plain
    tables: Plain


@value
class StoredRows(Message):
    """Rows of a table that lie on this follower: the payload is their numbers, then their values.

    All messages of an answer are of one moment.
    """

    kind = "stored_rows"
    table: UInt
    left: UInt
    parts: Parts = ()


@value
class BudgetUsed(Message):
    """The traffic between this follower and its clients since the last such message.

    ``nbytes`` crossed, both ways; ``second`` of them and before in the last second; ``backlog``
    bytes wait; ``busy`` connections have a message on its way; ``limited``: one had to wait
    meanwhile.
    """

    kind = "budget_used"
    nbytes: UInt
    second: UInt
    backlog: UInt
    busy: UInt
    limited: bool


Greeting: TypeAlias = Hello | ShardHello | LeadHello | StandbyHello
"""The messages that may come first on a connection to a server."""
