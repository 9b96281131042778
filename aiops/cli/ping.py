"""``aiops ping``: is it alive?"""

from __future__ import annotations

from aiops.cli.flags import Timeout, Token, Url
from aiops.common import formatting


def ping(url: Url, token: Token = None, timeout: Timeout = 3.0) -> None:
    """Say in one line whether a server is alive; the exit status is 0 if it is."""
    from aiops.client.sync.client import Client

    with Client(url, token=token, timeout=timeout) as client:
        took, report = client.ping(), client.stats()
    present = sum(row["role"] == "worker" and row["present"] for row in report["workers"])
    print(
        f"{client.url} is alive: {client.policy}, version {report['version']:,},"
        f" {present} worker{'' if present == 1 else 's'}, answered in {formatting.seconds(took)}"
    )
