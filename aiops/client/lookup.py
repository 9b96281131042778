"""A host's address, looked up without holding up the end of the program."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading

from aiops.errors import UsageError


async def looked_up(host: str, patience: float) -> str:
    """Return the IP address of a host; a thread of no pool looks it up, so none is waited for.

    Raises
    ------
    UsageError
        When there is none, or no answer in ``patience`` seconds.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str | OSError] = loop.create_future()

    def settle(answer: str | OSError) -> None:
        if not found.done():
            found.set_result(answer)

    def look_up() -> None:
        answer: str | OSError
        try:
            answer = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            answer = error if isinstance(error, OSError) else OSError(str(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=look_up, name="aiops-lookup", daemon=True).start()
    try:
        async with asyncio.timeout(patience):
            answer = await found
    except TimeoutError:
        answer = OSError(f"no answer in {patience:g} s")
    if isinstance(answer, OSError):
        why = answer.strerror or answer
        raise UsageError(f"host={host!r} cannot be looked up ({why}): pass an IP address")
    return answer
