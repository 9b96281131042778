"""Answer GET requests at a port of its own: a few connections, one request each, all with bounds.

It is for machines that observe a server (a scraper, a probe, a page), and nothing that they do may
cost the server more than a little: a request has a size and a deadline, the reader of an answer has
a deadline, and beyond a few connections the oldest that has not sent its request gives way. No
body is read, and no connection is kept.

At a loopback address a request must name this machine as its host. Otherwise a page of another site
that a user visits could read the answers, by a name that it lets point here (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from aiops.common import forks
from aiops.common.urls import address, is_loopback
from aiops.errors import UsageError

_log = logging.getLogger("aiops.server")

CONNECTIONS = 8
"""Connections that are open at a time."""

PATIENCE = 5.0
"""Seconds for a request to come, for its answer to be made, and for that to be read, each."""

LONGEST_REQUEST = 8 << 10
"""Bytes of a request: its line and its headers."""

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer: its status, its body, and what that is."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Handler: TypeAlias = Callable[[], Awaitable[HttpResponse]]


class HttpListener:
    """Listens, for as long as its event loop runs or until `close`.

    Parameters
    ----------
    handlers
        By path: makes the answer.
    patience, most
        As `PATIENCE` and `CONNECTIONS`.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        patience: float = PATIENCE,
        most: int = CONNECTIONS,
    ) -> None:
        self._handlers, self._patience, self._most = handlers, patience, most
        self._server: asyncio.Server | None = None
        self._local = True
        # The oldest first, each with its connection; those whose request has come are `_answering`.
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._answering = set[asyncio.Task[None]]()

    async def listen(self, host: str, port: int) -> int:
        """Listen at an address; return the port (0 picks a free one).

        Raises
        ------
        UsageError
            When the address cannot be had.
        """
        self._local = is_loopback(host)
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=LONGEST_REQUEST, backlog=self._most
            )
        except OSError as error:
            where = address(host, port)
            raise UsageError(f"cannot listen on {where}: {error.strerror or error}") from None
        forks.note(self)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def forked(self) -> None:
        """Listen no more in a fork: the port is the parent's."""
        for sock in self._server.sockets if self._server is not None else ():
            forks.blank(sock.fileno())

    async def close(self) -> None:
        """Listen no more, and cut the connections."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._most and not self._dropped_one():
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open[task] = writer
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        self._answering.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection to the metrics' port failed", exc_info=error)

    def _dropped_one(self) -> bool:
        """Cut the oldest connection that has not sent its request; return whether there was one."""
        for task, writer in self._open.items():
            if task not in self._answering:
                del self._open[task]
                writer.transport.abort()
                return True
        return False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._exchange(reader, writer)
        except (OSError, EOFError, TimeoutError):  # it is gone, or too slow
            pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, task = "", asyncio.current_task()
        assert task is not None, "each connection has one"
        try:
            async with asyncio.timeout(self._patience):
                request = await reader.readuntil(b"\r\n\r\n")
            self._answering.add(task)
            method, path, host = _parsed(request)
            response = await self._answer(method, path, host)
        except asyncio.LimitOverrunError:
            response = _said(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except ValueError:
            response = _said(HTTPStatus.BAD_REQUEST)
        async with asyncio.timeout(self._patience):
            writer.write(_encoded(response, body=method != "HEAD"))
            writer.close()
            await writer.wait_closed()

    async def _answer(self, method: str, path: str, host: str) -> HttpResponse:
        if self._local and not _is_here(host):
            text = f"this server is reached as localhost or by its address, not as {host!r}"
            return _said(HTTPStatus.MISDIRECTED_REQUEST, text)
        handler = self._handlers.get(path)
        if handler is None:
            return _said(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._handlers)}")
        if method not in ("GET", "HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            async with asyncio.timeout(self._patience):
                return await handler()
        except TimeoutError:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready in {self._patience:g} s")
        except Exception:
            _log.exception("the answer to GET %s failed", path)
            return _said(HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log tells why")


def _parsed(request: bytes) -> tuple[str, str, str]:
    """Return the method, the path without its query, and the host of a request.

    Raises
    ------
    ValueError
        When it is none.
    """
    line, *headers = request.decode("latin-1").split("\r\n")
    method, target, version = line.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    hosts = [h.partition(":")[2].strip() for h in headers if h.lower().startswith("host:")]
    if len(hosts) > 1:
        raise ValueError("several hosts")
    return method, target.partition("?")[0], hosts[0] if hosts else ""


def _is_here(host: str) -> bool:
    """Return whether a request's host is an address, localhost or not given."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name.lower() in ("", "localhost")


def _said(status: HTTPStatus, text: str = "") -> HttpResponse:
    return HttpResponse(status, f"{status.phrase}: {text or status.description}\n".encode())


def _encoded(response: HttpResponse, *, body: bool) -> bytes:
    """Return the bytes of an answer; without ``body`` its headers only."""
    lines = [
        f"HTTP/1.1 {response.status.value} {response.status.phrase}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(["Allow: GET, HEAD"] if response.status == HTTPStatus.METHOD_NOT_ALLOWED else []),
    ]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + response.body if body else head
