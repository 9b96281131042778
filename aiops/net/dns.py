"""Look a host's addresses up without delaying the end of the program.

``getaddrinfo`` cannot be interrupted, and may take half a minute where a name server is out of
reach. So a daemon thread calls it, which belongs to no pool and is never joined.

The last answer for each host is kept. It is returned if the name server does not answer now, or
says that it cannot: a name server is often lost with the network, and comes back later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

Addresses: TypeAlias = tuple[str, ...]
"""IP addresses of one host, the preferred one first."""

T = TypeVar("T")

_GLANCE = 0.1  # seconds between two calls of ``check`` during a wait
_AGAIN = 0.25  # seconds to wait for a host whose last addresses are known

_known: dict[str, Addresses] = {}  # the last answers; only those of hosts that are connected to


def literal(host: str) -> Addresses | None:
    """Return the address if the host is one itself; None if it has to be looked up."""
    try:
        return (str(ipaddress.ip_address(host)),)
    except ValueError:
        return None


async def addresses(host: str, patience: float) -> Addresses:
    """Return the addresses of a host.

    Raises
    ------
    OSError
        When there are none, or there is no answer in ``patience`` seconds, and never was.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Addresses | OSError] = loop.create_future()

    def settle(answer: Addresses | OSError) -> None:
        if not found.done():
            found.set_result(answer)

    def report(answer: Addresses | OSError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, answer)

    _begin(host, report)
    try:
        async with asyncio.timeout(_limited(host, patience)):
            answer = await found
    except TimeoutError:
        return _last(host, patience)
    return _checked(host, answer)


async def first_reached(
    hosts: Sequence[str], until: float, reach: Callable[[str], Awaitable[T]]
) -> T:
    """Return the result of ``reach`` for the first of a host's addresses that answers.

    Each address gets an equal share of the time left until ``until``, on the event loop's clock, so
    that a silent one leaves time to the others; only the caller limits the last.

    Raises
    ------
    OSError
        What the last address raised.
    """
    loop = asyncio.get_running_loop()
    for others in range(len(hosts) - 1, 0, -1):
        share = (until - loop.time()) / (1 + others)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(share):
                return await reach(hosts[-1 - others])
    return await reach(hosts[-1])


def addresses_waited_for(host: str, patience: float, check: Callable[[], None]) -> Addresses:
    """Return the addresses of a host, as `addresses` does, without an event loop.

    ``check`` is called now and then; what it raises ends the wait.
    """
    answered, answers = threading.Event(), list[Addresses | OSError]()

    def report(answer: Addresses | OSError) -> None:
        answers.append(answer)
        answered.set()

    _begin(host, report)
    left = _limited(host, patience)
    while not answered.wait(min(left, _GLANCE)):
        check()
        left -= _GLANCE
        if left <= 0:
            return _last(host, patience)
    return _checked(host, answers[0])


def _begin(host: str, report: Callable[[Addresses | OSError], None]) -> None:
    def look_up() -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            report(error)
        except UnicodeError as error:  # what cannot be a host's name
            report(OSError(str(error)))
        else:
            _known[host] = found = tuple(dict.fromkeys(str(row[4][0]) for row in rows))
            report(found)

    threading.Thread(target=look_up, name="aiops-lookup", daemon=True).start()


def _checked(host: str, answer: Addresses | OSError) -> Addresses:
    if isinstance(answer, OSError):
        if answer.errno == socket.EAI_AGAIN and host in _known:
            return _known[host]
        raise OSError(answer.errno, f"{host!r} cannot be looked up: {answer.strerror or answer}")
    return answer


def _limited(host: str, patience: float) -> float:
    """Return the seconds to wait for an answer."""
    return min(patience, _AGAIN) if host in _known else patience


def _last(host: str, patience: float) -> Addresses:
    """Return the last addresses of a host about which there is no answer."""
    known = _known.get(host)
    if known is None:
        raise TimeoutError(f"{host!r} cannot be looked up: no answer in {patience:.3g} s")
    return known
