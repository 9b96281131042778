"""``aiops relay``: pass bytes between workers that average and cannot reach each other."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Annotated

import typer

from aiops.common import urls
from aiops.errors import UsageError
from aiops.net.signals import handled
from aiops.serving.relay import Relay, RelaySettings

_log = logging.getLogger("aiops.relay")


def relay(
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = urls.RELAY_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="AIOPS_RELAY_TOKEN", help="What servers share with it; better given there."
        ),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(help="Connections beyond this are refused; a ring of n needs up to 2n.")
    ] = 1024,
    hello_deadline: Annotated[
        float, typer.Option(help="Seconds a new connection has to prove its ring's token.")
    ] = 10.0,
    meeting_deadline: Annotated[
        float, typer.Option(help="Seconds that it then waits for the other end.")
    ] = 30.0,
    idle_deadline: Annotated[
        float, typer.Option(help="Seconds without a byte after which two ends are dropped.")
    ] = 60.0,
) -> None:
    """Let workers of a ring meet here that cannot reach each other: behind NAT, say.

    The first line on stdout is the address, for the server's --relay; logs go to stderr. SIGTERM
    and Ctrl-C end it, with exit status 0.
    """
    settings = RelaySettings(
        token=token,
        most=max_connections,
        hello_deadline=hello_deadline,
        meeting_deadline=meeting_deadline,
        idle_deadline=idle_deadline,
    )
    settings.check_host(host)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("aiops")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    asyncio.run(_relay(_listener(host, port), settings))


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot listen on {host}, port {port}: {why}") from None


async def _relay(listener: socket.socket, settings: RelaySettings) -> None:
    host, port = listener.getsockname()[:2]
    running = Relay(listener, settings)
    task = asyncio.create_task(running.run())

    def end(_number: int) -> None:
        task.cancel()

    with handled(end):
        print(urls.address(host, port), flush=True)
        _log.info("relaying at port %d", port)
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    _log.info("stopped: %d pairs, %d bytes passed on", running.pairs, running.passed_on)
