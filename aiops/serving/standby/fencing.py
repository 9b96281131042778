"""A promoted server's word to those that had its run before: they are superseded, and end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from aiops.common import urls
from aiops.errors import AiopsError, ConnectionLost
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.serving.standby.link import ask
from aiops.wire.messages import Message
from aiops.wire.standby_messages import Fence

_log = logging.getLogger("aiops.server")

_AGAIN = 30.0
"""Seconds after which an old primary that has answered is told again."""

_FENCE = 5.0
"""Seconds between attempts to tell the old primary, and that each may take."""

_ANY = ("0.0.0.0", "::")
"""Hosts of a listener on all addresses."""


async def fence(
    env: Environment,
    token: str | None,
    predecessors: Sequence[str],
    url: str,
    run: str,
    generation: int,
    proof: bytes,
    tls: Callable[[str], TlsTarget] | None,
) -> None:
    """Tell old primaries that they are superseded, again and again: they may be started again.

    Parameters
    ----------
    env
        Connects.
    token
        That of all these servers.
    predecessors
        The URLs of the old primaries.
    url, run, generation, proof
        The server that serves now, and the generation of the run that it has begun.
    tls
        Returns how to connect to a host by TLS, if these servers speak it.
    """
    host, port = urls.parse(url)

    def made(local: str) -> Message:
        own = urls.write(local if host in _ANY else host, port, tls=urls.is_tls(url))
        return Fence(1, run, generation, own, proof)

    said = dict[str, str]()
    while True:
        answered = True
        for predecessor in predecessors:
            try:
                await ask(env, predecessor, token, made, _FENCE, tls)
            except (ConnectionLost, OSError):
                answered = False
            except AiopsError as error:
                if said.get(predecessor) != str(error):
                    said[predecessor] = str(error)
                    _log.info("%s: %s", predecessor, error)
        await asyncio.sleep(_AGAIN if answered else _FENCE)
