"""What is set on sockets, and what they tell."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.socket_options import (
    SEND_BUFFER,
    has_hung_up,
    narrow,
    readable,
    unacknowledged,
    unpace,
)
from tests.peers import eventually
from tests.rows import each_row

Pair = tuple[socket.socket, socket.socket]

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems need not tell")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _address = listener.accept()
    with near, far:
        yield near, far


@linux
def test_what_there_is_to_read(pair: Pair) -> None:
    near, far = pair
    assert readable(far) == 0
    near.sendall(bytes(1000))
    far.recv(1, socket.MSG_PEEK)  # it is there
    assert readable(far) == 1000
    far.recv(400)
    assert readable(far) == 600


def test_a_closed_socket_tells_nothing(pair: Pair) -> None:
    near, _far = pair
    near.close()
    assert readable(near) is None
    assert unacknowledged(near) == 0


@linux
@pytest.mark.parametrize(
    ("rate", "expected"), [(1000, 4096), (1_000_000, 31_250), (1 << 40, SEND_BUFFER)]
)
def test_buffers_hold_little_of_what_a_budget_lets_through(
    pair: Pair, rate: int, expected: int
) -> None:
    near, _far = pair
    narrow(near, rate)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        size = near.getsockopt(socket.SOL_SOCKET, option)
        assert size <= 2 * max(expected, 4608)  # doubled; the kernel has its own bounds


class Recorded:
    """A socket that has one option: its congestion control."""

    def __init__(self, control: bytes) -> None:
        self.control = control

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.control.ljust(size, b"\0")

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.control = value


@linux
@each_row(
    ("host", "control", "expected"),
    [
        ("127.0.0.1", b"bbr", b"reno"),
        ("::1", b"bbr2", b"reno"),
        ("127.0.0.1", b"cubic", b"cubic"),
        ("10.0.0.7", b"bbr", b"bbr"),
        ("0.0.0.0", b"bbr", b"bbr"),
    ],
)
def test_nothing_is_paced_that_stays_on_the_machine(
    host: str, control: bytes, expected: bytes
) -> None:
    sock = Recorded(control)
    unpace(cast(socket.socket, sock), host)
    assert sock.control == expected


@linux
def test_both_sides_of_a_connection_to_this_machine() -> None:
    def control(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        unpace(listener, "127.0.0.1")
        with CURRENT_ENVIRONMENT.get().unconnected_socket("127.0.0.1") as near:
            near.connect(listener.getsockname())
            far, _address = listener.accept()
            with far:
                assert not control(near).startswith(b"bbr")
                assert not control(far).startswith(b"bbr")


@linux
def test_an_event_loops_connection_to_this_machine() -> None:
    async def main(where: tuple[str, int]) -> bytes:
        transport, _protocol = await CURRENT_ENVIRONMENT.get().dial(asyncio.Protocol, *where)
        try:
            sock = transport.get_extra_info("socket")
            found: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return found
        finally:
            transport.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not asyncio.run(main(listener.getsockname())).startswith(b"bbr")


def test_a_connection_that_is_refused_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Kept(socket.socket):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
    monkeypatch.setattr("aiops.net.environment.socket.socket", Kept)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(dialled(where))
    assert made[-1].fileno() == -1


async def dialled(where: tuple[str, int]) -> None:
    """Connect as a server's or a client's event loop does."""
    await CURRENT_ENVIRONMENT.get().dial(asyncio.Protocol, *where)


@linux
def test_a_peer_that_has_hung_up(pair: Pair) -> None:
    """Though what it has sent before is not read yet."""
    near, far = pair
    near.sendall(b"hello")
    assert far.recv(1, socket.MSG_PEEK)
    assert not has_hung_up(far)
    near.shutdown(socket.SHUT_WR)
    eventually(lambda: has_hung_up(far), "it has hung up")
    assert far.recv(10) == b"hello"
