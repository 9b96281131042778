"""A message in virtual time, counted in Python calls: a ratchet, which may only go down."""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf

import pytest

from aiops import testing
from aiops.serving.config import Config
from aiops.testing import Cluster, Deadweight, Host, SimulatedLink, StarTopology
from tests.calls import calls

pytestmark = pytest.mark.usefixtures("none_pending")

ACROSS_LINKS = 16
"""Calls of a message that crosses links, from `write` to `buffer_updated`."""

WITHOUT_LINKS = 8
"""The same where no link limits it."""

CLUSTER = 70
"""Calls of a message of a cluster: half of a mini-batch, its push and the answer."""


class Player(asyncio.BufferedProtocol):
    """Answers what comes, until it has sent its last message."""

    def __init__(self, messages: int) -> None:
        self._left, self._room = messages, memoryview(bytearray(100))
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.play()

    def play(self) -> None:
        self._left -= 1
        if self._left:
            self._transport.write(self._room)
        else:
            self.ended.set_result(None)


async def rally(messages: int, rate: float) -> None:
    """Have two hosts send each other as many messages each."""
    network, loop = testing.network(), asyncio.get_running_loop()
    for name in ("server", "client"):
        network.add(Host(name, (SimulatedLink(rate),), (SimulatedLink(rate),), 1e-3))
    with network.at("server"):
        await loop.create_server(lambda: Player(2 * messages), "127.0.0.1", 7)
    with network.at("client"):
        _transport, player = await loop.create_connection(lambda: Player(messages), "server", 7)
    player.play()
    await player.ended


def cluster(gradients: int) -> None:
    """Train a cluster."""
    links = StarTopology(worker="1Gbit/s", server="1Gbit/s", latency=1e-4)
    settings = Cluster(
        server=Config(policy="fasgd"),
        workload=Deadweight(400),
        links=links,
        gradients=gradients,
    )
    testing.simulate(settings)


@pytest.mark.parametrize(("rate", "most"), [(1e8, ACROSS_LINKS), (inf, WITHOUT_LINKS)])
def test_a_message(rate: float, most: int) -> None:
    few, many = (calls(partial(play, messages, rate)).count for messages in (20, 120))
    assert (many - few) / 200 <= most


def play(messages: int, rate: float) -> None:
    testing.run(rally(messages, rate))


def test_a_message_of_a_cluster() -> None:
    pytest.importorskip("numba")
    cluster(40)  # kernels are compiled
    few, many = (calls(partial(cluster, gradients)).count for gradients in (100, 400))
    assert (many - few) / 600 <= CLUSTER
