"""URLs of servers: ``aiops://host:port``."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiops.errors import UsageError

PORT = 7171
"""The default port of a server."""


def parse(url: str) -> tuple[str, int]:
    """Return the host and port of ``aiops://host[:port]`` (or plain ``host[:port]``).

    Raises
    ------
    UsageError
        When it is not such an address.
    """
    text = url if "://" in url else f"aiops://{url}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not an address: {error}; write aiops://host:port") from None
    if parts.scheme != "aiops" or not host or parts.path not in ("", "/") or parts.query:
        raise UsageError(f"{url!r} is not the address of a server; write aiops://host:port")
    return host, PORT if port is None else port


def parse_all(url: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of ``aiops://host:port,host:port``, one or several.

    Raises
    ------
    UsageError
        When one is no address, or comes twice.
    """
    scheme, separator, rest = url.rpartition("://")
    found = [parse(f"{scheme}{separator}{part}") for part in rest.split(",")]
    if len(set(found)) < len(found):
        raise UsageError(f"{url!r} names an address twice")
    return found


def write(host: str, port: int) -> str:
    """Return the URL of a host and port."""
    return f"aiops://[{host}]:{port}" if ":" in host else f"aiops://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
