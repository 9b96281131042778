"""Read the head of an HTTP request: its first line, and the headers that count here."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_REQUEST = 8 << 10
"""Bytes of a request: its line and its headers."""

_ABSOLUTE = "http://"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The first line of a request, and the headers that count."""

    method: str
    path: str
    host: str
    site: str  # the site of the page that asks, as a browser says it (Sec-Fetch-Site)
    origin: str  # that page's, as a browser says it
    token: str  # of Authorization: Bearer
    length: int  # of the body


async def read_head(reader: asyncio.StreamReader) -> list[str]:
    """Return the lines of a request up to the empty one, without their ends.

    One empty line before them is left out, and a line may end with a newline alone (RFC 9112, 2.2).

    Raises
    ------
    LimitOverrunError
        When they are too long.
    """
    lines, left, before = list[str](), LONGEST_REQUEST, 1
    while True:
        line = await reader.readuntil(b"\n")
        left -= len(line)
        if left < 0:
            raise asyncio.LimitOverrunError("the request is too long", 0)
        text = line.decode("latin-1").removesuffix("\n").removesuffix("\r")
        if text:
            lines.append(text)
        elif lines or not before:
            return lines
        else:
            before -= 1


def parsed(head: Sequence[str]) -> HttpRequest:
    """Return a request, its path without its query.

    Raises
    ------
    ValueError
        When it is none.
    """
    line, *headers = head or [""]
    method, target, version = line.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    hosts, sites = _values(headers, "host:"), _values(headers, "sec-fetch-site:")
    if len(hosts) > 1:
        raise ValueError("several hosts")
    if target.lower().startswith(
        _ABSOLUTE
    ):  # as to a proxy: then its host counts (RFC 9112, 3.2.2)
        host, _, path = target[len(_ABSOLUTE) :].partition("/")
        hosts, target = [host], f"/{path}"
    path = target.partition("?")[0]
    origins, lengths = _values(headers, "origin:"), _values(headers, "content-length:")
    kind, _, token = next(iter(_values(headers, "authorization:")), "").partition(" ")
    return HttpRequest(
        *(method, path, next(iter(hosts), ""), next(iter(sites), ""), next(iter(origins), "")),
        token.strip() if kind.lower() == "bearer" else "",
        int(lengths[0]) if lengths and lengths[0].isdecimal() else 0,
    )


def _values(headers: Sequence[str], name: str) -> list[str]:
    return [h.partition(":")[2].strip() for h in headers if h.lower().startswith(name)]


def is_here(host: str) -> bool:
    """Return whether a request's host is an address, localhost or not given."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name.lower() in ("", "localhost")
