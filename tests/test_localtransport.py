"""The transport within a machine keeps asyncio's promises, whatever the socket takes at a time."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvloop

from aiops.lending import Passing
from aiops.localtransport import Descriptors, LocalTransport
from aiops.segments import Segment
from tests.support import PATIENCE
from tests.test_segments import descriptors

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    new_loop = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runs(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(asyncio.wait_for(main, PATIENCE))

    return runs


class Ear(asyncio.BufferedProtocol):
    """Notes everything that happens to it."""

    def __init__(self, room: int = 1 << 16) -> None:
        self.buffer, self.heard = bytearray(room), bytearray()
        self.noted: list[str] = []
        self.changed = asyncio.Event()
        self.transport: Any = None
        self.error: BaseException | None = None

    def _note(self, what: str) -> None:
        self.noted.append(what)
        self.changed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._note("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += self.buffer[:nbytes]
        self.changed.set()

    def eof_received(self) -> bool:
        self._note("eof")
        return False

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._note("lost")

    async def until(self, check: Callable[[], bool]) -> None:
        while not check():
            self.changed.clear()
            await self.changed.wait()


def pair(room: int = 1 << 16) -> tuple[Ear, Ear, Descriptors]:
    """Two ends of a connection, and what came beside the bytes to the second."""
    loop, came = asyncio.get_running_loop(), Descriptors()
    one, other = socket.socketpair()
    ears = Ear(room), Ear(room)
    LocalTransport(loop, one, ears[0], Descriptors(), ("127.0.0.1", 0))
    LocalTransport(loop, other, ears[1], came)
    return *ears, came


def test_what_is_said_is_heard_in_order(run: Run) -> None:
    async def main() -> None:
        one, other, _came = pair(room=1000)
        await one.until(lambda: one.transport is not None)
        data = os.urandom(3 << 20)
        view = memoryview(data)
        for low in range(0, len(data), 10_007):
            one.transport.write(view[low : low + 10_007])
        one.transport.writelines([b"the ", b"end"])
        await other.until(lambda: other.heard.endswith(b"the end"))
        assert bytes(other.heard) == data + b"the end"
        assert one.noted[:2] == ["made", "pause"]
        await one.until(lambda: one.noted[-1] == "resume")
        assert one.transport.get_write_buffer_size() == 0
        assert one.transport.get_extra_info("sockname") == ("127.0.0.1", 0)
        peer = one.transport.get_extra_info("peername")
        assert peer == f"process {os.getpid()} on this machine"
        one.transport.close()
        other.transport.close()

    run(main())


def test_who_does_not_read_is_not_read_to(run: Run) -> None:
    async def main() -> None:
        one, other, _came = pair()
        await other.until(lambda: other.transport is not None)
        other.transport.pause_reading()
        assert not other.transport.is_reading()
        one.transport.set_write_buffer_limits(high=1 << 20)
        one.transport.write(bytes(1 << 22))
        assert "pause" in one.noted
        for _ in range(10):
            await asyncio.sleep(0)
        assert not other.heard
        assert one.transport.get_write_buffer_size() > 1 << 20
        other.transport.resume_reading()
        await other.until(lambda: len(other.heard) == 1 << 22)
        await one.until(lambda: "resume" in one.noted)
        one.transport.abort()
        await other.until(lambda: "lost" in other.noted)

    run(main())


def test_what_was_written_goes_out_before_the_end(run: Run) -> None:
    async def main() -> None:
        one, other, _came = pair()
        await one.until(lambda: one.transport is not None)
        one.transport.write(bytes(1 << 22))
        one.transport.close()
        assert one.transport.is_closing()
        one.transport.write(b"too late")
        await other.until(lambda: "lost" in other.noted)
        assert len(other.heard) == 1 << 22
        assert other.noted[-2:] == ["eof", "lost"]
        await one.until(lambda: "lost" in one.noted)
        assert one.error is None
        assert one.noted.count("lost") == 1

    run(main())


def test_abort_ends_it_at_once(run: Run) -> None:
    async def main() -> None:
        one, other, _came = pair()
        await other.until(lambda: other.transport is not None)
        one.transport.write(bytes(1 << 22))
        one.transport.abort()
        one.transport.abort()
        await one.until(lambda: "lost" in one.noted)
        await other.until(lambda: "lost" in other.noted)
        assert one.noted.count("lost") == 1
        assert len(other.heard) < 1 << 22

    run(main())


def test_segments_come_with_their_messages(run: Run) -> None:
    async def main() -> None:
        one, other, came = pair()
        await other.until(lambda: other.transport is not None)
        segments = [Segment(4096 * (n + 1)) for n in range(9)]
        for n, segment in enumerate(segments):
            segment.data[:] = n
            one.transport.write(b"plain")
            one.transport.write(Passing.of(bytes([n]), segment))
        one.transport.write(memoryview(bytes(1 << 20)))
        await other.until(lambda: len(other.heard) == 9 * 6 + (1 << 20))
        for n in range(8):
            assert (came.attach(4096 * (n + 1), private=False) == n).all()
        one.transport.abort()
        await other.until(lambda: "lost" in other.noted)
        with pytest.raises(ValueError, match="no file descriptor came"):
            came.attach(4096, private=False)

    gc.collect()
    before = descriptors()
    run(main())
    gc.collect()
    assert descriptors() == before, "the ninth, which nobody asked for, is closed"


def test_more_descriptors_than_anybody_wants(run: Run) -> None:
    async def main() -> None:
        one, other, _came = pair()
        await other.until(lambda: other.transport is not None)
        segment = Segment(4096)
        for _ in range(65):
            one.transport.write(Passing.of(b"x", segment))
        await other.until(lambda: "lost" in other.noted)
        assert "more than 64 descriptors" in str(other.error)
        await one.until(lambda: "lost" in one.noted)

    run(main())


def test_bytes_in_any_pieces() -> None:
    one, other = socket.socketpair()
    with one, other:
        came, segment = Descriptors(), Segment(4096)
        socket.send_fds(one, [b"abcdef"], [segment.fd] * 3)
        buffer = bytearray(2)
        receive = partial(came.received, other, memoryview(buffer))
        assert [bytes(buffer[: receive()]) for _ in range(3)] == [b"ab", b"cd", b"ef"]
        assert [len(came.attach(4096, private=True)) for _ in range(3)] == [4096] * 3
