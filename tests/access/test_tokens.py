"""Files of tokens."""

from __future__ import annotations

import pytest

from aiops.access.tokens import AccessToken, TokenRole, TokenTable
from aiops.cli.token import date_of, seconds_of
from aiops.errors import UsageError
from aiops.wire.token_keys import keys_of

ALICE = AccessToken("alice", TokenRole.TRAIN, keys_of("a"), 1_800_000_000.0, 4)
BOB = AccessToken("bob@host.example", TokenRole.OBSERVE, keys_of("b"))
TABLE = TokenTable([ALICE, BOB])
TEXT = TABLE.format(date_of)


def test_what_is_written_is_read() -> None:
    assert [*TokenTable.parse(TEXT, "f")] == [ALICE, BOB]
    assert TABLE.of_id(ALICE.keys.id) is ALICE
    assert TABLE.named("bob@host.example") is BOB


def test_the_token_is_not_in_the_file() -> None:
    secret = "aiops_a-long-secret"
    text = TokenTable([AccessToken("a", TokenRole.ADMIN, keys_of(secret))]).format(date_of)
    assert secret not in text
    assert secret.encode().hex() not in text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('role = "train"', 'role = "boss"', "'alice': the role is one of observe, train, admin"),
        ('role = "train"', "", "the role is one of"),
        ("2027-01-15T08:00:00Z", "2027-01-15T08:00:00", "'alice': expires must be a date"),
        ("2027-01-15T08:00:00Z", "7", "expires must be a date"),
        ("connections = 4", "connections = 0", "connections must be a number from 1"),
        ("connections = 4", "connections = true", "connections must be a number from 1"),
        ("connections = 4", "bytes_per_second = 0", "bytes_per_second must be a number from 1"),
        ("connections = 4", "requests_per_second = 0.5", "requests_per_second must be a number"),
        ("connections = 4", "conections = 4", "no key 'conections'; did you mean 'connections'"),
        (ALICE.keys.stored.hex(), "12", "'alice': stored must be 64 hexadecimal digits"),
        (ALICE.keys.id.hex(), BOB.keys.id.hex(), "it is that of 'alice'"),
        ('["alice"]', '["a b"]', "a name has 1 to 64"),
        ('["alice"]', '["--token"]', "a name has 1 to 64"),
        ('["alice"]', "alice = 1", "a table was expected"),
        ('["alice"]', "[[", "not TOML"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, why: str) -> None:
    assert old in TEXT
    with pytest.raises(UsageError, match=r"^tokens\.toml: .*") as found:
        TokenTable.parse(TEXT.replace(old, new, 1), "tokens.toml")
    assert why in str(found.value)


def test_a_name_is_given_once() -> None:
    with pytest.raises(UsageError, match="'alice': there is one already"):
        TABLE.with_token(AccessToken("alice", TokenRole.ADMIN, keys_of("c")))
    assert [token.name for token in TABLE.without("alice")] == ["bob@host.example"]
    with pytest.raises(UsageError, match="no token 'alcie'; did you mean 'alice'"):
        TABLE.without("alcie")


def test_times() -> None:
    assert (seconds_of("7d"), seconds_of("90m")) == (604_800, 5_400)
    for text in ("", "7", "0d", "d", "7y", "-1d"):
        with pytest.raises(UsageError, match="write a number with m, h, d or w"):
            seconds_of(text)
