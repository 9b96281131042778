"""The messages of the wire, as frozen values; nothing else is ever decoded.

Each class is one ``kind``. Its fields, in order, are the keys of the header map after ``kind``;
their annotations are the types of `aiops.wire.fields`. ``parts`` lists the payloads that follow the
header. `encode` and `aiops.wire.decoding.decode` are exact inverses. `decode` accepts no missing
key, no unknown key and no value of another type, so this file bounds what a hostile peer can make
the receiver build. docs/wire.md, docs/wire-servers.md and their neighbours document the same
messages for readers of other languages: the docstrings below are the meanings printed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from struct import Struct
from typing import ClassVar, TypeAlias

import msgpack

from aiops.common.frozen import value
from aiops.model.parts import MAX_TEXT, Parts, Ranges, Wants
from aiops.wire.fields import (
    Batches,
    Blob,
    Gate,
    Have,
    Members,
    Nonce,
    Offered,
    OptReal,
    Plain,
    Real,
    Rows,
    ShardTable,
    Sparse,
    Text,
    UInt,
)

PROTOCOL = 2
"""The version of the wire that this package speaks; both sides must speak the same."""

WIRE_NAME = f"aiops/{PROTOCOL}".encode()
"""The first thing that a proof is about, so that none is of use on another version of the wire."""

REMEMBERED = 64
"""Answers to pushes that a server remembers per client: pushes that a client may have under way."""


@value
class Message:
    """The base of all messages: the id of the request it is or answers (0: unrequested)."""

    kind: ClassVar[str] = ""
    id: UInt


# ---------------------------------------------------------------- from client to server


@value
class Hello(Message):
    """The first message on a connection: the client's identity."""

    kind = "hello"
    protocol: UInt
    client: Text  # chosen at random once per client; the same after a reconnect
    epoch: UInt  # 1 for the client's first connection, then rising
    name: Text  # for people
    role: Text  # "worker" or "observer"
    pongs: bool  # whether the client promises to answer pings
    nonce: Nonce
    agent: Text


@value
class Prove(Message):
    """The answer to a challenge: proof of the token, which itself never travels."""

    kind = "prove"
    proof: Blob


@value
class Define(Message):
    """Offer a model: tensors, whose values are the payloads, and tables, which have none.

    The first offer defines the model; a later one is compared with it.
    """

    kind = "define"
    tensors: Offered
    parts: Parts = ()
    tables: Sparse = ()


@value
class Describe(Message):
    """Request the description of the model."""

    kind = "describe"


@value
class Push(Message):
    """Apply a gradient. With ``fetch`` the acknowledgement brings the parameters too."""

    kind = "push"
    seq: UInt
    fetch: bool
    have: Have
    parts: Parts = ()
    wants: Wants = ()
    coded: bool = False
    count: Batches = 1


@value
class Reapply(Message):
    """Apply this client's last gradient again, as stale as it is by now.

    It takes the place of a push that a gate keeps back, and is answered like one.
    """

    kind = "reapply"
    seq: UInt
    fetch: bool
    have: Have
    wants: Wants = ()
    coded: bool = False


@value
class Fetch(Message):
    """Request the tensors that have changed since the version held."""

    kind = "fetch"
    have: Have
    wants: Wants = ()
    coded: bool = False


@value
class FetchRows(Message):
    """Request rows of a table. The payload holds their numbers, int64, little endian."""

    kind = "fetch_rows"
    table: UInt
    parts: Parts = ()


@value
class PushRows(Message):
    """Apply gradients of rows of a table that were fetched at ``version``.

    The payloads are the rows' numbers; the numbers of the rows that the answer is to bring, if
    any; and the gradients, row by row.
    """

    kind = "push_rows"
    seq: UInt
    table: UInt
    version: UInt
    parts: Parts = ()


@value
class Stats(Message):
    """Request the server's statistics."""

    kind = "stats"


@value
class Ping(Message):
    """Request a sign of life."""

    kind = "ping"


@value
class Leave(Message):
    """End the session: no barrier waits for this client any more."""

    kind = "leave"


# ---------------------------------------------------------------- from server to client


@value
class Challenge(Message):
    """Demand proof that the client knows the token."""

    kind = "challenge"
    nonce: Nonce


@value
class Welcome(Message):
    """The session is open. The server's policy and model, and the client's part of the policy."""

    kind = "welcome"
    protocol: UInt
    run: Text  # another one each time a server is started: versions count within a run
    proof: Blob  # that the server knows the token too; empty without one
    policy: Text
    settings: Plain
    plan: Plain
    version: UInt
    model: Rows
    last_seq: UInt  # the highest push of this client the server has taken, 0 for none
    tables: Sparse = ()
    shards: ShardTable = ()  # the model's other shards, if there are any


@value
class Model(Message):
    """The model as the server holds it."""

    kind = "model"
    created: bool  # whether this client's offer defined it
    version: UInt
    model: Rows
    tables: Sparse = ()
    shards: ShardTable = ()


@value
class Ack(Message):
    """The push was taken. ``parts`` brings parameters if the push asked for them."""

    kind = "ack"
    version: UInt
    current: UInt
    used: bool
    staleness: UInt
    mean_staleness: Real
    vbar: OptReal
    vbars: Blob
    parts: Parts = ()
    gate: Gate = ()


@value
class Params(Message):
    """The tensors asked for that the client does not hold already, all of one ``version``."""

    kind = "params"
    version: UInt
    parts: Parts = ()
    vbar: OptReal = None
    vbars: Blob = b""
    gate: Gate = ()


@value
class TableRows(Message):
    """The rows that were asked for, and the acknowledgement of the push that asked for them."""

    kind = "rows"
    version: UInt
    staleness: UInt
    parts: Parts = ()


@value
class Report(Message):
    """The server's statistics."""

    kind = "report"
    report: Plain


@value
class Pong(Message):
    """The answer to a ping, with its ``id``."""

    kind = "pong"


@value
class Error(Message):
    """A request was refused, or (``fatal``) the connection is about to be closed."""

    kind = "error"
    code: Text
    text: Text
    details: Plain
    fatal: bool
    version: UInt = 0  # the model's, so that a worker told to recompute knows what is current
    parts: Parts = ()

    def __post_init__(self) -> None:
        """Cut a text short that could not travel (it may quote long names)."""
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", self.text[: MAX_TEXT - 1] + "…")


# ---------------------------------------------------------------- within one machine, either way


@value
class Share(Message):
    """Announce a segment of memory, whose file descriptor travels beside the connection.

    Payloads may then be places in it.
    """

    kind = "share"
    segment: UInt
    nbytes: UInt


@value
class Release(Message):
    """Give back the memory in which the answer of this ``id`` lies."""

    kind = "release"


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


@value
class ShardWelcome(Message):
    """The follower has accepted the connection."""

    kind = "shard_welcome"
    protocol: UInt
    proof: Blob


@value
class ShardParts(Message):
    """The parts of a push, or of an answer, that this shard holds, under the request's ``id``."""

    kind = "shard_parts"
    version: UInt
    parts: Parts = ()


# ---------------------------------------------------------------- averaging: with the server


@value
class JoinRound(Message):
    """Be ready to average models with other workers, who reach this one at ``host``, ``port``.

    With ``port`` 0: withdraw until the next `join_round`.
    """

    kind = "join_round"
    host: Text
    port: UInt
    rounds: UInt
    digest: Blob
    nonce: Nonce


@value
class Round(Message):
    """The workers who average their models now, among themselves."""

    kind = "round"
    number: UInt
    rank: UInt
    members: Members
    secret: Blob


# ---------------------------------------------------------------- averaging: worker to worker


@value
class RingHello(Message):
    """The first message between two neighbours of a round, each way: proof of the secret."""

    kind = "ring_hello"
    number: UInt
    rank: UInt
    proof: Blob


@value
class RingChunk(Message):
    """A chunk of the mean on its way round the ring."""

    kind = "ring_chunk"
    hop: UInt
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


@value
class LoadShard(Message):
    """The model's description, and the bytes of it that this follower holds: the payloads."""

    kind = "load_shard"
    plan: Plain
    model: Rows
    shards: ShardTable
    shard: UInt
    parts: Parts = ()


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


@value
class SendParams(Message):
    """Send a client its parts of the answer to request ``id``, of this version.

    ``client`` is empty when the lead itself is the receiver.
    """

    kind = "send_params"
    client: Text
    epoch: UInt
    version: UInt
    ranges: Ranges


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


@value
class FinishPush(Message):
    """Push ``id`` by the lead's count has been applied, or will not come.

    ``keep``: its buffer is free again, but the gradient may be applied once more.
    """

    kind = "finish_push"
    keep: bool


@value
class CountTraffic(Message):
    """Request what has crossed between this follower and each client."""

    kind = "count_traffic"


@value
class PushArrived(Message):
    """All of this shard's parts of push ``id`` are there; ``fault``: why they cannot be used."""

    kind = "push_arrived"
    fault: Plain


@value
class UpdateDone(Message):
    """Update ``id`` is computed."""

    kind = "update_done"
    sums: Blob


@value
class TrafficCounted(Message):
    """The traffic by client: its bytes in and out, messages in and out, and these by kind."""

    kind = "traffic_counted"
    clients: Plain


Greeting: TypeAlias = Hello | ShardHello | LeadHello
"""The messages that may come first on a connection to a server."""

KINDS: Mapping[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        *(Hello, Challenge, Prove, Welcome),
        *(Define, Describe, Model),
        *(Push, Reapply, Ack, Fetch, Params),
        *(FetchRows, PushRows, TableRows),
        *(Stats, Report, Ping, Pong, Leave, Error),
        *(Share, Release),
        *(ShardHello, ShardWelcome, ShardParts),
        *(JoinRound, Round, RingHello, RingChunk),
        *(LeadHello, LoadShard, ExpectPush, RunUpdate, SendParams, SendIncrements, HoldVersion),
        *(FinishPush, CountTraffic, PushArrived, UpdateDone, TrafficCounted),
    )
}
"""The class of each kind, in the order of the documentation."""


# ---------------------------------------------------------------- as bytes


def encode(message: Message) -> bytes:
    """Return the header map of a message as MessagePack bytes."""
    kind = type(message)
    names, values = _NAMES[kind]
    keys = _STEADY.get(kind)
    try:
        if keys is None:
            return _pack_map(list(zip(names, values(message), strict=False)))  # type: ignore[no-any-return]
        chunks = [_OPENING[kind]]
        for key, widened, item in zip(*keys, values(message), strict=True):
            chunks.append(key)
            if widened is _INTEGER and item >= 0:
                chunks.append(_LONGEST(0xCF, item))
            elif widened is _PARTS and len(item) == 1:
                chunks += _PART, _pack(item[0][:-1])[1:], _LONGEST(0xCF, item[0][-1])
            else:
                chunks.append(_pack(item))
        return b"".join(chunks)
    except Exception:
        _packer.reset()  # else the next message would begin with what there is of this one
        raise


_NAMES = {
    cls: (names, attrgetter(*names))
    for cls in KINDS.values()
    for names in [("kind", *(field.name for field in fields(cls)))]
}
_packer = msgpack.Packer()
_pack, _pack_map = _packer.pack, _packer.pack_map_pairs
_LONGEST = Struct(">BQ").pack

# The headers of successive pushes differ in some integers, and so do those of their answers. These
# integers are written in their longest form, so that all other bytes keep their values and offsets
# (`aiops.wire.template`). Readers accept any form.
_INTEGER, _PARTS = "integer", "parts"
_PART = b"\x91\x95"  # a list of one list of five
_WIDENED: Mapping[type[Message], Mapping[str, str]] = {
    Push: {**dict.fromkeys(("id", "seq", "have"), _INTEGER), "parts": _PARTS},
    Ack: {**dict.fromkeys(("id", "version", "current", "staleness"), _INTEGER), "parts": _PARTS},
    Release: {"id": _INTEGER},
}
_OPENING = {cls: bytes([0x80 + len(_NAMES[cls][0])]) for cls in _WIDENED}
_STEADY = {
    cls: (
        tuple(_pack(name) for name in _NAMES[cls][0]),
        tuple(widened.get(name, "") for name in _NAMES[cls][0]),
    )
    for cls, widened in _WIDENED.items()
}
