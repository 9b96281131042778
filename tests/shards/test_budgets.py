"""A bandwidth budget of a model on several servers: they keep it together."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.bandwidth.shares import check_shares, shares_of, too_slow_on
from aiops.bandwidth.token_bucket import Budget
from aiops.engine.engine import Engine
from aiops.engine.events import BudgetTick, Options, SetBudget
from aiops.errors import BadPush, ConflictError
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.net.paced_transport import PacedTransport
from aiops.shards.budget_shares import BudgetShares, first_share
from aiops.wire.server_messages import BudgetUsed, PaceClients
from tests.rows import each_row
from tests.support import assert_same

KB = 1000
FLAGS: dict[str, Any] = {"policy": "asgd", "kernels": "numpy", "shard_bytes": 1, "shards": 3}


def model(nbytes: int, value: float = 0.0) -> dict[str, Any]:
    return {"w": np.full(nbytes // 4, value, np.float32)}


class Crossed:
    """The bytes that any server's budget has let across from here on, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: list[tuple[float, Budget, int]] = []
        original = Budget.crossed

        def noted(budget: Budget, flow: int, nbytes: int, now: float) -> None:
            if not budget._flows[flow].free:
                self.moved.append((asyncio.get_running_loop().time(), budget, nbytes))
            original(budget, flow, nbytes, now)

        monkeypatch.setattr(Budget, "crossed", noted)

    def busiest(self) -> int:
        """Return the most bytes of all servers together in any window of one second."""
        most = total = first = 0
        for when, _budget, nbytes in self.moved:
            total += nbytes
            while self.moved[first][0] < when - 1.0:
                total -= self.moved[first][2]
                first += 1
            most = max(most, total)
        return most

    def by_server(self) -> list[int]:
        found: dict[int, int] = {}
        for _when, budget, nbytes in self.moved:
            found[id(budget)] = found.get(id(budget), 0) + nbytes
        return sorted(found.values())


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> Crossed:
    return Crossed(monkeypatch)


async def exchange(url: str, nbytes: int, until: float) -> int:
    """Exchange until that time; return the number of exchanges."""
    made = 0
    async with aiops.AsyncClient(url, role="worker") as client:
        params = await client.define(model(nbytes))
        while asyncio.get_running_loop().time() < until:
            await client.exchange(params, model(nbytes, 1.0))
            made += 1
    return made


@testing.virtual()
async def test_no_second_sees_more_on_all_servers_together(crossed: Crossed) -> None:
    async with aiops.serve(**FLAGS, bandwidth_budget="1MB/s") as server:
        workers = [exchange(server.url, 120 * KB, 20.0) for _ in range(3)]
        made = sum(await asyncio.gather(*workers))
        report = server.engine.report()["budget"]
    assert crossed.busiest() <= 1000 * KB
    # 20 s of 960 kB, less what it takes to begin; each exchange is 120 kB in both directions
    assert made >= 0.9 * 20 * 960 / 240
    assert report["bytes_per_second"] == 1000 * KB
    assert 800 * KB <= report["peak"] <= 1000 * KB
    assert report["utilisation"] >= 0.85
    least, _middle, most = crossed.by_server()
    assert least >= 0.8 * most, "a third of the model is on each"


@testing.virtual()
async def test_a_workers_budget_is_that_of_its_connections_to_all_servers(crossed: Crossed) -> None:
    async with aiops.serve(**FLAGS, worker_budget="300KB/s") as server:
        made = await exchange(server.url, 60 * KB, 20.0)
    assert crossed.busiest() <= 300 * KB
    assert made >= 0.75 * 20 * 288 / 120


@testing.virtual()
async def test_the_lead_is_told_of_all_and_gates_close(crossed: Crossed) -> None:
    """The gate is chosen by the bytes of all servers: those of the lead alone would be a third."""
    settings = {**FLAGS, "policy": "fasgd", "bandwidth_budget": "300KB/s"}
    async with aiops.serve(**settings) as server:

        async def train() -> None:
            async with aiops.AsyncWorker(server.url, model(60 * KB)) as worker:
                while asyncio.get_running_loop().time() < 30.0:
                    await worker.step(model(60 * KB, 0.1))
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(train() for _ in range(4)))
        report = server.engine.report()["budget"]
    assert crossed.busiest() <= 300 * KB
    assert report["c_push"] > 0
    assert report["peak"] > 200 * KB


@testing.virtual()
async def test_the_servers_own_connections_are_not_counted(crossed: Crossed) -> None:
    """Loading a model onto followers takes no budget, nor does collecting it."""
    async with (
        aiops.serve(**FLAGS, bandwidth_budget="200KB/s") as server,
        aiops.AsyncClient(server.url, role="worker") as client,
    ):
        await client.define(model(90 * KB, 3.0))
        assert_same(await client.fetch(), model(90 * KB, 3.0))
        kinds = [type(peer.link) for peer in server.connections.peers.values()]
    assert kinds == [PacedTransport]
    # The model crosses to the lead once, and comes back twice, in three parts.
    assert 270 * KB <= sum(crossed.by_server()) <= 273 * KB


def test_a_lead_connects_again_without_a_limit() -> None:
    """Under a budget the connection of a lead is a paced one, too, until it has said who it is."""
    budget = Budget(1000, None, 0.0)
    budget.open(1, 0.0)
    budget.open(2, 0.0)
    budget.ask(1, 0, 5000)
    budget.ask(2, 0, 4000)
    assert sum(nbytes for _flow, _way, nbytes in budget.grants(0.0)) <= 125
    budget.exempt(2)
    granted = [each for each in budget.grants(0.0) if each[0] == 2]
    assert [each[:2] for each in granted] == [(2, 0)]
    assert budget.at_once(2, 70_000, 0.0) == 70_000
    budget.crossed(2, granted[0][2], 0.0)
    assert budget.spent == 0
    assert budget.wanted == budget.asked(1, 0)
    budget.put_back(2, 70_000)
    assert budget.borrow(2, 0.0)
    budget.close(2, 0.0)
    assert budget.wanted == budget.asked(1, 0)
    assert budget.next(0.0) is not None


@each_row("rate", [16_000, 1_000_003, 10**12])
@each_row("held", [(0, 0, 0), (5, 5, 5), (100, 0, 0), (7, 900, 1), (1, 1, 10**9)])
def test_shares_make_up_the_budget(rate: int, held: tuple[int, ...]) -> None:
    shares = shares_of(rate, held)
    assert sum(shares) == rate
    assert min(shares) >= 1000
    if sum(held) and rate > 10**5:
        for share, nbytes in zip(shares, held, strict=True):
            assert share >= 0.93 * rate * nbytes / sum(held)


def test_what_a_share_cannot_carry_is_refused() -> None:
    assert too_slow_on(100 * KB, [[("a", 2000 * KB)], [("b", 2000 * KB)]]) is None
    text = too_slow_on(100 * KB, [[("a", 5000 * KB)], [("b", 2000 * KB)]])
    assert text is not None
    assert "'a' has 5000000 bytes" in text
    with pytest.raises(ConflictError, match="--worker-budget of 5KB/s is too small for 4 servers"):
        check_shares(4, None, 5000)
    check_shares(4, 8000, 8000)
    check_shares(1, 1000, 1000)


@testing.virtual()
async def test_a_model_that_the_budget_cannot_carry_is_refused() -> None:
    async with (
        aiops.serve(**FLAGS, bandwidth_budget="8KB/s") as server,
        aiops.AsyncClient(server.url, role="worker") as client,
    ):
        with pytest.raises(BadPush, match="too large for this server's bandwidth budget"):
            await client.define(model(2_400 * KB))


def test_the_traffic_of_all_is_one_report() -> None:
    shares = BudgetShares(Options(shards=3, budget=90 * KB))
    shares.reported(1, BudgetUsed(0, 100, 1000, 50, 2, False))
    shares.reported(1, BudgetUsed(0, 10, 900, 40, 3, True))
    shares.reported(2, BudgetUsed(0, 5, 500, 0, 1, False))
    tick = BudgetTick(1.0, 7, 70, 80, 9, 1, False)
    assert shares.of_all(tick) == BudgetTick(1.0, 122, 1470, 1470, 49, 3, True)
    assert shares.of_all(tick) == BudgetTick(1.0, 7, 1470, 1470, 49, 3, True)
    shares.lost(1)
    shares.lost(2)
    assert shares.of_all(tick) == BudgetTick(1.0, 7, 70, 1470, 9, 1, False)


def test_a_follower_is_told_its_share() -> None:
    options = Options(shards=2, budget=160 * KB, worker_budget=64 * KB)
    shares = BudgetShares(options)
    assert first_share(options) == (155 * KB, 62 * KB)
    assert shares.order(1).message == PaceClients(0, 5 * KB, 2 * KB, {})
    layout = Layout([("w", "float32", (100,))])
    [pace, order] = shares.placed(Placement.even(layout, 2))
    assert pace == SetBudget(80 * KB, 32 * KB)
    assert order == shares.order(1)
    assert order.message == PaceClients(0, 80 * KB, 32 * KB, {})  # type: ignore[union-attr]
    assert not BudgetShares(Options(shards=2)).placed(Placement.even(layout, 2))


def test_an_engine_of_shards_takes_a_budget() -> None:
    algorithm = aiops.algorithms.find("fasgd").make({})
    assert Engine(algorithm, Options(shards=2, budget=100 * KB)).budget is not None
