"""``aiops token``: make, list and revoke the tokens of a server's ``--tokens`` file."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from aiops.access.tokens import (
    QUOTAS,
    ROLE_WORDS,
    AccessToken,
    TokenRole,
    TokenTable,
    check_name,
    read_role,
)
from aiops.bandwidth.units import parse_rate
from aiops.cli.flags import Json
from aiops.cli.tables import console, table
from aiops.errors import UsageError
from aiops.serving.token_file import read_tokens
from aiops.wire.token_keys import keys_of

app = typer.Typer(help="Make, list and revoke the tokens of a server.", no_args_is_help=True)

TokensFile = Annotated[
    Path, typer.Option("--file", envvar="AIOPS_TOKENS", help="The server's --tokens file.")
]
Named = Annotated[
    str, typer.Option("--name", help="The holder's name, for the log and statistics.")
]
Role = Annotated[str, typer.Option("--role", help=f"One of {', '.join(ROLE_WORDS)}.")]
Expires = Annotated[
    str | None, typer.Option("--expires", help="Its time: 12h, 7d, 4w; without it, it is endless.")
]
Most = Annotated[
    int | None, typer.Option("--connections", help="The most that it may have at a time.")
]

Rate = Annotated[
    str | None, typer.Option("--bytes-per-second", help="What it may move, both ways: 2MB/s.")
]
Requests = Annotated[
    int | None, typer.Option("--requests-per-second", help="The most that it may make.")
]

Untrusted = Annotated[
    bool,
    typer.Option("--untrusted", help="Its workers may be hostile: the server filters gradients."),
]

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command()
def new(
    file: TokensFile,
    name: Named,
    role: Role = "train",
    expires: Expires = None,
    connections: Most = None,
    bytes_per_second: Rate = None,
    requests_per_second: Requests = None,
    untrusted: Untrusted = False,
) -> None:
    """Print a new token, which is nowhere else, and note in the file what a server needs of it."""
    check_name(name)
    found = read_tokens(file) if file.exists() else TokenTable()
    secret = f"aiops_{secrets.token_urlsafe(32)}"
    until = None if expires is None else time.time() + seconds_of(expires)
    for flag, most in ("connections", connections), ("requests-per-second", requests_per_second):
        if most is not None and most < 1:
            raise UsageError(f"--{flag} must be 1 or more, not {most}")
    given = bytes_per_second
    rate = None if given is None else parse_rate("--bytes-per-second", given)
    quotas = connections, rate, requests_per_second
    rights = read_role(role, "--role")
    if untrusted and rights >= TokenRole.ADMIN:
        raise UsageError(
            "--untrusted: an admin is trusted with all of the server; give --role train"
        )
    token = AccessToken(name, rights, keys_of(secret), until, *quotas, untrusted)
    _write(file, found.with_token(token))
    print(secret)


@app.command()
def ls(file: TokensFile, as_json: Json = False) -> None:
    """List the tokens of the file: names, roles, expiry and quotas."""
    now, found = time.time(), read_tokens(file)
    rows = [
        {
            "name": each.name,
            "role": each.role.word,
            "expires": None if each.expires is None else date_of(each.expires),
            "expired": each.expired(now),
            "untrusted": each.untrusted,
            **{key: getattr(each, key) for key in QUOTAS},
        }
        for each in found
    ]
    if as_json:
        print(json.dumps(rows))
        return
    shown = table("token", "role", "expires", "connections", "bytes/s", "requests/s")
    for row in rows:
        until = row["expires"] or "never"
        shown.add_row(
            *(str(row["name"]), f"{row['role']}{', untrusted' * bool(row['untrusted'])}"),
            f"{until} (over)" if row["expired"] else str(until),
            *(f"{row[key]:,}" if row[key] else "any" for key in QUOTAS),
        )
    console().print(shown)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The name of the token.")], file: TokensFile
) -> None:
    """Remove a token: a running server ends its connections within a second."""
    _write(file, read_tokens(file).without(name))
    print(f"{name!r} is revoked")


def seconds_of(text: str) -> float:
    """Return a time such as ``7d`` in seconds.

    Raises
    ------
    UsageError
        When it is not written so.
    """
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None or not int(match[1]):
        raise UsageError(f"--expires {text!r}: write a number with m, h, d or w, such as 7d")
    return float(int(match[1]) * _UNITS[match[2]])


def date_of(when: float) -> str:
    """Return seconds since 1970 as a date of TOML, in UTC."""
    return datetime.fromtimestamp(int(when), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write(file: Path, tokens: TokenTable) -> None:
    """Replace the file: at any moment it is the old one or the new one, and this user's alone."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(tokens.format(date_of))
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError as error:
        raise UsageError(f"--file {file}: {error.strerror}") from None
