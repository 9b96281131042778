"""What is set on sockets, and what they tell."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from aiops.sockets import SEND_BUFFER, narrow, readable, tune, unacknowledged

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
    """A socket of one congestion control, between two addresses, that writes down what is set."""

    def __init__(self, here: str, there: str, control: bytes) -> None:
        self.here, self.there, self.control = here, there, control

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1

    def getpeername(self) -> tuple[str, int]:
        return self.there, 2

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.control.ljust(size, b"\0")

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if (level, option) == (socket.IPPROTO_TCP, getattr(socket, "TCP_CONGESTION", None)):
            assert isinstance(value, bytes)
            self.control = value


@linux
@pytest.mark.parametrize(
    ("there", "control", "expected"),
    [
        ("127.0.0.1", b"bbr", b"reno"),
        ("127.0.0.1", b"cubic", b"cubic"),
        ("10.0.0.7", b"bbr", b"bbr"),
    ],
)
def test_nothing_is_paced_that_stays_on_the_machine(
    there: str, control: bytes, expected: bytes
) -> None:
    sock = Recorded("127.0.0.1", there, control)
    tune(cast(socket.socket, sock))
    assert sock.control == expected


@linux
def test_a_connection_to_this_machine_has_no_pacing_control(pair: Pair) -> None:
    for sock in pair:
        tune(sock)
        option = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert not option.startswith(b"bbr")
