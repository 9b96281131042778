"""The keys that follow from a token, and the proofs that a side knows it.

The scheme is that of SCRAM (RFC 5802), without its salt and its thousands of iterations: these make
it slow to guess a password, and a token of 256 random bits cannot be guessed. A server keeps
`TokenKeys`, from which no client's proof can be made. So a token file that is read by a stranger
does not let it connect; it could only pretend to be the server.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from aiops.wire.messages import WIRE_NAME

KEY_ID = 8
"""Bytes of a token's id."""


class TokenKeys(NamedTuple):
    """All that a server needs to know of a token.

    ``id``: 8 bytes by which the client says which token it has. ``stored``: the hash of the key by
    which clients prove it. ``server``: the key by which a server does.
    """

    id: bytes
    stored: bytes
    server: bytes


FindKeys: TypeAlias = Callable[[bytes], TokenKeys | None]
"""Returns the keys of the token of an id; None: there is none, or it is of no use any more."""


def _client_key(token: str) -> bytes:
    return _mac(token.encode(), b"client key")


def keys_of(token: str) -> TokenKeys:
    """Return what a server keeps of a token."""
    secret = token.encode()
    stored = hashlib.sha256(_client_key(token)).digest()
    return TokenKeys(token_id(token), stored, _mac(secret, b"server key"))


def token_id(token: str) -> bytes:
    """Return the id of a token: 8 bytes, from which the token cannot be found."""
    return _mac(token.encode(), b"id")[:KEY_ID]


def is_of(token: str, keys: TokenKeys) -> bool:
    """Return whether a token is the one of these keys, in constant time."""
    return hmac.compare_digest(keys_of(token).stored, keys.stored)


def only(token: str) -> FindKeys:
    """Return the function that finds the keys of one token."""
    keys = keys_of(token)
    return lambda key: keys if key == keys.id else None


def client_proof(token: str, client_nonce: bytes, server_nonce: bytes, client: str) -> bytes:
    """Return the 32 bytes by which a client shows that it knows a token.

    Both nonces and the client's id are in it, so that a proof is of no use in another handshake.
    """
    key = _client_key(token)
    stored = hashlib.sha256(key).digest()
    return _xor(key, _mac(stored, client_nonce, server_nonce, client.encode()))


def proves_token(
    given: bytes, keys: TokenKeys, client_nonce: bytes, server_nonce: bytes, client: str
) -> bool:
    """Return whether a client's proof is right, in constant time."""
    signature = _mac(keys.stored, client_nonce, server_nonce, client.encode())
    if len(given) != len(signature):
        return False
    key = _xor(given, signature)
    return hmac.compare_digest(hashlib.sha256(key).digest(), keys.stored)


def server_proof(server_key: bytes, client_nonce: bytes, server_nonce: bytes, client: str) -> bytes:
    """Return the HMAC-SHA256 by which a server shows that it has the keys of a token."""
    return _mac(server_key, client_nonce, server_nonce, client.encode())


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _mac(key: bytes, *facts: bytes) -> bytes:
    """Return the HMAC-SHA256 of facts, each behind its length, so that none runs into another."""
    items = (WIRE_NAME, b"token", *facts)
    text = b"".join(len(item).to_bytes(4, "big") + item for item in items)
    return hmac.new(key, text, hashlib.sha256).digest()
