"""The small HTTP server: what it answers, and what a hostile client cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.net.http_listener import LONGEST_REQUEST, HttpListener, HttpResponse
from tests.rows import each_row
from tests.support import PATIENCE

BIG = b"x" * (8 << 20)  # more than the socket's buffers hold


def hello() -> HttpResponse:
    return HttpResponse(HTTPStatus.OK, b"hello\n")


async def big() -> HttpResponse:
    return HttpResponse(HTTPStatus.OK, BIG)


async def broken() -> HttpResponse:
    raise RuntimeError("a fault of its own")


async def never() -> HttpResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def act(token: str, body: bytes) -> HttpResponse:
    return HttpResponse(HTTPStatus.OK, f"{token}: {body.decode()}".encode())


async def flood() -> AsyncGenerator[bytes]:
    FLOODED.clear()
    while True:
        FLOODED.append(len(FLOODED))
        yield b"x" * (1 << 20)


async def once() -> AsyncGenerator[bytes]:
    yield b"data: 1\n\n"
    await asyncio.Event().wait()


FLOODED: list[int] = []  # the events that a flood was asked for


async def failing() -> AsyncGenerator[bytes]:
    yield b"data: 1\n\n"
    raise ValueError("the third is no number")


@contextlib.asynccontextmanager
async def listening(host: str = "127.0.0.1", **settings: Any) -> AsyncIterator[int]:
    handlers = {"/big": big, "/broken": broken, "/never": never}
    streams = {"/flood": flood, "/once": once, "/failing": failing}
    listener = HttpListener(handlers, {"/hello": hello}, streams, {"/act": act}, **settings)
    port = await listener.listen(host, 0)
    try:
        yield port
    finally:
        await asyncio.wait_for(listener.close(), PATIENCE)


async def ask(port: int, request: bytes | str) -> bytes:
    """Send bytes, and return all that comes until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.encode() if isinstance(request, str) else request)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), PATIENCE)
        return b""
    finally:
        writer.transport.abort()


async def get(port: int, path: str, host: str = "localhost", method: str = "GET") -> bytes:
    return await ask(port, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")


async def answered(port: int, path: str = "/hello", status: int = 200, method: str = "GET") -> bool:
    """Return whether it answers so; some requests may miss a deadline that is short."""
    for _ in range(100):
        if (await get(port, path, method=method)).startswith(f"HTTP/1.1 {status} ".encode()):
            return True
    return False


async def test_an_answer() -> None:
    async with listening() as port:
        answer = await get(port, "/hello?x=1")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
        assert b"Content-Length: 6" in head.splitlines()
        assert body == b"hello\n"
        only_head = await get(port, "/hello", method="HEAD")
        assert only_head == head + b"\r\n\r\n"


@each_row(
    ("request_text", "status"),
    [
        ("GET /nothing HTTP/1.1\r\n\r\n", 404),
        ("POST /hello HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde", 405),
        ("GET /hello HTTP/2\r\n\r\n", 400),
        ("GET /hello\r\n\r\n", 400),
        ("\r\n\r\n", 400),
        ("\n\n", 400),
        ("\r\nGET /hello HTTP/1.1\r\n\r\n", 200),
        ("GET /hello HTTP/1.1\nHost: localhost\n\n", 200),
        ("GET http://localhost/hello?x HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200),
        ("GET HTTP://127.0.0.1:80/hello HTTP/1.1\r\n\r\n", 200),
        ("GET http://evil.example/hello HTTP/1.1\r\nHost: localhost\r\n\r\n", 421),
        ("GET http://localhost HTTP/1.1\r\n\r\n", 404),
        ("POST /hello HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + "x" * 200_000, 405),
        ("GET  /hello HTTP/1.1\r\n\r\n", 400),
        ("GET /hello HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 400),
        ("GET /hello HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        ("GET /hello HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 421),
        ("GET /hello HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 421),
        ("GET /hello HTTP/1.1\r\nHost: [::1]:9\r\n\r\n", 200),
        ("GET /hello HTTP/1.1\r\nHOST: 127.0.0.1:99\r\n\r\n", 200),
        ("GET /hello HTTP/1.0\r\n\r\n", 200),
        ("GET /broken HTTP/1.1\r\n\r\n", 500),
    ],
)
async def test_status(request_text: str, status: int) -> None:
    async with listening() as port:
        answer = await ask(port, request_text)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert await get(port, "/hello"), "it goes on"


async def test_beyond_loopback_any_name_is_its_own() -> None:
    async with listening("0.0.0.0") as port:
        assert (await get(port, "/hello", host="node7")).startswith(b"HTTP/1.1 200 ")


async def test_a_request_that_is_too_long() -> None:
    async with listening() as port:
        answer = await ask(port, b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * LONGEST_REQUEST))
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert await get(port, "/hello")


@each_row("sent", [b"", b"GET /hello HT", b"GET /hello HTTP/1.1\r\nX: y\r\n"])
async def test_a_request_that_never_ends_has_a_deadline(sent: bytes) -> None:
    async with listening(patience=0.05) as port:
        assert await ask(port, sent) == b""


async def cut(writer: asyncio.StreamWriter) -> None:
    """Wait until the other end has reset a connection, which a write notices."""
    async with asyncio.timeout(PATIENCE):
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.01)


async def test_an_answer_that_is_not_read_has_a_deadline() -> None:
    async with listening(patience=0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /big HTTP/1.1\r\n\r\n")
        await cut(writer)
        writer.transport.abort()
        assert await answered(port)


async def test_an_answer_that_is_not_made_has_a_deadline() -> None:
    async with listening(patience=0.05) as port:
        assert await answered(port, "/never", 503)


async def test_silent_connections_give_way() -> None:
    async with listening(most=2) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert (await get(port, "/hello")).startswith(b"HTTP/1.1 200 ")
        for reader, writer in silent[:19]:  # each gave way to the next, and those to the request
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.transport.abort()
        silent[19][1].transport.abort()


async def test_answers_that_take_time_leave_room_for_those_that_take_none() -> None:
    release = asyncio.Event()
    begun = asyncio.Semaphore(0)

    async def slow() -> HttpResponse:
        begun.release()
        await release.wait()
        return HttpResponse(HTTPStatus.OK, b"done")

    async def more(port: int) -> None:
        while not release.is_set():
            answer = await get(port, "/slow")
            assert answer.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 200 "))

    listener = HttpListener({"/slow": slow}, {"/hello": hello}, most_waiting=2)
    port = await listener.listen("127.0.0.1", 0)
    asked = [asyncio.create_task(get(port, "/slow")) for _ in range(2)]
    for _ in asked:
        await asyncio.wait_for(begun.acquire(), PATIENCE)
    assert b"2 requests for /slow or the like wait already" in await get(port, "/slow")
    others = [asyncio.create_task(more(port)) for _ in range(16)]
    answers = [await get(port, "/hello") for _ in range(50)]
    assert all(answer.endswith(b"hello\n") for answer in answers)
    release.set()
    assert all(answer.endswith(b"done") for answer in await asyncio.gather(*asked))
    await asyncio.gather(*others)
    await listener.close()


async def test_an_answer_that_is_not_read_keeps_its_place_among_those_that_take_time() -> None:
    async with listening(most_waiting=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /big HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            while not (await get(port, "/broken")).startswith(b"HTTP/1.1 503 "):
                pass  # it has not come yet
        assert (await get(port, "/hello")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


async def test_a_body_without_an_end_gives_way() -> None:
    async with listening(most=2) as port:
        posts = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for reader, writer in posts:
            writer.write(b"POST /hello HTTP/1.1\r\n\r\nx")
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), PATIENCE)
        assert (await get(port, "/hello")).startswith(b"HTTP/1.1 200 ")
        for _reader, writer in posts:
            writer.transport.abort()


async def test_closing_cuts_all() -> None:
    async with listening() as port:
        asked = asyncio.create_task(get(port, "/never"))
        await get(port, "/hello")
    assert await asked == b""
    with pytest.raises(OSError):  # noqa: PT011 (refused)
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_that_is_taken() -> None:
    async with listening() as port:
        text = f"cannot listen on 127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}"
        with pytest.raises(UsageError, match=f"^{text}$"):
            await HttpListener({}).listen("127.0.0.1", port)


@each_row("host", ["x" * 64, "a..b", "x.invalid"])
async def test_a_host_that_has_no_address(host: str) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on {host}:0: "):
        await HttpListener({}).listen(host, 0)


async def test_all_addresses_of_a_host_have_one_port() -> None:
    listener = HttpListener({}, {"/hello": hello})
    port = await listener.listen("", 0)  # that is asyncio's name of all
    assert listener._server is not None
    assert {each.getsockname()[1] for each in listener._server.sockets} == {port}
    assert (await get(port, "/hello")).startswith(b"HTTP/1.1 200 ")
    await listener.close()


async def test_random_bytes_do_no_harm() -> None:
    import random

    bytes_of = random.Random(1).randbytes
    async with listening(patience=0.2) as port:
        await asyncio.gather(*(ask(port, bytes_of(200) + b"\r\n\r\n") for _ in range(50)))
        assert await answered(port)


class TestStreams:
    async def test_events_come_as_they_are_made(self) -> None:
        async with listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /once HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                event = await reader.readuntil(b"\n\n")
            assert b"Content-Type: text/event-stream" in head
            assert b"Content-Length" not in head
            assert event == b"data: 1\n\n"
            writer.transport.abort()

    async def test_a_reader_that_does_not_read_is_cut_and_nothing_is_kept_for_it(self) -> None:
        async with listening(patience=0.05) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /flood HTTP/1.1\r\n\r\n")
            await cut(writer)
            assert len(FLOODED) < 50, "the next is made once the last has been read"
            writer.transport.abort()

    async def test_an_error_ends_the_stream_and_is_no_event(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with listening() as port:
            answer = await get(port, "/failing")
        assert answer.endswith(b"\r\n\r\ndata: 1\n\n")
        assert "there are no more events for a reader of /failing" in caplog.text
        assert "the third is no number" in caplog.text

    async def test_few_read_at_a_time_and_the_rest_of_the_port_answers(self) -> None:
        async with listening(most_streams=2, most=2, most_waiting=1) as port:
            both = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in both:
                writer.write(b"GET /once HTTP/1.1\r\n\r\n")
                async with asyncio.timeout(PATIENCE):
                    await reader.readuntil(b"data: 1\n\n")
            assert (await get(port, "/once")).startswith(b"HTTP/1.1 503 ")
            assert await answered(port), "those who read take no connection of the others"
            for _reader, writer in both:
                writer.transport.abort()
            assert await answered(port, "/once", 200, "HEAD"), "they have left"

    @each_row(
        ("site", "status"),
        [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
    )
    async def test_a_page_of_another_site_takes_no_room(self, site: str, status: int) -> None:
        async with listening() as port:
            request = f"HEAD /once HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: {site}\r\n\r\n"
            assert (await ask(port, request)).startswith(f"HTTP/1.1 {status} ".encode())
            assert (await ask(port, request.replace("/once", "/hello"))).startswith(
                b"HTTP/1.1 200 "
            ), "a link leads there"


class TestActions:
    async def test_it_has_the_token_and_the_body(self) -> None:
        async with listening() as port:
            answer = await ask(
                port,
                "POST /act HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
                "Authorization: bearer  abc \r\nContent-Length: 5\r\n\r\nhello",
            )
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"abc: hello")

    @each_row(
        ("lines", "status"),
        [
            ("GET /act HTTP/1.1\r\nHost: localhost", 405),
            ("POST /act HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example", 403),
            ("POST /act HTTP/1.1\r\nHost: localhost\r\nOrigin: null", 403),
            ("POST /act HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-site", 403),
            ("POST /act HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example", 421),
            ("POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4097", 413),
            ("POST /act HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic YTpi", 200),
        ],
    )
    async def test_status(self, lines: str, status: int) -> None:
        async with listening() as port:
            answer = await ask(port, f"{lines}\r\n\r\n")
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())
            assert b": " in answer.splitlines()[-1] or status != 200, "no token is an empty one"
            assert (b"Allow: POST" in answer) == (status == 405)

    async def test_a_body_that_does_not_come_has_a_deadline(self) -> None:
        async with listening(patience=0.05) as port:
            head = "POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhe"
            assert (await ask(port, head)).startswith(b"HTTP/1.1 408 ")
