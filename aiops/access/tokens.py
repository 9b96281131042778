"""The tokens of a server, as a file lists them: names, roles, expiry and quotas.

The file is TOML, with a table for each token::

    [alice]
    role = "train"
    id = "0f1e2d3c4b5a6978"
    stored = "…64 hexadecimal digits…"
    server = "…64 hexadecimal digits…"
    expires = 2026-12-31T00:00:00Z
    connections = 4
    bytes_per_second = 2000000
    requests_per_second = 50

``id``, ``stored`` and ``server`` are `aiops.wire.token_keys.TokenKeys`: the token itself is not in
it, and cannot be found from them. ``aiops token`` writes such files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from aiops.errors import UsageError, nearest
from aiops.wire.token_keys import KEY_ID, TokenKeys, keys_of

MOST_TOKENS = 10_000
"""Tokens that one file may list."""

OWN = "--token"
"""The name of the token that a server was started with; no token of a file can have it."""

_NAME = re.compile(r"[\w.@+-]{1,64}")
_KEY = 32  # bytes

QUOTAS = ("connections", "bytes_per_second", "requests_per_second")
"""The quotas of a token, as the file and `AccessToken` name them."""

_MOST = 1 << 50  # of each


class TokenRole(IntEnum):
    """The rights of a token; each role has all those of the roles before it."""

    OBSERVE = 1
    TRAIN = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """The role as flags and files write it."""
        return self.name.lower()


ROLE_WORDS = tuple(role.word for role in TokenRole)


@dataclass(frozen=True, slots=True)
class AccessToken:
    """One token: who has it, what for, and until when.

    Attributes
    ----------
    name
        The holder's: it stands in the log and in statistics.
    role
        What it may do.
    keys
        How it is proved.
    expires
        Seconds since 1970; None: never.
    connections
        The most that its holders may have at a time; None: no bound of their own.
    bytes_per_second, requests_per_second
        What they may use, all connections together; None: as much as there is. Bytes are counted
        both ways.
    untrusted
        Whether the gradients of its holders may be hostile: then a server filters them (``--filter
        auto``).
    """

    name: str
    role: TokenRole
    keys: TokenKeys
    expires: float | None = None
    connections: int | None = None
    bytes_per_second: int | None = None
    requests_per_second: int | None = None
    untrusted: bool = False

    def expired(self, now: float) -> bool:
        """Return whether its time is over, at ``now`` in seconds since 1970."""
        return self.expires is not None and now >= self.expires


class TokenTable:
    """All tokens that a server takes.

    Parameters
    ----------
    tokens
        The tokens, with names and ids that differ.

    Raises
    ------
    UsageError
        When two have the same name, or are the same token; when there are too many.
    """

    def __init__(self, tokens: Iterable[AccessToken] = ()) -> None:
        self._by_name: dict[str, AccessToken] = {}
        self._by_id: dict[bytes, AccessToken] = {}
        for token in tokens:
            self._add(token)

    def _add(self, token: AccessToken) -> None:
        same = self._by_id.get(token.keys.id)
        if token.name in self._by_name or same is not None:
            other = "there is one already" if same is None else f"it is that of {same.name!r}"
            raise UsageError(f"token {token.name!r}: {other}; give each its own name and token")
        if len(self._by_name) == MOST_TOKENS:
            raise UsageError(f"more than {MOST_TOKENS:,} tokens: revoke those that are not used")
        self._by_name[token.name] = self._by_id[token.keys.id] = token

    def __iter__(self) -> Iterator[AccessToken]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def with_token(self, token: AccessToken) -> Self:
        """Return these tokens and another."""
        return type(self)([*self, token])

    def with_own(self, token: str | None) -> Self:
        """Return these tokens and the server's own (``--token``), whose holders may do all."""
        if token is None:
            return self
        return self.with_token(AccessToken(OWN, TokenRole.ADMIN, keys_of(token)))

    def without(self, name: str) -> Self:
        """Return these tokens but for one.

        Raises
        ------
        UsageError
            When there is none of that name.
        """
        if name not in self._by_name:
            known = nearest(name, self._by_name) if self._by_name else "there are none"
            raise UsageError(f"no token {name!r}; {known}")
        return type(self)(token for token in self if token.name != name)

    def named(self, name: str) -> AccessToken | None:
        """Return the token of a name, or None."""
        return self._by_name.get(name)

    def of_id(self, id: bytes) -> AccessToken | None:
        """Return the token of an id, or None."""
        return self._by_id.get(id)

    @classmethod
    def parse(cls, text: str, file: str) -> Self:
        """Return the tokens that a file lists.

        Parameters
        ----------
        text
            The file's text.
        file
            Its name, for errors.

        Raises
        ------
        UsageError
            Naming the token and the key that is wrong.
        """
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{file}: not TOML: {error}") from None
        try:
            return cls(_read(name, row) for name, row in content.items())
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from None

    def format(self, date: Callable[[float], str]) -> str:
        """Return the text of a file that lists them, for `parse`.

        Parameters
        ----------
        date
            Writes seconds since 1970 as a date of TOML.
        """
        return _HEAD + "".join(f"\n{_written(token, date)}" for token in self)


_HEAD = """\
# The tokens that a server takes, as `aiops token` writes them. The tokens themselves are not here,
# and cannot be found from this. A server reads the file again when it changes.
"""


def check_name(name: str) -> None:
    """Refuse a name that a token cannot have.

    Raises
    ------
    UsageError
        When it has other characters than letters, digits and ``_.@+-``, or more than 64.
    """
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise UsageError(
            f"token {name!r}: a name has 1 to 64 letters, digits or _.@+-, and no - in front"
        )


def _read(name: str, row: Any) -> AccessToken:
    check_name(name)
    if not isinstance(row, dict):
        raise UsageError(f"token {name!r}: a table was expected, [{name}]")
    for key in row:
        if key not in _FIELDS:
            raise UsageError(f"token {name!r}: no key {key!r}; {nearest(key, _FIELDS)}")
    keys = TokenKeys(*(_hex(name, row, key, size) for key, size in _SIZES.items()))
    role = read_role(row.get("role", ""), f"token {name!r}")
    return AccessToken(name, role, keys, *_limits(name, role, row))


def _limits(name: str, role: TokenRole, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the date at which a token expires, its quotas, and whether it is untrusted."""
    expires = row.get("expires")
    if expires is not None:
        if getattr(expires, "tzinfo", None) is None:
            raise UsageError(
                f"token {name!r}: expires must be a date with a time and an offset, such as"
                f" 2026-12-31T00:00:00Z, not {expires}"
            )
        expires = float(expires.timestamp())
    quotas = [row.get(key) for key in QUOTAS]
    for key, most in zip(QUOTAS, quotas, strict=True):
        if most is not None and (type(most) is not int or not 1 <= most <= _MOST):
            raise UsageError(f"token {name!r}: {key} must be a number from 1, not {most!r}")
    untrusted = row.get("untrusted", False)
    if type(untrusted) is not bool or (untrusted and role >= TokenRole.ADMIN):
        raise UsageError(
            f"token {name!r}: untrusted must be true or false, and is not for the role 'admin'"
        )
    return expires, *quotas, untrusted


def read_role(word: object, what: str) -> TokenRole:
    """Return the role of a word.

    Raises
    ------
    UsageError
        When there is no such role; ``what`` is what it is said of.
    """
    if not isinstance(word, str) or word not in ROLE_WORDS:
        raise UsageError(f"{what}: the role is one of {', '.join(ROLE_WORDS)}, not {word!r}")
    return TokenRole[word.upper()]


def _hex(name: str, row: Mapping[str, Any], key: str, size: int) -> bytes:
    text = row.get(key)
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", text):
        raise UsageError(
            f"token {name!r}: {key} must be {2 * size} hexadecimal digits, as `aiops token new`"
            " writes them"
        )
    return bytes.fromhex(text)


def _written(token: AccessToken, date: Callable[[float], str]) -> str:
    lines = [
        f'["{token.name}"]',
        f'role = "{token.role.word}"',
        *(f'{key} = "{value.hex()}"' for key, value in zip(_SIZES, token.keys, strict=True)),
    ]
    if token.untrusted:
        lines.append("untrusted = true")
    if token.expires is not None:
        lines.append(f"expires = {date(token.expires)}")
    quotas = ((key, getattr(token, key)) for key in QUOTAS)
    lines += [f"{key} = {most}" for key, most in quotas if most is not None]
    return "\n".join(lines) + "\n"


_SIZES = {"id": KEY_ID, "stored": _KEY, "server": _KEY}
_FIELDS = ("role", *_SIZES, "untrusted", "expires", *QUOTAS)
