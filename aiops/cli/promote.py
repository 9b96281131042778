"""``aiops promote``: have a standby take its primary's place."""

from __future__ import annotations

import asyncio

from aiops.cli.flags import Timeout, Token, Url
from aiops.client.variables import tls_files
from aiops.common import urls
from aiops.common.generations import generation_text
from aiops.errors import RemoteProtocolError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsClient
from aiops.serving.standby.link import ask
from aiops.wire.standby_messages import Promote, Promoted


def promote(url: Url, token: Token = None, timeout: Timeout = 30.0) -> None:
    """Have the standby at URL take its primary's place, and print the new generation."""
    env = CURRENT_ENVIRONMENT.get()
    tls = TlsClient(tls_files(None)).target if urls.is_tls(url) else None
    found = asyncio.run(ask(env, url, token, lambda local: Promote(1), timeout, tls))
    if not isinstance(found, Promoted):
        raise RemoteProtocolError(f"{url}: {found.kind!r} is no answer to a promotion")
    print(
        f"{url} serves: generation {generation_text(found.generation)}, version {found.version:,}"
    )
