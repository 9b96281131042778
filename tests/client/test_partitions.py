"""Networks that are parted for a while: both sides notice, all goes on, each push counts once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import AsyncClient, AsyncWorker, Client, Worker, testing
from aiops.client.sync import connection
from aiops.common.failure_waits import DEFAULT
from tests.peers import eventually
from tests.proxy import Proxy
from tests.support import ServerThread

SETTINGS: dict[str, Any] = {"policy": "asgd", "kernels": "numpy", "set": {"lr": 1.0}}
PARTITIONS = 40


def drawn(seed: int) -> Iterator[tuple[float, float]]:
    """Seconds of peace, and of silence: 1 s to 10 minutes, most of them short."""
    chance = random.Random(seed)
    for _ in range(PARTITIONS):
        yield chance.uniform(0.01, 5.0), float(np.exp(chance.uniform(0.0, np.log(600.0))))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("whose", ["alice", "server"])
def test_each_push_counts_once(whose: str, seed: int) -> None:
    """A worker steps on through 40 partitions; another, whose network is well, is not disturbed."""

    async def main() -> None:
        network, loop = testing.network(), asyncio.get_running_loop()
        with network.at("server"):
            serving = aiops.serve(**SETTINGS)
            server = await serving.__aenter__()
        peers, pushed = server.connections.peers, 0

        async def train() -> None:
            nonlocal pushed
            with network.at("alice"):
                async with AsyncWorker(server.url, {"w": np.zeros(1)}, timeout=3600.0) as worker:
                    while True:
                        receipt = await worker.step({"w": np.full(1, -1.0)})
                        assert receipt.used
                        pushed += 1
                        assert worker.params["w"][0] == pushed
                        await asyncio.sleep(0.2)

        training = asyncio.ensure_future(train())
        for peace, silence in drawn(seed):
            await asyncio.sleep(peace)
            network.silence(whose)
            await asyncio.sleep(min(silence, DEFAULT))
            assert silence < DEFAULT or not peers, "the server has noticed"
            await asyncio.sleep(max(0.0, silence - DEFAULT))
            network.restore(whose)
            before, healed = pushed, loop.time()
            while pushed == before and loop.time() - healed < 2.0:
                await asyncio.sleep(0.01)
                assert not training.done(), training.result()
            assert pushed > before
        training.cancel()
        await asyncio.wait([training])
        await serving.__aexit__(None, None, None)

    testing.run(main(), seed=seed)


@testing.virtual()
async def test_an_idle_worker_notices_too() -> None:
    """It need not find out by its next step."""
    network = testing.network()
    async with aiops.serve(**SETTINGS) as server:
        with network.at("alice"):
            worker = await AsyncWorker(server.url, {"w": np.zeros(1)}).connect()
        first = worker._client._connection
        assert first is not None
        network.silence("alice")
        await asyncio.sleep(DEFAULT)
        assert first.ended.done()
        assert "nothing has been heard of" in str(first.ended.result())
        network.restore("alice")
        assert (await worker.step({"w": np.ones(1)})).used
        await worker.close()


@testing.virtual()
async def test_a_longer_time_out_is_told_to_clients() -> None:
    network = testing.network()
    async with aiops.serve(**SETTINGS, failure_timeout=20.0) as server:
        with network.at("alice"):
            async with AsyncWorker(server.url, {"w": np.zeros(1)}) as worker:
                assert (await worker.step({"w": np.ones(1)})).used
                [peer] = server.connections.peers
                network.silence("alice")
                await asyncio.sleep(15.0)
                network.restore("alice")
                assert (await worker.step({"w": np.ones(1)})).used
                assert [*server.connections.peers] == [peer]


class TestBlocking:
    """What the kernel tells a blocking client is made up here."""

    def test_a_call_that_waits_goes_on_with_another_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {"policy": "hardsync", "kernels": "numpy", "set": {"lr": 1.0}, "workers": 2}
        model = {"w": np.zeros(1)}
        with (
            ServerThread(**settings, no_shm=True) as server,
            Proxy(server.url) as proxy,
            Client(proxy.url, role="worker") as one,
            Client(server.url, role="worker") as two,
            ThreadPoolExecutor() as pool,
        ):
            mine, theirs = one.define(model), two.define(model)

            def told(_sock: object) -> float:
                monkeypatch.setattr(connection, "unheard", lambda sock: 0.0)
                return 9.0

            monkeypatch.setattr(connection, "unheard", told)
            step = pool.submit(one.exchange, mine, {"w": np.ones(1)})
            eventually(lambda: proxy.connections >= 2, "another connection")
            two.exchange(theirs, {"w": np.ones(1)})
            assert step.result().version == 1
            assert mine["w"][0] == -1

    def test_a_worker_that_computes_notices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with (
            ServerThread(**SETTINGS, no_shm=True) as server,
            Proxy(server.url) as proxy,
            Worker(proxy.url, {"w": np.zeros(1)}) as worker,
        ):
            monkeypatch.setattr(connection, "unheard", lambda sock: 9.0)
            gone = worker._client._connection
            eventually(lambda: gone.short.socket is None, "its thread ends the connection")
            monkeypatch.setattr(connection, "unheard", lambda sock: 0.0)
            assert worker.step({"w": np.ones(1)}).used
            assert proxy.connections == 2


@testing.virtual()
async def test_a_follower_forgets_clients_whose_machines_are_gone() -> None:
    """They train with both servers, and are not heard of again; none of them answers pings."""
    network, given = testing.network(), {**SETTINGS, "host": "0.0.0.0", "port": 7, "token": "t"}
    model = {name: np.zeros(1 << 17, np.float32) for name in "ab"}
    async with contextlib.AsyncExitStack() as stack:
        with network.at("f"):
            follower = await stack.enter_async_context(aiops.serve(follower=True, **given))
        with network.at("lead"):
            followers = {"followers": ["f:7"], "shard_bytes": 1}
            lead = await stack.enter_async_context(aiops.serve(**given, **followers))
        peers = lead.connections.peers, follower.connections.peers
        before = [len(each) for each in peers]
        for number in range(10):
            with network.at(f"gone-{number}"):
                client = AsyncClient("aiops://lead:7", role="worker", token="t")
                await client.connect()
                await client.exchange(await client.define(model), model)
        assert [len(each) - count for each, count in zip(peers, before, strict=True)] == [10, 10]
        for number in range(10):
            network.silence(f"gone-{number}")
        await asyncio.sleep(2 * DEFAULT)
        assert [len(each) for each in peers] == before
