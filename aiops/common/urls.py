"""URLs of servers: ``aiops://host:port``, and of alternatives and shards.

::

    aiops://a:7171                 one server
    aiops://a:7171,b:7171          alternatives: a client uses the first that welcomes it
    aiops://a:7171+f:7171+g:7171   a lead, and the followers that hold the rest of its model
    aiops://a+f,b+g                two of those
    aiops+tls://a:7171             the same, and each server that is named speaks TLS
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from aiops.common.frozen import value
from aiops.errors import UsageError

PORT = 7171
"""The default port of a server."""

RELAY_PORT = 7172
"""The default port of a relay."""


PLAIN, TLS = "aiops", "aiops+tls"
"""The schemes: TCP as it is, and TLS."""


def parse(url: str, default: int = PORT) -> tuple[str, int]:
    """Return the host and port of ``aiops://host[:port]`` (or plain ``host[:port]``).

    `is_tls` tells the two schemes apart.

    ``default``: the port of an address without one.

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
    scheme_known = parts.scheme in (PLAIN, TLS)
    if not scheme_known or not host or parts.path not in ("", "/") or parts.query:
        raise UsageError(
            f"{url!r} is not the address of a server; write aiops://host:port, or"
            " aiops+tls://host:port"
        )
    return host, default if port is None else port


def is_tls(url: str) -> bool:
    """Return True if a URL is of servers that speak TLS."""
    return url.startswith(f"{TLS}://")


@value
class ServerAddress:
    """The address of one server.

    Attributes
    ----------
    host, port
        Its own; of a model on several servers, the lead's.
    followers
        Host and port of each follower, if the URL names them; default: none.
    tls
        Whether all of them speak TLS.
    """

    host: str
    port: int
    followers: tuple[tuple[str, int], ...] = ()
    tls: bool = False

    @property
    def url(self) -> str:
        """The URL of the server itself, without the followers."""
        return write(self.host, self.port, tls=self.tls)


def parse_all(url: str) -> tuple[ServerAddress, ...]:
    """Return the servers of a URL: one, or alternatives in the order in which they are tried.

    Raises
    ------
    UsageError
        When one is no address, or an address comes twice.
    """
    scheme, separator, rest = url.rpartition("://")
    found: list[ServerAddress] = []
    for alternative in rest.split(","):
        lead, *followers = (parse(f"{scheme}{separator}{part}") for part in alternative.split("+"))
        found.append(ServerAddress(*lead, tuple(followers), is_tls(url)))
        _check_distinct(url, [lead, *followers])
    _check_distinct(url, [(server.host, server.port) for server in found])
    return tuple(found)


def _check_distinct(url: str, addresses: Sequence[tuple[str, int]]) -> None:
    if len(set(addresses)) < len(addresses):
        raise UsageError(f"{url!r} names an address twice")


def write_all(servers: Iterable[ServerAddress]) -> str:
    """Return the URL of these servers, which all speak TLS or none; `parse_all` is the inverse."""
    servers = tuple(servers)
    alternatives = (
        "+".join(address(*each) for each in ((server.host, server.port), *server.followers))
        for server in servers
    )
    return _with_scheme(",".join(alternatives), any(server.tls for server in servers))


def write(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of a host and port; ``tls``: it speaks TLS."""
    return _with_scheme(address(host, port), tls)


def address(host: str, port: int) -> str:
    """Return ``host:port``; an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _with_scheme(text: str, tls: bool) -> str:
    return f"{TLS if tls else PLAIN}://{text}"


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(host: str) -> str:
    """Return the address by which a listener on all addresses is reached on the same host."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def local_url(url: str) -> str:
    """Return the URL by which a server's own machine reaches the address that it listens on."""
    host, port = parse(url)
    return write(local_address(host), port, tls=is_tls(url))
