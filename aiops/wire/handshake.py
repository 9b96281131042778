"""The handshake of both sides, sans-I/O: protocol version, role and token.

The token itself is never sent. Each side sends a nonce. The client proves that it knows the token
by an HMAC over both nonces (`aiops.wire.token_keys`), and so does the server in its welcome: else a
client would send its gradients to any process that listens on the right port.

The servers of a run share a secret, by which each proves its generation in its welcome. Clients
keep that proof, and an earlier server ends when it is shown to it. A lead proves with the secret
that it is the lead; its followers have the secret from the first lead of their run.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import NamedTuple

from aiops.errors import Refused, RemoteProtocolError, Superseded, Unauthorised
from aiops.wire.messages import (
    PROTOCOL,
    Challenge,
    Error,
    Hello,
    Message,
    Prove,
    Welcome,
)
from aiops.wire.server_messages import Greeting, ShardWelcome
from aiops.wire.standby_messages import StandbyHello, StandbyWelcome
from aiops.wire.state_machine import Side
from aiops.wire.token_keys import (
    FindKeys,
    TokenKeys,
    client_proof,
    keys_of,
    proves_token,
    server_proof,
    token_id,
)

ROLES = ("worker", "observer")


class Admitted(NamedTuple):
    """The end of a handshake: the client's hello, and the server's proof for the welcome.

    ``key``: the id of the token that the client knows; empty if none was asked for.
    """

    hello: Greeting
    proof: bytes
    key: bytes = b""


class ServerHandshake:
    """The server's side of one handshake.

    Parameters
    ----------
    find
        Finds the keys of the token that a client says it has; None: every client is admitted.
    nonce
        16 random bytes, never used before.
    follower
        True if the server is a follower, which only its lead and the lead's clients connect to.
    stands_by
        True if the server is a standby, which observers look at, and have take a follower's place.
    journal
        True if the server has a journal, which a standby can be fed from.
    refusal
        Returns the reason for which a greeting's claim is refused, or an empty text. It is asked
        about those that know the token.
    forbids
        Returns the refusal of a greeting by the token with that id, or None.

    Attributes
    ----------
    hello
        The client's, once it has sent one that is valid.
    admitted
        The result, once the client is admitted.
    """

    def __init__(
        self,
        find: FindKeys | None,
        nonce: bytes,
        *,
        follower: bool = False,
        stands_by: bool = False,
        journal: bool = False,
        refusal: Callable[[Greeting], str] = lambda hello: "",
        forbids: Callable[[Greeting, bytes], Refused | None] = lambda hello, key: None,
    ) -> None:
        self._find, self._nonce, self._forbids = find, nonce, forbids
        self._follower, self._journal, self._refusal = follower, journal, refusal
        self._stands_by = stands_by
        self.hello: Greeting | None = None
        self.admitted: Admitted | None = None
        self._challenged: Greeting | None = None

    def receive(self, message: Message) -> Challenge | Error | Admitted:
        """Return the answer, or that the client is admitted: the engine sends the welcome."""
        if isinstance(message, Greeting):
            return self._receive_hello(message)
        if isinstance(message, Prove) and self._challenged is not None:
            return self._receive_proof(message, self._challenged)
        # The wire's table lets nothing else through but the hello of a ring.
        text = "this is the server: a round's workers listen at other addresses"
        return _fatal(message.id, "protocol", text)

    def _receive_proof(self, message: Prove, hello: Greeting) -> Error | Admitted:
        facts = hello.nonce, self._nonce, hello.client
        keys = self._find(message.key) if self._find is not None else None
        # Without such a token the same is computed: the time tells no stranger which there are.
        right = proves_token(message.proof, keys or _NO_TOKEN, *facts)
        if keys is None or not right:
            return _fatal(
                message.id,
                Unauthorised.code,
                "the token is wrong: give the client a token that the server takes now",
            )
        return self._admit(hello, server_proof(keys.server, *facts), keys.id)

    def _receive_hello(self, hello: Greeting) -> Challenge | Error | Admitted:
        if hello.protocol != PROTOCOL:
            return _fatal(
                hello.id,
                "protocol",
                f"the client speaks version {hello.protocol} of the wire, this server {PROTOCOL}:"
                " install the same version of aiops on both sides",
            )
        if self._follower and not self._stands_by and isinstance(hello, Hello):
            text = "this server holds a part of a model only: connect to its lead"
            return _fatal(hello.id, "protocol", text)
        if isinstance(hello, StandbyHello):
            if not self._journal:
                text = (
                    "this server has no journal to feed a standby from: name the primary, if this"
                    " one is a standby itself; else start it with --state, and not --acks applied"
                )
                return _fatal(hello.id, "protocol", text)
        elif not self._follower and not isinstance(hello, Hello):
            text = "this server is no follower: to have it hold a shard, start it with --follower"
            return _fatal(hello.id, "protocol", text)
        if isinstance(hello, Hello) and hello.role not in ROLES:
            text = f"the role {hello.role!r} is neither 'worker' nor 'observer'"
            return _fatal(hello.id, "protocol", text)
        self.hello = hello
        if self._find is not None:
            self._challenged = hello
            return Challenge(hello.id, self._nonce)
        return self._admit(hello, b"", b"")

    def _admit(self, hello: Greeting, proof: bytes, key: bytes) -> Error | Admitted:
        fault = self._forbids(hello, key)
        if fault is not None:
            return _fatal(hello.id, fault.code, str(fault))
        why = self._refusal(hello)
        if why:
            return _fatal(hello.id, Superseded.code, why)
        self.admitted = Admitted(hello, proof, key)
        return self.admitted


def answer(challenge: Challenge, hello: Greeting, token: str | None, server: str) -> Prove:
    """Return the client's answer to a challenge.

    Raises
    ------
    Unauthorised
        When there is no token to prove; an empty one is none.
    """
    if not token:
        raise Unauthorised(f"{server} asks for a token: pass token=... or set AIOPS_TOKEN")
    given = proof(token, "client", hello.nonce, challenge.nonce, hello.client)
    return Prove(challenge.id, given, token_id(token))


def check_welcome(
    welcome: Welcome | ShardWelcome | StandbyWelcome,
    hello: Greeting,
    challenge: Challenge | None,
    token: str | None,
    server: str,
) -> None:
    """Check that a welcome comes from a server that knows the token too.

    Raises
    ------
    Unauthorised
        When it does not: the client must send it nothing more.
    RemoteProtocolError
        When it speaks another version of the protocol.
    """
    if welcome.protocol != PROTOCOL:
        raise RemoteProtocolError(
            f"{server} speaks version {welcome.protocol} of the wire, this client {PROTOCOL}"
        )
    if token is None:
        return
    if challenge is None:
        raise Unauthorised(
            f"{server} asked for no token although this client has one: it may be another server;"
            " start the server with the token, or connect without it"
        )
    right = proof(token, "server", hello.nonce, challenge.nonce, hello.client)
    if not hmac.compare_digest(welcome.proof, right):
        raise Unauthorised(f"{server} does not know the token: it may not be the server it claims")


def _fatal(id: int, code: str, text: str) -> Error:
    return Error(id, code, text, {}, True)


def proof(token: str, side: Side, client_nonce: bytes, server_nonce: bytes, client: str) -> bytes:
    """Return the 32 bytes by which ``side`` shows a peer that it knows the token."""
    facts = client_nonce, server_nonce, client
    if side == "client":
        return client_proof(token, *facts)
    return server_proof(keys_of(token).server, *facts)


def generation_proof(secret: bytes, run: str, generation: int, *, lead: bool = False) -> bytes:
    """Return the HMAC-SHA256 by which a server of a run shows that a generation has begun.

    ``lead``: by which the lead of that generation shows a follower that it is the lead. Clients
    have the other one, from their welcome.
    """
    what = b"lead" if lead else b"generation"
    return _mac(secret, what, run.encode(), generation.to_bytes(8, "big"))


def proves_generation(
    given: bytes, secret: bytes, run: str, generation: int, *, lead: bool = False
) -> bool:
    """Compare a given proof of a generation with the right one, in constant time.

    None is right without a secret.
    """
    right = generation_proof(secret, run, generation, lead=lead)
    return hmac.compare_digest(given, right) and bool(secret)


def place_proof(secret: bytes, run: str, shard: int, host: str, port: int) -> bytes:
    """Return the HMAC-SHA256 by which a standby shows its run's lead that it is of this run.

    ``host`` and ``port`` are those at which the lead is to reach it.
    """
    where = host.encode(), port.to_bytes(8, "big")
    return _mac(secret, b"place", run.encode(), shard.to_bytes(8, "big"), *where)


def proves_place(given: bytes, secret: bytes, run: str, shard: int, host: str, port: int) -> bool:
    """Compare a given proof with the right one, as `proves_generation` does."""
    right = place_proof(secret, run, shard, host, port)
    return hmac.compare_digest(given, right) and bool(secret)


def _mac(key: bytes, *facts: bytes) -> bytes:
    """Return the HMAC-SHA256 of facts, each behind its length, so that none runs into another."""
    text = b"".join(len(fact).to_bytes(4, "big") + fact for fact in facts)
    return hmac.new(key, text, hashlib.sha256).digest()


_NO_TOKEN = TokenKeys(b"", bytes(32), bytes(32))
