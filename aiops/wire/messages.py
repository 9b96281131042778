"""The messages between a client and a server, as frozen values.

Each class is one ``kind``. Its fields, in order, are the keys of the header map after ``kind``;
their annotations are the types of `aiops.wire.fields`. ``parts`` lists the payloads that follow the
header. `aiops.wire.decoding` makes nothing but these classes, and those of the same form in
`aiops.wire.server_messages`, `aiops.wire.ring_messages` and `aiops.wire.data_messages`: they
bound what a hostile peer can make the receiver build. docs/wire.md and its neighbours document the
same messages for readers of other languages, with the docstrings of the classes as their meanings.
"""

from __future__ import annotations

from typing import ClassVar

from aiops.common.frozen import value
from aiops.model.parts import MAX_TEXT, Parts, Wants
from aiops.wire.fields import (
    Batches,
    Blob,
    Bytes32,
    Factors,
    Gate,
    Have,
    Logged,
    Nonce,
    Offered,
    OptReal,
    Plain,
    Real,
    Reason,
    Rows,
    ShardTable,
    Sparse,
    Text,
    UInt,
    Versions,
)

PROTOCOL = 4
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
    """The first message on a connection: the client's identity, and what it has of the server."""

    kind = "hello"
    protocol: UInt
    client: Text  # chosen at random once per client; the same after a reconnect
    epoch: UInt  # 1 for the client's first connection, then rising
    name: Text  # for people
    role: Text  # "worker" or "observer"
    pongs: bool  # whether the client promises to answer pings
    nonce: Nonce
    agent: Text
    run: Text = ""  # of the last welcome, empty before the first
    generation: UInt = 0  # of that run, the highest that the client was welcomed by
    acked: UInt = 0  # its highest push that this run has acknowledged
    generation_proof: Bytes32 = b""  # as the welcome of that generation had it


@value
class Prove(Message):
    """The answer to a challenge: proof of the token, which itself never travels."""

    kind = "prove"
    proof: Blob
    key: Blob = b""  # the id of that token


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
    """Apply a gradient. With ``fetch`` the acknowledgement brings the parameters too.

    The learning rate of the step is multiplied by ``lr_factors``: one for all tensors, or one for
    each that the gradient has.
    """

    kind = "push"
    seq: UInt
    fetch: bool
    have: Have
    parts: Parts = ()
    wants: Wants = ()
    coded: bool = False
    count: Batches = 1
    lr_factors: Factors = ()


@value
class Reapply(Message):
    """Apply this client's last gradient again, as stale as it is by now.

    It takes the place of a push that a gate keeps back, and is answered like one. ``lr_factors``
    are as of a push.
    """

    kind = "reapply"
    seq: UInt
    fetch: bool
    have: Have
    wants: Wants = ()
    coded: bool = False
    lr_factors: Factors = ()


@value
class Fetch(Message):
    """Request the tensors that have changed since the version held.

    With ``evaluation`` all that are wanted are sent, as they are where the model is evaluated.
    """

    kind = "fetch"
    have: Have
    wants: Wants = ()
    coded: bool = False
    evaluation: bool = False


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
    any; and the gradients, row by row. The learning rate is multiplied by ``lr_factors``, of which
    there is one or none.
    """

    kind = "push_rows"
    seq: UInt
    table: UInt
    version: UInt
    parts: Parts = ()
    lr_factors: Factors = ()


@value
class Stats(Message):
    """Request the server's statistics."""

    kind = "stats"


@value
class Ping(Message):
    """Request a sign of life."""

    kind = "ping"


@value
class Log(Message):
    """Note numbers about the client's training, for people. There is no answer."""

    kind = "log"
    values: Logged
    compute: OptReal = None
    idle: OptReal = None


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
    run: Text  # the name of the model's history, within which versions count
    proof: Blob  # that the server knows the token too; empty without one
    policy: Text
    settings: Plain
    plan: Plain
    version: UInt
    model: Rows
    last_seq: UInt  # the highest push of this client the server has taken, 0 for none
    tables: Sparse = ()
    shards: ShardTable = ()  # the model's other shards, if there are any
    generation: UInt = 0  # of the run: a start with kept state adds one; 0: none is kept
    intact: Versions = ()  # up to these, versions of the client's generation are what they were
    acks: Text = "applied"  # the promise of an acknowledgement at present
    rolled_back: UInt = 0  # how far `acked` was beyond `last_seq`
    generation_proof: Bytes32 = b""  # that the generation has begun; empty without kept state


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
    why: Reason = ""


@value
class FetchedParams(Message):
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
