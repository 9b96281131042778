"""``aiops promote``: have a standby take its primary's place."""

from __future__ import annotations

from aiops.cli.asking import asked
from aiops.cli.flags import Timeout, Token, Url
from aiops.common.generations import generation_text
from aiops.wire.standby_messages import Promote, Promoted


def promote(url: Url, token: Token = None, timeout: Timeout = 30.0) -> None:
    """Have the standby at URL take its primary's place, and print the new generation."""
    found = asked(url, Promote(1), Promoted, token, timeout)
    print(
        f"{url} serves: generation {generation_text(found.generation)}, version {found.version:,}"
    )
