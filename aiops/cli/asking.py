"""Send a server one request, as commands do that direct it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiops.client.variables import tls_files
from aiops.common import urls
from aiops.errors import RemoteProtocolError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsClient
from aiops.serving.standby.link import ask
from aiops.wire.messages import Message

Answer = TypeVar("Answer", bound=Message)


def asked(
    url: str, request: Message, answer: type[Answer], token: str | None, timeout: float
) -> Answer:
    """Send a server a request, and return its answer.

    Parameters
    ----------
    url, token
        The server, and the token for it.
    request, answer
        What is sent, and the kind of message that is expected.
    timeout
        Seconds that this may take.

    Raises
    ------
    AiopsError
        When there is no answer in time, it is a refusal, or of another kind.
    """
    env = CURRENT_ENVIRONMENT.get()
    tls = TlsClient(tls_files(None)).target if urls.is_tls(url) else None
    found = asyncio.run(ask(env, url, token, lambda local: request, timeout, tls))
    if not isinstance(found, answer):
        raise RemoteProtocolError(f"{url}: {found.kind!r} is no answer to {request.kind!r}")
    return found
