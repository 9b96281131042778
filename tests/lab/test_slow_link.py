"""The slow link: bytes arrive intact, and never faster than the line carries them."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.client import Worker
from aiops.common import urls
from aiops.errors import UsageError
from aiops.lab.slow_link import DEPTH, Direction, LinkBudget, SlowLink
from tests.support import PATIENCE, ServerThread

Portions = list[tuple[float, int]]


def busiest(portions: Portions, window: float = 1.0) -> int:
    """Return the most bytes that any window carried."""
    sums = [0, *accumulate(nbytes for _time, nbytes in portions)]
    most = first = 0
    for last, (time, _nbytes) in enumerate(portions):
        while portions[first][0] <= time - window:
            first += 1
        most = max(most, sums[last + 1] - sums[first])
    return most


class TestLine:
    @given(
        rate=st.floats(1000, 1e9),
        late=st.lists(st.floats(0, 0.2), min_size=1, max_size=20),
        shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=20),
    )
    def test_no_window_carries_more(
        self, rate: float, late: list[float], shares: list[float]
    ) -> None:
        """However late its user wakes up, and whatever the size of the portions."""
        line, now, portions = LinkBudget(rate), 5.0, Portions()
        for turn in range(600):
            nbytes = max(1, int(shares[turn % len(shares)] * line.portion))
            while (wait := line.take(now, nbytes)) > 0:
                now += wait + late[turn % len(late)] * DEPTH
            portions.append((now, nbytes))
        for window in (0.1, 1.0):
            assert busiest(portions, window) <= rate * (window + DEPTH) + 1

    def test_who_is_not_late_gets_all_of_it(self) -> None:
        line, now, carried = LinkBudget(1e6), 0.0, 0
        while now < 10:
            wait = line.take(now, line.portion)
            carried += 0 if wait else line.portion
            now += wait
        assert 10e6 <= carried <= 10e6 + line.depth + line.portion

    def test_an_idle_line_saves_up_no_more_than_its_depth(self) -> None:
        line = LinkBudget(1e6)
        assert line.take(0.0, 40_000) == 0
        assert line.take(100.0, 40_000) == 0
        assert line.take(100.0, 1000) == pytest.approx(0.001)

    def test_a_clock_that_goes_back_brings_nothing(self) -> None:
        line = LinkBudget(1e6)
        assert line.take(10.0, 40_000) == 0
        assert line.take(9.0, 1000) > 0
        assert line.take(10.0, 1000) > 0


class Echo:
    """A server that sends back what it is sent, once the sender has ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = urls.write(*self._listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.heard: list[bytes] = []

    def __enter__(self) -> Echo:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._listener.close()

    def _serve(self) -> None:
        answering: list[threading.Thread] = []
        while True:
            try:
                peer, _address = self._listener.accept()
            except OSError:
                break
            answering.append(threading.Thread(target=self._answer, args=(peer,)))
            answering[-1].start()
        for thread in answering:
            thread.join(PATIENCE)

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            data = b"".join(iter(lambda: peer.recv(1 << 16), b""))
            self.heard.append(data)
            peer.sendall(data)


def send_and_receive(url: str, data: bytes) -> bytes:
    with socket.create_connection(urls.parse(url), timeout=PATIENCE) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def ended(sock: socket.socket) -> bool:
    """Wait for the end of a connection, which may be an abrupt one."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


class TestSlowLink:
    @pytest.mark.slow
    @pytest.mark.parametrize("each", [False, True])
    def test_bytes_arrive_intact_at_the_lines_pace(self, each: bool) -> None:
        rate = 400_000.0
        portions: dict[Direction, Portions] = defaultdict(list)

        def watch(way: Direction, time: float, nbytes: int) -> None:
            portions[way].append((time, nbytes))

        messages = [bytes([number]) * 200_000 for number in (1, 2, 3)]
        heard: list[bytes] = []
        with (
            Echo() as echo,
            SlowLink(echo.url, rate=rate, delay=0.002, each=each, watch=watch) as link,
        ):
            senders = [
                threading.Thread(target=lambda m=m: heard.append(send_and_receive(link.url, m)))
                for m in messages
            ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(PATIENCE)
            assert link.carried == {"up": 600_000, "down": 600_000}
            assert link.connections == 3
        assert sorted(heard) == sorted(echo.heard) == messages
        lines = 3 if each else 1
        for way in ("up", "down"):
            assert sum(nbytes for _time, nbytes in portions[way]) == 600_000
            assert busiest(portions[way]) <= lines * rate * 1.05

    def test_a_worker_behind_a_link(self) -> None:
        model = {"w": np.zeros(1000, np.float32)}
        with (
            ServerThread(policy="asgd", set={"lr": 1}, kernels="numpy") as server,
            SlowLink(server.url, rate=1_000_000, up="4Mbit/s", delay=0.001) as link,
        ):
            with Worker(link.url, model) as worker:
                for _ in range(3):
                    worker.step({"w": np.ones(1000, np.float32)})
                np.testing.assert_array_equal(worker.params["w"], -3.0)
            report = worker.ledger.report()
            # What was said last may be on its way still: the worker does not wait for it.
            assert 0 <= report["pushed"]["bytes"] - link.carried["up"] < 64
            assert report["fetched"]["bytes"] == link.carried["down"]

    def test_the_end_of_a_link_ends_its_connections(self) -> None:
        with Echo() as echo:
            with SlowLink(echo.url, rate=1_000_000) as link:
                sock = socket.create_connection(urls.parse(link.url), timeout=PATIENCE)
                sock.sendall(b"unfinished")
            with sock:
                assert ended(sock)

    def test_nobody_behind_the_link(self) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = urls.write(*unused.getsockname()[:2])
            with (
                SlowLink(url, rate=1_000_000) as link,
                socket.create_connection(urls.parse(link.url), timeout=PATIENCE) as sock,
            ):
                assert ended(sock)

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"rate": 10.0}, "rate up: 10.0 is 10 bytes per second"),
            ({"rate": 1_000_000, "down": float("nan")}, "rate down: 'nan' is not a rate"),
            ({"rate": "2 MBs"}, "rate up: '2 MBs' is not a rate"),
            ({"rate": 1_000_000, "delay": -1.0}, "cannot be"),
        ],
    )
    def test_what_no_link_can_be(self, settings: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            SlowLink("aiops://127.0.0.1:1", **settings)
