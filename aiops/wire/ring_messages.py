"""The messages of averaging: the rounds that a server arranges, and the ring of their workers.

See `aiops.wire.messages` for the form of the classes.
"""

from __future__ import annotations

from aiops.common.frozen import value
from aiops.model.parts import Parts
from aiops.wire.fields import Blob, Members, Nonce, Text, UInt
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
