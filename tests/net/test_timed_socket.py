"""The times of a connection's last calls."""

from __future__ import annotations

import socket
import time

from aiops.net.timed_socket import SocketTimes, TimedSocket, plain, timed


def test_the_end_of_sending_and_the_first_bytes_after_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        times = SocketTimes(time.time_ns)
        sock = timed(ours, times)
        begin = time.time_ns()
        assert sock.sendmsg([b"ab", b"c"]) == 3
        assert begin <= times.sent <= time.time_ns()
        assert times.received == 0
        assert theirs.recv(9) == b"abc"
        theirs.sendall(b"defg")
        buffer = bytearray(2)
        assert sock.recv_into(buffer) == 2
        first = times.received
        assert times.sent <= first
        assert sock.recv_into(buffer, 0, socket.MSG_WAITALL) == 2
        assert bytes(buffer) == b"fg"
        assert times.received == first
        sock.sendmsg([b"h"])
        assert times.received == 0
        assert sock.fileno() == ours.fileno()
        assert sock.family == ours.family


def test_another_kind_of_socket_stays_as_it_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sock = TimedSocket(ours, SocketTimes(time.time_ns))
        assert timed(sock, SocketTimes(time.time_ns)) is sock


def test_the_plain_socket_of_each() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert plain(ours) is ours
        assert plain(TimedSocket(ours, SocketTimes(time.time_ns))) is ours
        assert plain(None) is None
