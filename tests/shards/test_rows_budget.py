"""A bandwidth budget of servers that rows of tables are spread over: they keep it together."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.bandwidth.shares import shares_of, too_slow_on, weights_of
from aiops.client import Client, Worker
from aiops.engine.events import Options, SetBudget
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.model.tables import Table
from aiops.shards.budget_shares import BudgetShares
from tests.shards.test_budgets import KB, Crossed
from tests.shards.test_kept_budgets import machines, rates
from tests.shards.test_kept_shards import FORKED, Log
from tests.support import PATIENCE, server_process

FLAGS: dict[str, Any] = {"policy": "asgd", "kernels": "numpy", "shards": 3, "spread_tables": True}
TABLES = {"e": Table(1 << 20, 16, init="zeros")}
BATCH = 600
EXCHANGE = BATCH * 2 * (8 + 64)  # bytes of a push with the rows that it asks for, about


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> Crossed:
    return Crossed(monkeypatch)


async def push_rows(url: str, seed: int, until: float, tensors: Any) -> int:
    """Push rows and fetch others until that time; return the number of exchanges."""
    draw, made, ones = np.random.default_rng(seed), 0, np.ones((BATCH, 16), np.float32)
    async with aiops.AsyncWorker(url, tensors, tables=TABLES) as worker:
        while asyncio.get_running_loop().time() < until:
            pushed, wanted = draw.integers(0, 1 << 20, (2, BATCH))
            await worker.exchange_rows("e", pushed, ones, wanted)
            made += 1
    return made


@testing.virtual()
async def test_no_second_sees_more_rows_on_all_servers_together(crossed: Crossed) -> None:
    """Without tensors each server has a third of the budget, and of the rows: none is left over."""
    async with aiops.serve(**FLAGS, bandwidth_budget="1MB/s") as server:
        workers = [push_rows(server.url, n, 20.0, {}) for n in range(3)]
        made = sum(await asyncio.gather(*workers))
        report = server.engine.report()["budget"]
    assert crossed.busiest() <= 1000 * KB
    assert made >= 0.85 * 20 * 960 * KB / EXCHANGE
    assert 800 * KB <= report["peak"] <= 1000 * KB, "of all servers, as the lead is told"
    least, _middle, most = crossed.by_server()
    assert least >= 0.9 * most


@testing.virtual()
async def test_beside_tensors_rows_have_half_of_the_budget(crossed: Crossed) -> None:
    """A small model lies on the lead alone."""
    tensors = {"w": np.zeros(1000, np.float32)}
    async with aiops.serve(**FLAGS, bandwidth_budget="1MB/s") as server:
        workers = [push_rows(server.url, n, 20.0, tensors) for n in range(3)]
        made = sum(await asyncio.gather(*workers))
    assert crossed.busiest() <= 1000 * KB
    assert made >= 0.8 * 20 * 480 * KB / EXCHANGE


@testing.virtual()
async def test_a_workers_budget_is_that_of_its_rows_on_all_servers(crossed: Crossed) -> None:
    async with aiops.serve(**FLAGS, worker_budget="300KB/s") as server:
        made = await push_rows(server.url, 0, 20.0, {})
    assert crossed.busiest() <= 300 * KB
    assert made >= 0.75 * 20 * 288 * KB / EXCHANGE


@pytest.mark.parametrize(("acks", "power"), [("written", False), ("durable", True)])
def test_servers_that_crash_keep_the_budget(
    acks: str, power: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower, the lead, and all of them come back at once: no second sees more bytes."""
    crossed = Crossed(monkeypatch)

    @testing.virtual()
    async def main() -> None:
        servers = machines(acks, bandwidth_budget="300KB/s", spread_tables=True)
        for machine in reversed(servers):
            await machine.start()
        workers = [
            asyncio.ensure_future(push_rows(servers[0].url, n, 12.0, {"w": np.zeros(90)}))
            for n in range(3)
        ]
        await asyncio.sleep(2.0)
        before = rates(servers)
        assert sum(before) == 300 * KB
        for ended in ([servers[1]], [servers[0]], servers):
            await asyncio.sleep(2.0)
            for machine in ended:
                machine.cut_power() if power else machine.crash()
            await asyncio.gather(*(machine.start() for machine in ended))
            await asyncio.sleep(1.5)
            assert rates(servers) == before
        assert min(await asyncio.gather(*workers)) > 2
        for machine in servers:
            await machine.stop()

    main()
    assert 250 * KB < crossed.busiest() <= 300 * KB


@pytest.mark.slow
def test_processes_keep_the_budget_though_one_is_killed(tmp_path: Path) -> None:
    """The clients' counts of bytes are those of no more than the time allows, on a real clock."""
    flags = ("--policy", "asgd", "--lr", "1", "--kernels", "numpy", "--shards", "3")
    flags += ("--spread-tables", "--bandwidth-budget", "400KB/s", "--state", str(tmp_path))
    counted, pushes = list[int](), [0, 0]
    over = threading.Event()

    def push(number: int) -> None:
        ids, ones = np.arange(number, 900, 2), np.ones((450, 16), np.float32)
        with Worker(server.url, {}, tables=TABLES, timeout=PATIENCE) as worker:
            while not over.is_set():
                worker.push_rows("e", ids, ones)
                pushes[number] += 1

    with server_process(*flags, env=FORKED) as server:
        log = Log(server)
        threads = [threading.Thread(target=push, args=(n,)) for n in range(2)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        with Client(server.url, timeout=PATIENCE) as client:
            while min(pushes) < 8:
                counted.append(client.stats()["budget"]["peak"])
        os.kill(log.pid(1), signal.SIGKILL)
        while min(pushes) < 16:
            time.sleep(0.01)
        over.set()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        with Client(server.url, timeout=PATIENCE) as client:
            rows = client.fetch_rows("e", np.arange(900))[:, 0]
            counted.append(client.stats()["budget"]["peak"])
    for number in range(2):
        assert (rows[number::2] == -pushes[number]).all(), "none is lost, none is doubled"
    assert 0 < max(counted) <= 400 * KB
    assert sum(pushes) * 450 * (8 + 64) <= 400 * KB * (seconds + 1)


# ---------------------------------------------------------------- the division


def test_what_is_divided_evenly() -> None:
    assert weights_of([600, 200], rows=False) == [600, 200]
    assert weights_of([0, 0, 0], rows=True) == [1, 1, 1]
    assert shares_of(960 * KB, weights_of([90, 0, 0], rows=True)) == [620 * KB, 170 * KB, 170 * KB]


def test_a_model_that_half_of_a_budget_cannot_carry() -> None:
    """The share of a server with tensors is smaller if rows have some of it."""
    servers = [[("a", 4_200 * KB)], [("b", 0)], [("c", 0)]]
    assert too_slow_on(100 * KB, servers) is None
    assert "'a' has 4200000 bytes" in str(too_slow_on(100 * KB, servers, rows=True))


def test_a_follower_without_tensors_has_a_share_for_its_rows() -> None:
    shares = BudgetShares(Options(shards=2, budget=160 * KB))
    placement = Placement.even(Layout([("w", "float32", (10,))]), 2, 1 << 20)
    [pace, order] = shares.placed(placement, rows=True)
    assert pace == SetBudget(117_500, None)
    assert order.message.total == 42_500  # type: ignore[union-attr]
    [pace, order] = shares.placed(placement)
    assert order.message.total == 5 * KB  # type: ignore[union-attr]
