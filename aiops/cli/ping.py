"""``aiops ping``: check that a server answers."""

from __future__ import annotations

from aiops.cli.flags import Timeout, Token, Url
from aiops.common import formatting


def ping(url: Url, token: Token = None, timeout: Timeout = 3.0) -> None:
    """Check that a server is alive, and print one line about it; the exit status is then 0."""
    from aiops.client.sync.client import Client

    with Client(url, token=token, timeout=timeout) as client:
        took, report = client.ping(), client.stats()
    present = sum(row["role"] == "worker" and row["present"] for row in report["workers"])
    print(
        f"{client.url} is alive: {client.policy}, version {report['version']:,},"
        f" {present} worker{'' if present == 1 else 's'}, answered in {formatting.seconds(took)}"
    )
