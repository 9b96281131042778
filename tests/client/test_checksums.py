"""Clients with checksums: bytes that are changed on the way end a connection, and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import AsyncWorker, Client, Table, Worker, testing
from aiops.errors import ConnectionLost, Corrupted
from aiops.sim.virtual import stream
from aiops.wire.checked_connection import PREAMBLE
from tests.support import ServerThread, server_process

SETTINGS: dict[str, Any] = {"policy": "asgd", "kernels": "numpy", "set": {"lr": 1.0}}
MODEL = {"w": np.zeros((64, 64), np.float32), "b": np.zeros(3)}
STEP = {name: np.full_like(value, -1.0) for name, value in MODEL.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_step_and_rows_over_real_sockets(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPS_CHECKSUMS", "1")
    flags = ("--policy", "asgd", "--set", "lr=1", "--kernels", "numpy", "--shard-bytes", "1")
    with (
        server_process(*flags, "--shards", str(shards)) as server,
        Worker(server.url, MODEL, tables={"t": Table(100, 4)}) as worker,
    ):
        assert worker._session.wire.checked
        assert not worker.near
        for count in range(1, 4):
            assert worker.step(STEP).used
            assert all((worker.params[name] == count).all() for name in MODEL)
        worker.push_rows("t", [1, 7], np.ones((2, 4), np.float32))
        assert worker.fetch_rows("t", [7]).shape == (1, 4)
        assert worker.stats()["corrupted"] == 0


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerThread(**SETTINGS, no_shm=True) as server:
        with Client(server.url) as client:
            assert not client._session.wire.checked
        monkeypatch.setenv("AIOPS_CHECKSUMS", "0")
        with Client(server.url) as client:
            assert not client._session.wire.checked
        with Client(server.url, checksums=True) as client:
            assert client._session.wire.checked
            assert client.ping() >= 0
        monkeypatch.setenv("AIOPS_CHECKSUMS", "1")
        with Client(server.url, checksums=False) as client:
            assert not client._session.wire.checked


class Flips:
    """Changes a bit of what crosses the virtual network, now and then."""

    def __init__(self, seed: int, every: int) -> None:
        self.chance, self.every, self.count = random.Random(seed), every, 0

    def wrapped(self, write: Callable[..., None]) -> Callable[..., None]:
        def writes(where: Any, data: memoryview) -> None:
            if self.chance.randrange(self.every) == 0:
                changed = bytearray(data)
                bit = self.chance.randrange(8 * len(changed))
                changed[bit // 8] ^= 1 << bit % 8
                data = memoryview(bytes(changed))
                self.count += 1
            write(where, data)

        return writes


@pytest.mark.parametrize("seed", range(3))
def test_each_push_counts_once_through_flipped_bits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = Flips(seed, 12)
    monkeypatch.setattr(stream.ByteStream, "write", flips.wrapped(stream.ByteStream.write))

    async def main() -> tuple[int, int]:
        async with (
            aiops.serve(**SETTINGS) as server,
            AsyncWorker(server.url, MODEL, checksums=True, timeout=600.0) as worker,
        ):
            for count in range(1, 101):
                assert (await worker.step(STEP)).used
                assert all((worker.params[name] == count).all() for name in MODEL)
                await asyncio.sleep(0.1)
            report = server.engine.report()
            return report["gradients"], report["corrupted"]

    gradients, corrupted = testing.run(main(), seed=seed)
    assert gradients == 100
    assert flips.count >= 10
    assert 0 < corrupted <= flips.count


@testing.virtual()
async def test_a_network_that_changes_every_message_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with aiops.serve(**SETTINGS) as server:
        worker = AsyncWorker(server.url, MODEL, checksums=True, timeout=20.0)
        flips = Flips(0, 1)
        monkeypatch.setattr(stream.ByteStream, "write", flips.wrapped(stream.ByteStream.write))
        with pytest.raises(ConnectionLost):
            await worker.connect()


def test_the_first_bytes_are_no_other_clients() -> None:
    """A MessagePack integer, so that the stream stays one of MessagePack."""
    assert len(PREAMBLE) == 9
    assert PREAMBLE[0] == 0xCF
    assert issubclass(Corrupted, ConnectionLost)
