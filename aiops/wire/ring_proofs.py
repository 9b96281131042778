"""The proofs of averaging: of a round's secret, of a ring's token, and of a chunk.

The workers of a round are told a secret by their server, new in every round. From it follow

* the proofs by which two neighbours recognise each other (`proof`);
* the ring's name at a relay (`ring_name`), from which the secret cannot be found;
* the keys with which chunks are sealed on their way through a relay (`ChunkSeal`).

A relay shares its own token with the server. From the ring's name and that follows the token of the
ring (`ring_token`), which the server tells the members of the round, and by which the relay admits
them (`relay_proof`). It is of no use to any other ring.
"""

from __future__ import annotations

import hashlib
import hmac

from aiops.errors import RemoteProtocolError
from aiops.model.parts import Part
from aiops.wire.messages import WIRE_NAME
from aiops.wire.ring_messages import RelayHello
from aiops.wire.state_machine import Side


def _mac(key: bytes, *facts: bytes | int) -> bytes:
    """Return the HMAC-SHA256 of facts, each behind its length, so that none runs into another."""
    items = (fact if isinstance(fact, bytes) else fact.to_bytes(8, "big") for fact in facts)
    text = b"".join(len(item).to_bytes(4, "big") + item for item in (WIRE_NAME, *items))
    return hmac.new(key, text, hashlib.sha256).digest()


# ---------------------------------------------------------------- between two workers


def proof(secret: bytes, side: Side, number: int, rank: int) -> bytes:
    """Return the HMAC-SHA256 by which a worker proves that it has a round's secret.

    The worker that connects is the ``"client"``. Secret and number are new in every round.
    """
    return _mac(secret, b"round", side.encode(), number, rank)


def proves(given: bytes, secret: bytes, side: Side, number: int, rank: int) -> bool:
    """Compare a given proof with the right one, in constant time."""
    return hmac.compare_digest(given, proof(secret, side, number, rank))


class ChunkSeal:
    """The key of one worker's chunks, on their way to the next worker through a relay.

    Parameters
    ----------
    secret
        The round's secret.
    number
        The round's number.
    sender
        The rank of the worker that sends the chunks.
    """

    def __init__(self, secret: bytes, number: int, sender: int) -> None:
        self._key = _mac(secret, b"chunks", number, sender)

    def of(self, part: Part, hop: int, payload: memoryview) -> bytes:
        """Return the HMAC-SHA256 of a chunk: its place, codec, hop and bytes.

        A round expects each place after each hop once, so a chunk cannot be repeated either.
        """
        facts = part.start, part.stop, part.codec.encode(), hop
        found = hmac.new(self._key, _mac(self._key, b"chunk", *facts), hashlib.sha256)
        found.update(payload)
        return found.digest()

    def check(self, given: bytes, part: Part, hop: int, payload: memoryview) -> None:
        """Refuse a chunk that is not as it was sent.

        Raises
        ------
        RemoteProtocolError
            When it was changed on its way; the round cannot go on.
        """
        if not hmac.compare_digest(given, self.of(part, hop, payload)):
            raise RemoteProtocolError(
                f"the bytes {part.start} to {part.stop} after {hop} hops were changed on their way"
                " through the relay: this round is void"
            )


def mean_name(secret: bytes, number: int) -> bytes:
    """Return the 32 bytes by which workers call the mean of a round."""
    return _mac(secret, b"mean", number)


# ---------------------------------------------------------------- at a relay


def ring_name(secret: bytes, number: int) -> bytes:
    """Return the 32 bytes by which the members of a round call their ring at a relay."""
    return _mac(secret, b"ring", number)


def ring_token(relay_token: str, ring: bytes) -> bytes:
    """Return the token by which a relay admits the members of one ring.

    ``relay_token``: what the server and the relay share; empty if the relay has none.
    """
    return _mac(relay_token.encode(), b"ring token", ring)


def relay_proof(token: bytes, side: Side, hello: RelayHello, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 by which a side shows that it knows the token of a ring.

    The relay is the ``"server"``, and ``nonce`` is that of its challenge.
    """
    facts = hello.ring, hello.sender, int(hello.sends), hello.nonce, nonce
    return _mac(token, b"relay", side.encode(), *facts)


def relay_proves(given: bytes, token: bytes, side: Side, hello: RelayHello, nonce: bytes) -> bool:
    """Compare a given proof with the right one, in constant time."""
    return hmac.compare_digest(given, relay_proof(token, side, hello, nonce))
