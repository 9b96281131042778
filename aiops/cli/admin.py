"""``aiops kick, pause, resume, snapshot, rollback, drain``: direct a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from aiops.cli.asking import asked
from aiops.cli.flags import Timeout, Token, Url
from aiops.client.sync.client import Client
from aiops.common.generations import generation_text
from aiops.wire.admin_messages import Done, Drain, Kick, Pause, Resume, RollbackTo, TakeSnapshot

Why = Annotated[str, typer.Option("--why", help="The reason; those that it concerns are told.")]
ClientName = Annotated[
    str, typer.Argument(help="Its name in `aiops stats`, or its number there, as in #7.")
]
Version = Annotated[int, typer.Argument(min=0, help="That of a snapshot that --state keeps.")]


def kick(
    url: Url, client: ClientName, why: Why = "", token: Token = None, timeout: Timeout = 30.0
) -> None:
    """End the connections of a client, which does not connect again by itself."""
    count = asked(url, Kick(1, client, why), Done, token, timeout).count
    print(f"{client} was sent away: {count} {'connection' if count == 1 else 'connections'} ended")


def pause(url: Url, why: Why = "", token: Token = None, timeout: Timeout = 30.0) -> None:
    """Have the server take no pushes until `aiops resume`; fetches and statistics go on."""
    version = asked(url, Pause(1, why), Done, token, timeout).version
    print(f"{url} takes no pushes from version {version:,} on, until `aiops resume {url}`")


def resume(url: Url, token: Token = None, timeout: Timeout = 30.0) -> None:
    """Have the server take pushes again."""
    version = asked(url, Resume(1), Done, token, timeout).version
    print(f"{url} takes pushes, at version {version:,}")


def snapshot(url: Url, token: Token = None, timeout: Timeout = 300.0) -> None:
    """Have a snapshot be taken now, and print its version once it is on the disk.

    Standard output has the version alone, as `aiops rollback` takes it.
    """
    version = asked(url, TakeSnapshot(1), Done, token, timeout).version
    typer.echo(f"{url} has a snapshot of version", err=True)
    print(version)


def rollback(url: Url, version: Version, token: Token = None, timeout: Timeout = 300.0) -> None:
    """Have the server go back to a snapshot that its --state keeps; what followed is lost."""
    found = asked(url, RollbackTo(1, version), Done, token, timeout).version
    print(f"{url} goes back to version {found:,}", flush=True)
    with Client(url, token=token, timeout=timeout) as client:  # which waits until it is back
        report = client.stats()
    generation = generation_text((report["state"] or {}).get("generation", 0))
    print(f"{url} is back: generation {generation}, version {report['version']:,}")


def drain(url: Url, token: Token = None, timeout: Timeout = 30.0) -> None:
    """Have the server end as SIGTERM does: it takes no more pushes, answers, saves and stops."""
    version = asked(url, Drain(1), Done, token, timeout).version
    print(f"{url} ends, at version {version:,}")
