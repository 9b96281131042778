"""The signs of life of a peer's machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from aiops import testing
from aiops.net import path_watch
from aiops.net.path_watch import PathWatch, unheard
from aiops.net.socket_options import tune
from tests.rows import each_row

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


class Told:
    """A socket whose kernel tells what a test has it tell."""

    family = socket.AF_INET

    def __init__(self, probes: int, packets: int, data: int, acknowledgement: int) -> None:
        self.info = bytearray(104)
        struct.pack_into("=B", self.info, 3, probes)
        struct.pack_into("=I", self.info, 24, packets)
        struct.pack_into("=II", self.info, 52, data, acknowledgement)

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        return bytes(self.info[:buflen])


@linux
@each_row(
    ("told", "expected"),
    [
        (Told(1, 0, 9000, 5000), 5.0),
        (Told(0, 3, 4500, 9000), 4.5),
        (Told(0, 0, 9000, 9000), 0.0),  # nothing is asked of it
    ],
)
def test_what_the_kernel_tells(told: Told, expected: float) -> None:
    assert unheard(told) == expected


@linux
def test_a_peer_that_answers_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _address = listener.accept()
    with near, far:
        tune(near)
        near.sendall(bytes(1000))
        assert 0 <= unheard(near) < 1
        near.close()
        assert unheard(near) == 0


def test_within_one_machine_there_is_no_network() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert unheard(near) == 0


@testing.virtual()
async def test_a_cut_is_told_once_and_in_time() -> None:
    network, loop, told = testing.network(), asyncio.get_running_loop(), list[tuple[float, float]]()
    with network.at("server"):
        listener = network.listen(asyncio.Protocol)
    with network.at("alice"):
        transport, _protocol = await network.connect(asyncio.Protocol, "server", listener.port)
    watch = PathWatch(transport, lambda: 4.0, lambda seconds: told.append((loop.time(), seconds)))
    network.silence("alice")
    await asyncio.sleep(3.0)
    network.restore("alice")
    await asyncio.sleep(100.0)
    assert told == []
    network.silence("server")
    cut = loop.time()
    await asyncio.sleep(100.0)
    [(when, seconds)] = told
    assert 4.0 <= seconds == when - cut < 4.6
    watch.stop()
    transport.close()
    listener.close()


@testing.virtual()
async def test_one_that_has_stopped_tells_nothing() -> None:
    network, told = testing.network(), list[float]()
    listener = network.listen(asyncio.Protocol)
    transport, _protocol = await network.connect(asyncio.Protocol, "localhost", listener.port)
    PathWatch(transport, lambda: 4.0, told.append).stop()
    network.silence("localhost")
    await asyncio.sleep(100.0)
    assert told == []
    transport.abort()
    listener.close()


@linux
def test_a_system_that_tells_nothing_ends_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_watch, "_INFO", None)
    told: Any = Told(1, 1, 9000, 9000)
    assert unheard(told) == 0


class Lost(asyncio.Protocol):
    """A protocol that tells when its connection is lost."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


@linux
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_transport_that_its_loop_has_closed_is_not_looked_at(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A loop tells the protocol nothing when its attempt to connect is cancelled at the end."""

    async def close_and_look(port: int) -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(Lost, "127.0.0.1", port)
        watch = PathWatch(transport, lambda: 9.0, lambda seconds: None)
        transport.abort()
        await protocol.lost.wait()
        await asyncio.sleep(0)  # then it has closed the socket
        watch._look()
        assert watch._timer is None

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(new_loop()) as loop:
        loop.run_until_complete(close_and_look(listener.getsockname()[1]))
