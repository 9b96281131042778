"""The proofs of averaging: each is right for one round, rank, side, ring or chunk."""

from __future__ import annotations

import pytest

from aiops.errors import RemoteProtocolError
from aiops.model.parts import Part
from aiops.wire.messages import PROTOCOL
from aiops.wire.ring_messages import RelayHello
from aiops.wire.ring_proofs import (
    ChunkSeal,
    proof,
    proves,
    relay_proof,
    relay_proves,
    ring_name,
    ring_token,
)
from tests.rows import each_row

SECRET, OTHER = b"s" * 32, b"t" * 32


def test_only_the_same_round_rank_side_and_secret_prove() -> None:
    good = proof(SECRET, "client", 7, 1)
    assert proves(good, SECRET, "client", 7, 1)
    assert not proves(good, OTHER, "client", 7, 1)
    assert not proves(good, SECRET, "server", 7, 1)
    assert not proves(good, SECRET, "client", 8, 1)
    assert not proves(good, SECRET, "client", 7, 2)
    assert not proves(b"", SECRET, "client", 7, 1)


def hello(**changes: object) -> RelayHello:
    fields = {"ring": ring_name(SECRET, 7), "sender": 1, "sends": True, "nonce": b"n" * 16}
    return RelayHello(0, PROTOCOL, **(fields | changes))  # type: ignore[arg-type]


@each_row(
    "change",
    [{"ring": b"r" * 32}, {"sender": 2}, {"sends": False}, {"nonce": b"m" * 16}],
)
def test_a_relay_admits_one_end_of_one_connection_of_one_ring(change: dict[str, object]) -> None:
    token = ring_token("shared", hello().ring)
    good = relay_proof(token, "client", hello(), b"x" * 16)
    assert relay_proves(good, token, "client", hello(), b"x" * 16)
    assert not relay_proves(good, token, "client", hello(**change), b"x" * 16)


def test_a_ring_s_token_is_of_no_use_to_another_ring_side_challenge_or_relay() -> None:
    ring = hello().ring
    token = ring_token("shared", ring)
    good = relay_proof(token, "client", hello(), b"x" * 16)
    assert not relay_proves(good, token, "server", hello(), b"x" * 16)
    assert not relay_proves(good, token, "client", hello(), b"y" * 16)
    for wrong in (ring_token("shared", ring_name(SECRET, 8)), ring_token("another", ring)):
        assert not relay_proves(good, wrong, "client", hello(), b"x" * 16)
    assert len({ring_name(SECRET, 7), ring_name(SECRET, 8), ring_name(OTHER, 7), SECRET}) == 4


def test_a_seal_is_of_one_chunk_on_one_connection() -> None:
    part, data = Part(0, 4, "raw", 4, 7), memoryview(b"1234")
    seal = ChunkSeal(SECRET, 7, 1)
    good = seal.of(part, 2, data)
    ChunkSeal(SECRET, 7, 1).check(good, part, 2, data)
    wrong = [
        (seal, part, 2, memoryview(b"1235")),
        (seal, part, 3, data),
        (seal, part._replace(start=4, stop=8), 2, data),
        (seal, part._replace(codec="fp16"), 2, data),
        (ChunkSeal(SECRET, 8, 1), part, 2, data),
        (ChunkSeal(SECRET, 7, 2), part, 2, data),
        (ChunkSeal(OTHER, 7, 1), part, 2, data),
    ]
    for checker, *chunk in wrong:
        with pytest.raises(RemoteProtocolError, match="changed on their way"):
            checker.check(good, *chunk)
    with pytest.raises(RemoteProtocolError, match="changed on their way"):
        seal.check(b"", part, 2, data)
