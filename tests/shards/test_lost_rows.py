"""Rows that lie on several servers without a state, of which one is lost while rows are pushed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.errors import ConnectionLost, Unavailable
from aiops.model.tables import Table
from aiops.serving.server import Server

TABLES = {"a": Table(1000, 4)}


async def cut(server: Server) -> None:
    """Push rows, and lose a follower before the answers come."""
    async with aiops.AsyncClient(server.url, role="worker", timeout=5) as client:
        await client.define({}, TABLES)
        ids, ones = np.arange(1000), np.ones((1000, 4), np.float32)
        await client.fetch_rows("a", ids)
        pushes = [asyncio.ensure_future(client.push_rows("a", ids, ones)) for _ in range(6)]
        await asyncio.sleep(0)  # they are sent, and not answered
        assert server._leading is not None
        server._leading.links._followers[2].link.fault(ConnectionLost("cut by the test"))
        outcomes = await asyncio.gather(*pushes, return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, BaseException)]
        assert refused
        assert all(isinstance(each, Unavailable | ConnectionLost) for each in refused)
        assert "shard 2 of 3" in str(refused[0])
    training = server.engine.training
    assert training is not None
    assert training.rows_shortcut is not None
    assert training.rows_shortcut.closed
    assert not any(pool.out for pool in server.engine.pools), "their buffers are free"


@testing.virtual()
async def test_a_follower_that_is_lost_with_rows_under_way() -> None:
    """Each request ends, with the reason if it is not answered, and the lead takes no others."""
    config = {"policy": "asgd", "port": 0, "kernels": "numpy", "shards": 3, "shard_bytes": 1}
    finished = []

    async def lose() -> None:
        async with aiops.serve(**config, spread_tables=True) as server:
            await cut(server)
            finished.append(server)

    with pytest.raises(ConnectionLost, match="its lead is gone"):  # the follower's end
        await lose()
    assert finished
