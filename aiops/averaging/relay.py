"""The decisions of a relay, sans-I/O: who is admitted, and which two connections belong together.

Workers of a round that cannot reach each other, because they are behind NAT or a firewall, both
connect to a relay, which passes the bytes of one on to the other.

1. A worker sends `relay_hello`: its ring, and which end of which of the ring's connections it is.
2. The relay sends a challenge, and the worker proves that it knows the token of that ring
   (`aiops.wire.ring_proofs`). The relay finds each ring's token from its own, so it needs to know
   nothing about rounds, and the token of one ring is of no use to another.
3. When both ends are there, the relay sends `relay_ready` to both. From then on it does not look at
   the bytes. The workers prove to each other that they have the round's secret, and seal each
   chunk; the relay has neither, so what it can do is to read, to delay and to cut.

`RelayHandshake` is the first two steps of one connection, and `Meetings` is the third.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from aiops.errors import Unauthorised
from aiops.wire.messages import PROTOCOL, Challenge, Error, Message, Prove
from aiops.wire.ring_messages import RelayHello, RelayReady
from aiops.wire.ring_proofs import relay_proof, relay_proves, ring_token

MOST_MEMBERS = 1 << 16
"""Workers of a ring, at most."""


class Claim(NamedTuple):
    """One end of one connection of a ring: its ring, the rank that sends chunks, and which end."""

    ring: bytes
    sender: int
    sends: bool

    @property
    def other(self) -> Claim:
        """The other end."""
        return self._replace(sends=not self.sends)


class RelayHandshake:
    """The relay's side of one handshake.

    Parameters
    ----------
    token
        What the relay shares with the servers whose rings it admits; empty: all rings are.
    nonce
        16 random bytes, never used before.

    Attributes
    ----------
    claim
        What the connection is, once it is admitted.
    """

    def __init__(self, token: str, nonce: bytes) -> None:
        self._token, self._nonce = token, nonce
        self._hello: RelayHello | None = None
        self.claim: Claim | None = None

    def receive(self, message: Message) -> Challenge | Error | None:
        """Return the answer, or None: the connection is admitted."""
        if isinstance(message, RelayHello) and self._hello is None:
            return self._receive_hello(message)
        if isinstance(message, Prove) and self._hello is not None and self.claim is None:
            hello = self._hello
            token = ring_token(self._token, hello.ring)
            if not relay_proves(message.proof, token, "client", hello, self._nonce):
                return _fatal(
                    Unauthorised.code,
                    "this is not the token of that ring: start the relay and the server with the"
                    " same AIOPS_RELAY_TOKEN",
                )
            self.claim = Claim(hello.ring, hello.sender, hello.sends)
            return None
        return _fatal("protocol", "this is a relay, at which the workers of a ring meet")

    def ready(self) -> RelayReady:
        """Return the message that the other end is there; to one that is admitted."""
        hello = self._hello
        assert hello is not None, "the connection is admitted"
        token = ring_token(self._token, hello.ring)
        return RelayReady(hello.id, relay_proof(token, "server", hello, self._nonce))

    def _receive_hello(self, hello: RelayHello) -> Challenge | Error:
        if hello.protocol != PROTOCOL:
            return _fatal(
                "protocol",
                f"the worker speaks version {hello.protocol} of the wire, this relay {PROTOCOL}:"
                " install the same version of aiops on both sides",
            )
        if len(hello.ring) != hashlib.sha256().digest_size or hello.sender >= MOST_MEMBERS:
            return _fatal("protocol", "a relay_hello names a ring by 32 bytes, and a rank in it")
        self._hello = hello
        return Challenge(hello.id, self._nonce)


class Meetings:
    """The connections that wait for their other end, each by what it claims to be."""

    def __init__(self) -> None:
        self._waiting: dict[Claim, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def arrive(self, peer: int, claim: Claim) -> tuple[int | None, int | None]:
        """Admit a connection.

        Returns
        -------
        tuple
            The connection that is its other end, which waits no more; or None, and this one waits.
            And the connection that waited with the same claim, which this one takes the place of:
            its worker has connected again.
        """
        found = self._waiting.pop(claim.other, None)
        if found is not None:
            return found, None
        replaced = self._waiting.get(claim)
        self._waiting[claim] = peer
        return None, replaced

    def leave(self, peer: int, claim: Claim) -> None:
        """Forget a connection that ended, if it waits."""
        if self._waiting.get(claim) == peer:
            del self._waiting[claim]


def _fatal(code: str, text: str) -> Error:
    return Error(0, code, text, {}, True)
