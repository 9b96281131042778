"""Servers and workers in one event loop, in virtual time."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import aiops
from aiops import testing
from aiops.cli.stats import tables
from aiops.client import AsyncClient, AsyncWorker
from aiops.errors import ConnectionLost
from aiops.net import moved_servers
from tests.support import assert_same

MODEL = {"w": np.zeros((40, 3), np.float32), "b": np.zeros(5, np.float32)}


def ones(params: object) -> dict[str, np.ndarray]:
    return {name: np.ones_like(array) for name, array in MODEL.items()}


@pytest.mark.parametrize("policy", ["asgd", "hardsync"])
@testing.virtual()
async def test_workers_train(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    settings = {"set": {"lr": 1}, "workers": 2, "kernels": "numpy", "save": path}
    async with aiops.serve(
        policy=policy, shards=3, shard_bytes=1, save_every=0.5, **settings
    ) as server:

        async def train() -> None:
            async with AsyncWorker(server.url, MODEL) as worker:
                for _ in range(5):
                    await worker.step(ones(worker.params))
                    await asyncio.sleep(0.3)

        await asyncio.gather(train(), train())
        async with AsyncClient(server.url) as client:
            params = await client.fetch()
            steps = 10 if policy == "asgd" else 5
            assert params.version == steps
            assert_same(params, {name: array - steps for name, array in MODEL.items()})
            report = await client.stats()
            assert [line["behind"] for line in report["shards"]] == [0, 0, 0]
            shown = io.StringIO()
            Console(file=shown, width=120).print(tables(server.url, report))
            assert re.search(r"shard +parameters +version +behind", shown.getvalue())
            assert re.search(rf"lead +\d+ B +{steps} +0", shown.getvalue())
            assert path.exists(), "it is saved now and then"
    assert_same(load_file(path), {name: array - steps for name, array in MODEL.items()})


@testing.virtual()
async def test_parameters_come_coded() -> None:
    """Whole numbers are the same in fp16; and half as long."""
    model = {"w": np.zeros((400, 3), np.float32)}
    settings = {"fetch_codec": "fp16", "fetch_lag": 1, "kernels": "numpy"}
    async with aiops.serve(
        policy="asgd", shards=3, shard_bytes=1, set={"lr": 1}, **settings
    ) as server:
        async with AsyncWorker(server.url, model) as worker:
            for _ in range(5):
                await worker.step({"w": np.ones((400, 3), np.float32)})
            assert_same(worker.params, {"w": np.full((400, 3), -5, np.float32)})
        async with AsyncClient(server.url) as client:
            member = (await client.stats())["workers"][0]
            assert 4800 + 5 * 2400 < member["bytes_fetched"] < 2 * 4800 + 5 * 2400


@testing.virtual()
async def test_what_cannot_be_reached_is_named() -> None:
    with pytest.raises(aiops.errors.UsageError, match=r"shard 1 of 2 at .*:9 cannot be had"):
        async with aiops.serve(policy="asgd", followers=["127.0.0.1:9"], kernels="numpy"):
            pass


@testing.virtual()
async def test_a_client_that_is_closed_midway() -> None:
    async with aiops.serve(policy="asgd", shards=2, shard_bytes=1, kernels="numpy") as server:
        client = await AsyncClient(server.url, role="worker").connect()
        params = await client.define(MODEL)
        call = asyncio.ensure_future(client.exchange(params, ones(params)))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ConnectionLost):
            await call
        async with AsyncClient(server.url, role="worker") as other:
            params = await other.define(MODEL)
            await other.exchange(params, ones(params))


async def test_clients_reach_the_shards_of_a_lead_that_has_moved() -> None:
    """Its followers are on its host, as the welcome says, and that is not the URL's any more."""
    first = "127.0.0.9", 7171
    async with aiops.serve(
        policy="asgd", shards=2, shard_bytes=1, host="127.0.0.2", port=0, kernels="numpy"
    ) as server:
        moved_servers.note(first, ("127.0.0.2", server.port))
        try:
            async with AsyncWorker("aiops://127.0.0.9:7171", MODEL) as worker:
                await worker.step(ones(worker.params))
            fetched = await asyncio.to_thread(_fetch, "aiops://127.0.0.9:7171")
            assert_same(fetched, worker.params)
        finally:
            moved_servers.note(first, first)


def _fetch(url: str) -> dict[str, np.ndarray]:
    with aiops.Client(url) as client:
        return dict(client.fetch())
