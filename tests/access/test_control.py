"""What the holder of a token may do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiops.access.control import AccessControl
from aiops.access.tokens import AccessToken, TokenRole, TokenTable
from aiops.errors import Unauthorised, Unavailable
from aiops.wire.messages import PROTOCOL, Hello
from aiops.wire.server_messages import Greeting, LeadHello, ShardHello
from aiops.wire.standby_messages import StandbyHello
from aiops.wire.token_keys import keys_of

TOKENS = {role: AccessToken(role.word, role, keys_of(role.word), 100.0, 2) for role in TokenRole}
_FACTS = (0, PROTOCOL, "c", 1, "n")


def hello(role: str) -> Hello:
    return Hello(*_FACTS, role, True, bytes(16), "test")


HELLOS: dict[TokenRole, list[Greeting]] = {
    TokenRole.OBSERVE: [
        hello("observer"),
        ShardHello(*_FACTS, "run", True, bytes(16), "test"),
    ],
    TokenRole.TRAIN: [hello("worker")],
    TokenRole.ADMIN: [
        LeadHello(*_FACTS, "run", True, bytes(16), "test", "asgd", {}),
        StandbyHello(*_FACTS, True, bytes(16), "test", "run", 1, 1),
    ],
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def control(*tokens: AccessToken) -> tuple[AccessControl, Clock]:
    clock = Clock()
    return AccessControl(TokenTable(tokens or TOKENS.values()), clock), clock


@pytest.mark.parametrize("needed", TokenRole)
@pytest.mark.parametrize("role", TokenRole)
def test_a_role_may_connect_as_those_below_it(role: TokenRole, needed: TokenRole) -> None:
    access, _clock = control()
    for greeting in HELLOS[needed]:
        fault = access.forbids(greeting, TOKENS[role].keys.id)
        assert (fault is None) is (role >= needed)
        if fault is not None:
            assert isinstance(fault, Unauthorised)
            assert f"the token {role.word!r} has the role {role.word!r}" in str(fault)


@pytest.mark.parametrize("role", TokenRole)
def test_an_administrator_alone_directs_the_server(role: TokenRole) -> None:
    access, _clock = control()
    assert isinstance(access.forbids_request(1), Unauthorised)
    assert access.admit(1, hello("observer"), TOKENS[role].keys.id) == role.word
    assert (access.forbids_request(1) is None) is (role is TokenRole.ADMIN)
    access.left(1)
    assert isinstance(access.forbids_request(1), Unauthorised)


@pytest.mark.parametrize("role", TokenRole)
def test_an_administrator_is_known_by_the_token_itself(role: TokenRole) -> None:
    now = 0.0
    access = AccessControl(TokenTable(TOKENS.values()), lambda: now)
    if role is TokenRole.ADMIN:
        assert access.administrator(role.word) == role.word
        now = 1000.0
    with pytest.raises(Unauthorised, match="expired" if now else "has the role"):
        access.administrator(role.word)
    with pytest.raises(Unauthorised, match="no such token"):
        access.administrator(role.word + "x")
    with pytest.raises(Unauthorised, match="no such token"):
        AccessControl(None, lambda: now).administrator("")


def test_without_tokens_all_is_allowed() -> None:
    access = AccessControl(None, Clock())
    assert access.find is None
    for greetings in HELLOS.values():
        assert not any(access.forbids(greeting, b"") for greeting in greetings)
    assert access.admit(1, hello("worker"), b"") == ""
    assert access.forbids_request(1) is None
    assert access.report() == access.ended() == []


def test_an_expired_token_ends() -> None:
    access, clock = control()
    key = TOKENS[TokenRole.TRAIN].keys.id
    access.admit(7, hello("worker"), key)
    clock.now = 99.9
    assert access.ended() == []
    clock.now = 100.0
    [(peer, why)] = access.ended()
    assert (peer, why.code) == (7, "unauthorised")
    assert "has expired" in str(access.forbids(hello("worker"), key))


def test_connections_are_bounded() -> None:
    access, _clock = control()
    key = TOKENS[TokenRole.TRAIN].keys.id
    for peer in (1, 2):
        assert access.forbids(hello("worker"), key) is None
        access.admit(peer, hello("worker"), key)
    assert isinstance(access.forbids(hello("worker"), key), Unavailable)
    access.left(1)
    assert access.forbids(hello("worker"), key) is None
    assert access.report()[1] == {
        "name": "train",
        "role": "train",
        "expires": 100.0,
        "expired": False,
        "connections": 1,
        "refused": 1,
        "bytes_per_second": None,
        "requests_per_second": None,
        "waiting": 0,
        "waited": 0.0,
    }


def test_changes_of_the_file() -> None:
    access, _clock = control()
    train, admin = TOKENS[TokenRole.TRAIN], TOKENS[TokenRole.ADMIN]
    access.admit(1, hello("worker"), train.keys.id)
    access.admit(2, hello("observer"), train.keys.id)
    access.admit(3, hello("worker"), admin.keys.id)
    lower = replace(train, role=TokenRole.OBSERVE)
    said = access.change(TokenTable([lower, replace(train, name="eve", keys=keys_of("e"))]))
    assert said == [
        "token 'train' has changed: observe",
        "token 'eve' is new: train",
        "token 'observe' is revoked",
        "token 'admin' is revoked",
    ]
    assert [peer for peer, _why in access.ended()] == [1, 3]
    access.left(1)
    access.left(3)
    assert access.ended() == []
    other = replace(train, keys=keys_of("another"))  # rotated: the old one is of no use
    access.change(TokenTable([other]))
    assert [peer for peer, _why in access.ended()] == [2]
    assert access.forbids(hello("worker"), train.keys.id) is not None
    assert access.forbids(hello("worker"), other.keys.id) is None
    assert [peer for peer, _why in access.ended()] == [2], "that is of the old one still"
