"""Answer GET requests at a port of its own: a few connections, one request each, all with bounds.

A path may have a stream, which goes on until its reader leaves: a page's server-sent events.

It is for machines that observe a server (a scraper, a probe, a page), and nothing that they do may
cost the server more than a little: a request has a size and a deadline, the reader of an answer has
a deadline, and beyond a few connections the oldest that has not sent its request gives way. Few
connections wait for an answer that takes time, so that one that takes none comes all the same. A
body is not kept, and neither is a connection.

At a loopback address a request must name this machine as its host. Otherwise a page of another site
that a user visits could read the answers, by a name that it lets point here (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from aiops.common import forks
from aiops.common.urls import address, is_loopback
from aiops.errors import UsageError
from aiops.net.http_request import LONGEST_REQUEST, HttpRequest, is_here, parsed, read_head

_log = logging.getLogger("aiops.server")

CONNECTIONS = 32
"""Connections that are open at a time, those that are answered at once aside."""

WAITING = 4
"""Connections of these whose answer takes time, to be made or to be read."""

STREAMS = 16
"""Connections that read a stream at a time, beside the others."""

PATIENCE = 5.0
"""Seconds for a request to come, for its answer to be made, and for that to be read, each."""

LONGEST_ACTION = 4 << 10
"""Bytes of the body of a request for an action."""

ACTION_PATIENCE = 60.0
"""Seconds for an action."""

_LONGEST_BODY = 1 << 20
"""Bytes of a body that are read, to be thrown away."""

TEXT = "text/plain; charset=utf-8"
EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer: its status, its body, what that is, and the names and values of more headers."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


Handler: TypeAlias = Callable[[], Awaitable[HttpResponse]]
QuickHandler: TypeAlias = Callable[[], HttpResponse]
Action: TypeAlias = Callable[[str, bytes], Awaitable[HttpResponse]]
Streamer: TypeAlias = Callable[[], AsyncGenerator[bytes]]


class HttpListener:
    """Listens, for as long as its event loop runs or until `close`.

    Parameters
    ----------
    handlers
        By path: makes the answer, which may take time.
    quick
        By path: makes the answer at once. Default: there are none.
    streams
        By path: yields events (`EVENTS`), each when it is time. The next is asked for once the one
        before has been read, for which its reader has ``patience``. Default: there are none.
    actions
        By path: takes the token and the body of a POST request of this site, and makes the answer.
        Default: there are none.
    patience, most, most_waiting, most_streams
        As `PATIENCE`, `CONNECTIONS`, `WAITING`, which is less than the one before, and `STREAMS`.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        quick: Mapping[str, QuickHandler] | None = None,
        streams: Mapping[str, Streamer] | None = None,
        actions: Mapping[str, Action] | None = None,
        *,
        patience: float = PATIENCE,
        most: int = CONNECTIONS,
        most_waiting: int = WAITING,
        most_streams: int = STREAMS,
    ) -> None:
        self._handlers, self._quick, self._streams = handlers, quick or {}, streams or {}
        self._actions = actions or {}
        self._patience, self._most, self._most_waiting = patience, most, most_waiting
        self._most_streams = most_streams
        self._server: asyncio.Server | None = None
        self._local = True
        # The oldest first, each with its connection. Of those whose request has come some have an
        # answer that takes time, and others one that ends in a few turns of the loop.
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._waiting = set[asyncio.Task[None]]()
        self._ending = set[asyncio.Task[None]]()
        self._streaming = set[asyncio.Task[None]]()

    async def listen(self, host: str, port: int) -> int:
        """Listen at an address; return the port (0 picks a free one).

        Raises
        ------
        UsageError
            When the address cannot be had.
        """
        self._local = is_loopback(host)
        try:
            self._server = await self._started(host, port)
            found: int = self._server.sockets[0].getsockname()[1]
            if len(self._server.sockets) > 1 and not port:  # each address picked one of its own
                self._server.close()
                self._server = await self._started(host, found)
        except (OSError, UnicodeError) as error:  # the latter: it is no name of a host
            raise UsageError(f"cannot listen on {address(host, port)}: {_why(error)}") from None
        forks.note(self)
        return found

    async def _started(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(
            self._connected, host, port, limit=LONGEST_REQUEST, backlog=self._most
        )

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
        count = len(self._open) - len(self._streaming)
        full = count - len(self._ending) >= self._most and not self._dropped_one()
        if full or count >= 4 * self._most:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open[task] = writer
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        self._waiting.discard(task)
        self._ending.discard(task)
        self._streaming.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request at the port of metrics and the live page failed", exc_info=error)

    def _dropped_one(self) -> bool:
        """Cut the oldest connection that is not being answered; return whether there was one."""
        for task, writer in self._open.items():
            if not any(task in busy for busy in (self._waiting, self._ending, self._streaming)):
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
                head = await read_head(reader)
            self._ending.add(task)
            request = parsed(head)
        except asyncio.LimitOverrunError:
            response = _said(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except ValueError:
            response = _said(HTTPStatus.BAD_REQUEST)
        else:
            method = request.method
            refused = self._refusal(request)
            if refused is None and request.path in self._streams and method == "GET":
                await self._stream(task, reader, writer, request.path)
                return
            action = None if refused else self._actions.get(request.path)
            if action is not None:
                response = await self._act(task, reader, action, request)
            else:
                response = refused or await self._answer(task, request)
        async with asyncio.timeout(self._patience):
            writer.write(_encoded(response, body=method != "HEAD"))
            if method in ("GET", "HEAD"):
                writer.close()
                await writer.wait_closed()
                return
            # There may be a body. If it were left unread, the system would cut the connection, and
            # the answer with it.
            self._ending.discard(task)  # so it gives way
            writer.write_eof()
            left = _LONGEST_BODY
            while left > 0 and (data := await reader.read(LONGEST_REQUEST)):
                left -= len(data)

    async def _stream(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
    ) -> None:
        """Send events until the reader is gone, or has not read one in time, or they fail."""
        self._ending.discard(task)
        self._streaming.add(task)
        transport = writer.transport
        transport.set_write_buffer_limits(0)  # so that `drain` waits until all of it is sent
        writer.write(_head_of(HttpResponse(HTTPStatus.OK, b"", EVENTS), length=None))
        watch = asyncio.get_running_loop().create_task(_end_with(reader, task))
        try:
            async with contextlib.aclosing(self._streams[path]()) as events:
                async for event in events:
                    writer.write(event)
                    async with asyncio.timeout(self._patience):
                        await writer.drain()
        except (OSError, TimeoutError):  # of the reader
            raise
        except Exception:
            _log.exception("there are no more events for a reader of %s", path)
        finally:
            watch.cancel()

    def _refusal(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer to a request that has no other; None: it has."""
        method, path = request.method, request.path
        if self._local and not is_here(request.host):
            text = f"this server is reached as localhost or by its address, not as {request.host!r}"
            return _said(HTTPStatus.MISDIRECTED_REQUEST, text)
        paths = [*self._handlers, *self._quick, *self._streams, *self._actions]
        if path not in paths:
            return _said(HTTPStatus.NOT_FOUND, f"there are {', '.join(paths)}")
        if path in self._actions:
            return _refused_action(request)
        if method not in ("GET", "HEAD"):
            return _not_allowed("GET, HEAD")
        if path in self._streams and request.site in ("cross-site", "same-site"):
            # It could not read them, but take the room of those who can.
            return _said(HTTPStatus.FORBIDDEN, "a page of another site asks")
        if path in self._streams and len(self._streaming) >= self._most_streams:
            text = f"{self._most_streams} read {path} already"
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    async def _act(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        action: Action,
        request: HttpRequest,
    ) -> HttpResponse:
        """Carry out an action: few at a time, and none that is slow to be asked for."""
        if len(self._waiting) >= self._most_waiting:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "others wait already")
        self._ending.discard(task)
        self._waiting.add(task)
        try:
            try:
                async with asyncio.timeout(self._patience):
                    body = await reader.readexactly(request.length)
            except TimeoutError:
                return _said(HTTPStatus.REQUEST_TIMEOUT, f"no body in {self._patience:g} s")
            async with asyncio.timeout(ACTION_PATIENCE):
                return await action(request.token, body)
        except TimeoutError:
            return _said(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"it takes more than {ACTION_PATIENCE:g} s, and may still be done",
            )
        except Exception:
            _log.exception("POST %s failed", request.path)
            return _said(HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log tells why")

    async def _answer(self, task: asyncio.Task[None], request: HttpRequest) -> HttpResponse:
        path = request.path
        if path in self._streams:
            return HttpResponse(HTTPStatus.OK, b"", EVENTS)  # to HEAD
        try:
            if path in self._quick:
                return self._quick[path]()
            if len(self._waiting) >= self._most_waiting:
                text = f"{self._most_waiting} requests for {path} or the like wait already"
                return _said(HTTPStatus.SERVICE_UNAVAILABLE, text)
            self._ending.discard(task)
            self._waiting.add(task)  # until its answer has been read
            async with asyncio.timeout(self._patience):
                return await self._handlers[path]()
        except TimeoutError:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready in {self._patience:g} s")
        except Exception:
            _log.exception("the answer to GET %s failed", path)
            return _said(HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log tells why")


def _refused_action(request: HttpRequest) -> HttpResponse | None:
    """Return the answer to a request for an action that may not be asked for so; None: it may."""
    if request.method != "POST":
        return _not_allowed("POST")
    own = request.origin.partition("://")[2] == request.host
    if (request.origin and not own) or request.site not in ("", "same-origin"):
        return _said(HTTPStatus.FORBIDDEN, "a page of another site asks")
    if not 0 <= request.length <= LONGEST_ACTION:
        return _said(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return None


def _why(error: OSError | UnicodeError) -> str:
    """Return the reason alone: asyncio's text of a system's error names the address once more."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else str(error)


async def _end_with(reader: asyncio.StreamReader, task: asyncio.Task[None]) -> None:
    """Cancel a task once its peer has closed the connection; throw away what it sends."""
    with contextlib.suppress(OSError):
        while await reader.read(LONGEST_REQUEST):
            pass
    task.cancel()


def _said(status: HTTPStatus, text: str = "") -> HttpResponse:
    return HttpResponse(status, f"{status.phrase}: {text or status.description}\n".encode())


def _not_allowed(methods: str) -> HttpResponse:
    said = _said(HTTPStatus.METHOD_NOT_ALLOWED)
    return HttpResponse(said.status, said.body, headers=(("Allow", methods),))


def _encoded(response: HttpResponse, *, body: bool) -> bytes:
    """Return the bytes of an answer; without ``body`` its headers only."""
    head = _head_of(response, len(response.body))
    return head + response.body if body else head


def _head_of(response: HttpResponse, length: int | None) -> bytes:
    """Return the bytes before a body of this length; None: it ends with the connection."""
    lines = [
        f"HTTP/1.1 {response.status.value} {response.status.phrase}",
        f"Content-Type: {response.content_type}",
        *([] if length is None else [f"Content-Length: {length}"]),
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(f"{name}: {value}" for name, value in response.headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
