"""The messages of averaging: the rounds that a server arranges, the ring, and its relay.

See `aiops.wire.messages` for the form of the classes.
"""

from __future__ import annotations

from aiops.common.frozen import value
from aiops.model.parts import Parts
from aiops.wire.fields import Blob, Bytes32, Examples, Members, Nonce, Text, UInt
from aiops.wire.messages import Message

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
    have: Bytes32 = b""
    settles: bool = False  # this worker trains on a data set: the round is to be settled


@value
class Round(Message):
    """The workers who average their models now, among themselves."""

    kind = "round"
    number: UInt
    rank: UInt
    members: Members
    secret: Blob
    relay: Text = ""  # host:port
    ring_token: Bytes32 = b""
    base: Bytes32 = b""
    settles: bool = False
    codec: Text = ""  # of differences to `base`


@value
class SettleRound(Message):
    """Report the end of a round that is to be settled, and the examples in this worker's copy.

    If all members report a whole mean, all take it over, and the examples count as seen.
    """

    kind = "settle_round"
    number: UInt
    whole: bool  # all of the mean is here; else this worker has given the round up
    seen: Examples


@value
class RoundSettled(Message):
    """The outcome of a round: its members take the mean over, or none does."""

    kind = "settled"
    taken: bool
    counted: bool  # the examples have been seen
    reset: bool  # an example is not this worker's any more: it starts over with others' model


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
    seal: Bytes32 = b""


# ---------------------------------------------------------------- averaging: worker and relay


@value
class RelayHello(Message):
    """Ask a relay for the other end of one connection of a ring.

    It names the ring, the worker that sends the chunks of this connection, and which of its two
    ends this is.
    """

    kind = "relay_hello"
    protocol: UInt
    ring: Bytes32
    sender: UInt  # the rank of the worker that sends chunks
    sends: bool  # whether this is that worker
    nonce: Nonce


@value
class RelayReady(Message):
    """The other end is there: from here on the relay passes all bytes on as they are."""

    kind = "relay_ready"
    proof: Blob
