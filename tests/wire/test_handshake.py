"""The handshake, on both sides."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import RemoteProtocolError, Unauthorised
from aiops.wire import handshake
from aiops.wire.handshake import Admitted, ServerHandshake, answer, check_welcome, proof
from aiops.wire.messages import PROTOCOL, Challenge, Error, Hello, Prove, Welcome
from aiops.wire.token_keys import keys_of, only, proves_token, token_id
from tests.rows import each_row
from tests.strategies import DETERMINISTIC

CLIENT_NONCE, SERVER_NONCE = b"c" * 16, b"s" * 16
TOKEN = "s3cret"
URL = "aiops://host:7171"


def hello(role: str = "worker", protocol: int = PROTOCOL, client: str = "me") -> Hello:
    return Hello(3, protocol, client, 1, "w0", role, False, CLIENT_NONCE, "test")


def welcome(proof: bytes = b"", protocol: int = PROTOCOL) -> Welcome:
    return Welcome(3, protocol, "", proof, "asgd", {}, {}, 0, (), 0)


def meet(client_token: str | None, server_token: str | None) -> tuple[ServerHandshake, Welcome]:
    """Go through a greeting, up to the welcome that the server would give."""
    server, said = ServerHandshake(server_token and only(server_token), SERVER_NONCE), hello()
    reply = server.receive(said)
    challenge = reply if isinstance(reply, Challenge) else None
    if challenge is not None:
        reply = server.receive(answer(challenge, said, client_token, URL))
    if isinstance(reply, Error):
        raise Unauthorised(reply.text)
    assert isinstance(reply, Admitted)
    assert server.admitted is reply
    given_welcome = welcome(reply.proof)
    check_welcome(given_welcome, said, challenge, client_token, URL)
    return server, given_welcome


class TestTogether:
    def test_no_token(self) -> None:
        server, said = meet(None, None)
        assert server.hello == hello()
        assert said.proof == b""

    def test_the_same_token(self) -> None:
        _server, said = meet(TOKEN, TOKEN)
        assert said.proof == proof(TOKEN, "server", CLIENT_NONCE, SERVER_NONCE, "me")

    @pytest.mark.parametrize("token", [None, ""])
    def test_a_client_without_the_token_is_told_how_to_give_it(self, token: str | None) -> None:
        """A variable that a script meant to set is empty."""
        with pytest.raises(
            Unauthorised, match=r"aiops://host:7171 asks for a token: .*AIOPS_TOKEN"
        ):
            meet(token, TOKEN)

    def test_a_server_without_the_token_is_told_nothing(self) -> None:
        with pytest.raises(Unauthorised, match=r"asked for no token although this client has one"):
            meet(TOKEN, None)

    @DETERMINISTIC
    @given(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8))
    def test_only_the_same_token_meets(self, theirs: str, ours: str) -> None:
        if theirs == ours:
            meet(theirs, ours)
        else:
            with pytest.raises(Unauthorised, match="the token is wrong"):
                meet(theirs, ours)


class TestServer:
    def test_a_challenge_answers_the_hello(self) -> None:
        server = ServerHandshake(only(TOKEN), SERVER_NONCE)
        assert server.receive(hello()) == Challenge(3, SERVER_NONCE)
        assert not server.admitted

    @each_row(
        "given_proof",
        [
            b"",
            b"x" * 32,
            proof(TOKEN, "server", CLIENT_NONCE, SERVER_NONCE, "me"),
            proof(TOKEN, "client", SERVER_NONCE, CLIENT_NONCE, "me"),
            proof(TOKEN, "client", CLIENT_NONCE, b"t" * 16, "me"),
            proof(TOKEN, "client", b"d" * 16, SERVER_NONCE, "me"),
            proof(TOKEN, "client", CLIENT_NONCE, SERVER_NONCE, "you"),
            proof(TOKEN, "client", CLIENT_NONCE, SERVER_NONCE, "me")[:-1],
            proof(TOKEN, "client", CLIENT_NONCE, SERVER_NONCE, "me") + b"\0",
            proof("other", "client", CLIENT_NONCE, SERVER_NONCE, "me"),
        ],
        ids=[
            "none",
            "guess",
            "reflected",
            "swapped",
            "replayed",
            "nonce",
            "client",
            "-1",
            "+1",
            "tok",
        ],
    )
    def test_no_other_proof_is_taken(self, given_proof: bytes) -> None:
        server = ServerHandshake(only(TOKEN), SERVER_NONCE)
        server.receive(hello())
        reply = server.receive(Prove(4, given_proof, token_id(TOKEN)))
        assert isinstance(reply, Error)
        assert (reply.id, reply.code, reply.fatal) == (4, "unauthorised", True)
        assert server.admitted is None, "the server proves nothing to a stranger"

    def test_another_version_of_the_wire_is_refused(self) -> None:
        server = ServerHandshake(None, SERVER_NONCE)
        reply = server.receive(hello(protocol=PROTOCOL + 1))
        assert isinstance(reply, Error)
        assert (reply.id, reply.code, reply.fatal) == (3, "protocol", True)
        assert f"version {PROTOCOL + 1} of the wire, this server {PROTOCOL}" in reply.text
        assert not server.admitted

    @each_row("token", [None, TOKEN])
    @each_row("role", ["", "Worker", "boss", "x" * 4096])
    def test_another_role_is_refused(self, role: str, token: str | None) -> None:
        server = ServerHandshake(token and only(token), SERVER_NONCE)
        reply = server.receive(hello(role=role))
        assert isinstance(reply, Error)
        assert (reply.code, reply.fatal) == ("protocol", True)
        assert not server.admitted

    @pytest.mark.parametrize("role", handshake.ROLES)
    def test_both_roles_come_in(self, role: str) -> None:
        server = ServerHandshake(None, SERVER_NONCE)
        assert isinstance(server.receive(hello(role=role)), Admitted)
        assert server.admitted


class TestClient:
    CHALLENGE = Challenge(3, SERVER_NONCE)

    def test_the_answer_has_the_challenges_id(self) -> None:
        said = answer(Challenge(9, SERVER_NONCE), hello(), TOKEN, URL)
        given = proof(TOKEN, "client", CLIENT_NONCE, SERVER_NONCE, "me")
        assert said == Prove(9, given, token_id(TOKEN))

    @each_row(
        "given_proof",
        [
            b"",
            proof(TOKEN, "client", CLIENT_NONCE, SERVER_NONCE, "me"),
            proof("other", "server", CLIENT_NONCE, SERVER_NONCE, "me"),
            proof(TOKEN, "server", CLIENT_NONCE, b"t" * 16, "me"),
        ],
        ids=["none", "reflected", "another token", "replayed"],
    )
    def test_a_welcome_without_the_servers_proof_is_refused(self, given_proof: bytes) -> None:
        with pytest.raises(Unauthorised, match="does not know the token"):
            check_welcome(welcome(given_proof), hello(), self.CHALLENGE, TOKEN, URL)

    def test_a_proof_does_not_help_a_server_that_did_not_ask(self) -> None:
        good = proof(TOKEN, "server", CLIENT_NONCE, SERVER_NONCE, "me")
        with pytest.raises(Unauthorised, match="asked for no token"):
            check_welcome(welcome(good), hello(), None, TOKEN, URL)

    @pytest.mark.parametrize("token", [None, TOKEN])
    def test_another_version_of_the_wire_is_refused(self, token: str | None) -> None:
        with pytest.raises(
            RemoteProtocolError, match=f"speaks version 7 of the wire, this client {PROTOCOL}"
        ):
            check_welcome(welcome(protocol=7), hello(), None, token, URL)


def mac(key: bytes, *items: bytes) -> bytes:
    """The HMAC of the page."""
    facts = b"aiops/4", b"token", *items
    said = b"".join(len(item).to_bytes(4, "big") + item for item in facts)
    return hmac.new(key, said, hashlib.sha256).digest()


class TestProof:
    def test_it_is_what_the_page_says(self) -> None:
        token, facts = "schlüssel".encode(), (b"12345678901234567", b"s" * 64, "кот".encode())
        key = mac(token, b"client key")
        signature = mac(hashlib.sha256(key).digest(), *facts)
        wanted = bytes(a ^ b for a, b in zip(key, signature, strict=True))
        assert proof("schlüssel", "client", *facts[:2], "кот") == wanted
        wanted = mac(mac(token, b"server key"), *facts)
        assert proof("schlüssel", "server", *facts[:2], "кот") == wanted
        assert token_id("schlüssel") == mac(token, b"id")[:8]

    @DETERMINISTIC
    @given(st.binary(max_size=5), st.binary(max_size=5), st.text(max_size=3), st.integers(0, 5))
    def test_where_one_item_ends_matters(
        self, theirs: bytes, ours: bytes, client: str, cut: int
    ) -> None:
        """Moving a byte from one item to its neighbour makes another proof."""
        joined = theirs + ours
        moved = joined[:cut], joined[cut:]
        first = proof(TOKEN, "client", theirs, ours, client)
        assert (proof(TOKEN, "client", *moved, client) == first) == (moved == (theirs, ours))

    def test_a_server_checks_it_with_the_keys_alone(self) -> None:
        said = (CLIENT_NONCE, SERVER_NONCE, "me")
        given_proof = proof(TOKEN, "client", *said)
        assert proves_token(given_proof, keys_of(TOKEN), *said)
        assert not proves_token(proof(TOKEN, "server", *said), keys_of(TOKEN), *said)
        assert not proves_token(given_proof, keys_of("other"), *said)

    def test_what_a_server_keeps_makes_no_proof_of_a_client(self) -> None:
        """A thief of the token file has all that a server knows, and is refused."""
        said = (CLIENT_NONCE, SERVER_NONCE, "me")
        keys = keys_of(TOKEN)
        for key in keys:
            signature = mac(keys.stored, *said[:2], b"me")
            padded = key.ljust(32, b"\0")
            forged = bytes(a ^ b for a, b in zip(padded, signature, strict=True))
            assert not proves_token(forged, keys, *said)
            assert not proves_token(mac(key, *said[:2], b"me"), keys, *said)
