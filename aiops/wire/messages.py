"""The messages that may cross the wire: frozen values, and nothing else is ever decoded.

Each class is one ``kind``. Its fields, in order, are the keys of the header map after ``kind``;
their annotations are the types of `aiops.wire.fields`. ``parts`` lists the payloads that follow the
header. `encode` and `aiops.wire.decoding.decode` are exact inverses, and `decode` accepts no
missing key, no unknown key and no value of another type: what a hostile peer can make this side
build is what stands on this page. docs/wire.md says the same for readers of other languages.
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
    Apart,
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
    Sparse,
    Text,
    UInt,
)

PROTOCOL = 1
"""The version of the wire that this package speaks; both sides must speak the same."""

REMEMBERED = 64
"""Answers to pushes that a server remembers per client: pushes that a client may have under way."""


@value
class Message:
    """What every message has: the id of the request it is or answers (0: unasked)."""

    kind: ClassVar[str] = ""
    id: UInt


# ---------------------------------------------------------------- from client to server


@value
class Hello(Message):
    """The first message: who is there."""

    kind = "hello"
    protocol: UInt
    client: Text  # chosen at random once per client; the same after a reconnect
    epoch: UInt  # 1 for the client's first connection, then rising
    name: Text  # for people
    role: Text  # "worker" or "observer"
    pongs: bool  # whether it promises to answer pings
    nonce: Nonce
    agent: Text


@value
class Prove(Message):
    """The answer to a challenge; the token itself never travels."""

    kind = "prove"
    proof: Blob


@value
class Define(Message):
    """Offer a model (tensors, whose values are the payloads, and tables, which have none).

    The first offer defines it.
    """

    kind = "define"
    tensors: Offered
    parts: Parts = ()
    tables: Sparse = ()


@value
class Describe(Message):
    """Ask for the model as it is defined."""

    kind = "describe"


@value
class Push(Message):
    """A gradient. ``seq`` rises by one per push of a client and makes it apply exactly once.

    With ``fetch`` the acknowledgement brings the parameters too, as a `Fetch` does. ``count`` is
    how many mini-batches' gradients it is made of.
    """

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
    """Apply this client's last gradient again, as stale as it is by now (B-FASGD's skipped push).

    It takes the place of a push, and is answered like one.
    """

    kind = "again"
    seq: UInt
    fetch: bool
    have: Have
    wants: Wants = ()
    coded: bool = False


@value
class Fetch(Message):
    """Ask for the tensors that have changed since ``have``, the model version held (-1: none).

    Who does not want all tensors, or does not hold all of one version, says in ``wants`` which,
    and since when; ``have`` does not count then. ``coded``: the answer may bring increments (see
    `Params`), because the client's tensors are as they were received.
    """

    kind = "fetch"
    have: Have
    wants: Wants = ()
    coded: bool = False


@value
class FetchRows(Message):
    """Ask for rows of a table. The payload holds their ids, int64, little endian."""

    kind = "fetch_rows"
    table: UInt
    parts: Parts = ()


@value
class PushRows(Message):
    """Gradients of rows of a table that were fetched at ``version``.

    The payloads are the rows' ids; the ids of rows that the answer is to bring, if any; and the
    gradients, row by row. Gradients of the same row are added up. ``seq`` as in a push.
    """

    kind = "push_rows"
    seq: UInt
    table: UInt
    version: UInt
    parts: Parts = ()


@value
class Stats(Message):
    """Ask for the server's statistics."""

    kind = "stats"


@value
class Ping(Message):
    """Ask whether the other side is alive (either side may)."""

    kind = "ping"


@value
class Leave(Message):
    """Say goodbye: nobody waits for this client from here on."""

    kind = "leave"


@value
class JoinRound(Message):
    """Be ready to average models with other workers, who reach this one at ``host`` and ``port``.

    With ``port`` 0: be ready no longer, and be waited for by nobody until the next `meet`; one
    that is unanswered is then answered with a round of nobody.
    """

    kind = "meet"
    host: Text
    port: UInt
    rounds: UInt
    digest: Blob
    nonce: Nonce


# ---------------------------------------------------------------- from server to client


@value
class Challenge(Message):
    """Ask for proof that the client knows the token."""

    kind = "challenge"
    nonce: Nonce


@value
class Welcome(Message):
    """The client is in. ``plan`` is its part of the algorithm.

    ``run`` is another one each time a server is started: versions count within a run.
    """

    kind = "welcome"
    protocol: UInt
    run: Text
    proof: Blob  # that the server knows the token too; empty without one
    policy: Text
    settings: Plain
    plan: Plain
    version: UInt
    model: Rows
    last_seq: UInt  # the highest push of this client the server has taken, 0 for none
    tables: Sparse = ()
    apart: Apart = ()  # the model's other shards, if there are any


@value
class Model(Message):
    """The model as it is defined: (name, dtype, shape, offset in the arena in bytes) each."""

    kind = "model"
    created: bool  # whether this client's offer defined it
    version: UInt
    model: Rows
    tables: Sparse = ()
    apart: Apart = ()


@value
class Ack(Message):
    """The push was taken. ``parts`` brings parameters if they were asked for, as in `Params`.

    ``version`` is the model's after this push, and ``current`` that of the parameters: another, if
    this answers a push that was sent again, or if they are coded.
    ``used`` is false when the algorithm ignores this gradient (it is too stale, say); that is no
    error, and the worker goes on. ``staleness`` is the largest over the pushed tensors,
    ``mean_staleness`` the mean weighted by their bytes. ``vbar`` is the mean of the algorithm's
    statistic over all parameters (nil when it keeps none) and ``vbars`` the same per tensor,
    float32, little endian. ``gate``: the constants c_push and c_fetch of the bandwidth gates, where
    a budget has the server choose them.
    """

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
    """The tensors asked for, of ``version``: those that the client does not have already.

    A raw part is the tensors' values. A part in another codec is one tensor's increment, which is
    to be added to what the client holds; several of one tensor follow each other. ``vbar``,
    ``vbars`` and ``gate`` as in `Ack`.
    """

    kind = "params"
    version: UInt
    parts: Parts = ()
    vbar: OptReal = None
    vbars: Blob = b""
    gate: Gate = ()


@value
class TableRows(Message):
    """The rows that were asked for, and what became of the push that they were asked for with.

    ``version`` is how many pushes the table has had, ``staleness`` how many of them came between
    the version that was pushed and the push (0 without one).
    """

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
class Round(Message):
    """The workers who average their models now; they go on among themselves.

    A round of one says that nobody else is ready; a round of none, that nothing is waited for.
    """

    kind = "round"
    number: UInt
    rank: UInt
    members: Members
    secret: Blob


@value
class Pong(Message):
    """The answer to a ping (either side)."""

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
    """Show the other side a segment of memory, whose file descriptor comes beside this.

    Payloads may then be places in it. A segment that had this number before is forgotten.
    """

    kind = "share"
    segment: UInt
    nbytes: UInt


@value
class Release(Message):
    """Give back what the answer of this id lent (from client to server)."""

    kind = "release"


# ---------------------------------------------------------------- between shards and clients


@value
class Follow(Message):
    """The first message to a follower: with which client's connection to the lead this goes.

    ``run`` is what the lead's welcome called its run.
    """

    kind = "follow"
    role: ClassVar[str] = "branch"
    protocol: UInt
    client: Text
    epoch: UInt
    name: Text
    run: Text
    pongs: bool
    nonce: Nonce
    agent: Text


@value
class Attached(Message):
    """The follower is ready for whoever introduced itself."""

    kind = "attached"
    protocol: UInt
    proof: Blob


@value
class Portion(Message):
    """What lies on this shard of a push or of an answer: their parts, under the request's id.

    ``version`` is the model's in an answer, and 0 in a push.
    """

    kind = "portion"
    version: UInt
    parts: Parts = ()


# ---------------------------------------------------------------- between a lead and its followers


@value
class Lead(Message):
    """The first message of a lead to a follower: from here on it gives the orders.

    Both must have the same policy with the same settings.
    """

    kind = "lead"
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
class Begin(Message):
    """The model, and the bytes of it that this follower holds from here on: the payloads.

    ``number`` is which of the shards ``apart`` it is, from 1.
    """

    kind = "begin"
    plan: Plain
    model: Rows
    apart: Apart
    number: UInt
    parts: Parts = ()


@value
class Expect(Message):
    """A client's request will bring a portion, which is push ``id`` by the lead's count.

    Room is given in the order of these. Without ``ranges`` what comes is thrown away.
    """

    kind = "expect"
    client: Text
    epoch: UInt
    request: UInt
    ranges: Ranges


@value
class Use(Message):
    """Update ``id``: what to do with push ``number`` (0: none) and with what was collected.

    ``version`` is the model's before it: a follower publishes what it computed when it hears of it.
    """

    kind = "use"
    number: UInt
    version: UInt
    work: Plain


@value
class Send(Message):
    """Send a client its portion of the answer to request ``id``, of this version.

    ``client`` is empty when the lead itself is to be sent it.
    """

    kind = "send"
    client: Text
    epoch: UInt
    version: UInt
    ranges: Ranges


@value
class SendCoded(Message):
    """The same of an answer whose parameters are coded, from the version of the shadow.

    ``steps`` has the pieces of which increments are sent: start, stop, and how many of the newest;
    ``ranges`` those that are sent as they are.
    """

    kind = "send_coded"
    client: Text
    epoch: UInt
    version: UInt
    ranges: Ranges
    steps: Ranges


@value
class Hold(Message):
    """Keep a version, or (``keep`` false) let it go: gradients will be compared with it.

    ``shadow``: it is one of the parameters as clients of coded fetches hold them.
    """

    kind = "hold"
    version: UInt
    keep: bool
    shadow: bool


@value
class Forget(Message):
    """Push ``id`` by the lead's count is done with, or will not come.

    ``keep``: its room is free again, but it may be used once more.
    """

    kind = "forget"
    keep: bool


@value
class Count(Message):
    """Ask what has crossed between this follower and each client."""

    kind = "count"


@value
class Arrived(Message):
    """All of this shard's portion of push ``id`` is there; ``fault``: why it cannot be used."""

    kind = "arrived"
    fault: Plain


@value
class Done(Message):
    """Update ``id`` is computed. ``sums``: its statistic by piece, int64, little endian."""

    kind = "done"
    sums: Blob


@value
class Counted(Message):
    """The answer, by client: its bytes in and out, messages in and out, and these by kind."""

    kind = "counted"
    clients: Plain


# ---------------------------------------------------------------- between the workers of a round


@value
class Greet(Message):
    """The first message between two neighbours of a round, each way: proof of the secret."""

    kind = "greet"
    number: UInt
    rank: UInt
    proof: Blob


@value
class Chunk(Message):
    """A chunk of the mean on its way round the ring, after so many hops."""

    kind = "chunk"
    hop: UInt
    parts: Parts = ()


Greeting: TypeAlias = Hello | Follow | Lead
"""What may come first on a connection to a server."""

KINDS: Mapping[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        *(Hello, Prove, Define, Describe, Push, Reapply, Fetch, FetchRows, PushRows, Stats),
        *(Ping, Leave, JoinRound),
        *(Challenge, Welcome, Model, Ack, Params, TableRows, Report, Round, Pong, Error),
        *(Share, Release, Follow, Attached, Portion),
        *(Lead, Begin, Expect, Use, Send, SendCoded, Hold, Forget, Count, Arrived, Done, Counted),
        *(Greet, Chunk),
    )
}


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

# From one exchange to the next the header of a push differs in some integers, and so does that of
# its answer. These are written in their longest form, so that all else stays as it is, and where it
# is (`aiops.wire.template`). Readers take any form.
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
