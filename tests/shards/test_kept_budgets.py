"""``--bandwidth-budget`` and ``--state`` with ``--shards``: servers crash, and keep the budget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import aiops
from aiops import testing
from aiops.durable.commit_gate import Acks
from aiops.engine.events import BudgetTick, SetBudget
from aiops.sim.virtual.server_machine import ServerMachine
from tests.seeds import seeds
from tests.shards.kept_world import Actor, KeptHost, KeptWorld
from tests.shards.test_budgets import KB, Crossed, model
from tests.shards.test_orders_of_events import SINGLE, Checker, final

SETTINGS: dict[str, Any] = {
    "policy": "fasgd",
    "kernels": "numpy",
    "lr": 0.01,
    "state": Path("state"),
    "snapshot_every": 0.5,
    "shard_bytes": 1,
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def machines(acks: str, **budgets: str) -> list[ServerMachine]:
    """A lead, which has the budgets, and two followers."""
    given, ports = {**SETTINGS, "acks": acks}, (7181, 7182)
    followers = [ServerMachine(f"f-{port}", port=port, follower=True, **given) for port in ports]
    named = [f"{each.host}:{each.port}" for each in followers]
    return [ServerMachine(followers=named, **given, **budgets), *followers]


def rates(servers: list[ServerMachine]) -> list[int]:
    """Return the bytes per second that each server keeps to."""
    found = []
    for machine in servers:
        pacing = machine.server.connections.pacing
        assert pacing is not None
        total = pacing.pacer.budget.total
        assert total is not None
        found.append(total.rate)
    return found


async def train(url: str, nbytes: int, until: float) -> int:
    """Train until that time; return the number of steps."""
    made = 0
    async with aiops.AsyncWorker(url, model(nbytes)) as worker:
        while asyncio.get_running_loop().time() < until:
            await worker.step(model(nbytes, 0.1))
            await asyncio.sleep(0.02)
            made += 1
    return made


@pytest.mark.parametrize(("acks", "power"), [("written", False), ("durable", True)])
def test_servers_that_crash_keep_the_budget(
    acks: str, power: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower, the lead, and all of them come back at once: no second sees more bytes.

    Each has the share that it had, and the lead chooses gates by the use of all, as before.
    """
    crossed = Crossed(monkeypatch)

    @testing.virtual()
    async def main() -> None:
        servers = machines(acks, bandwidth_budget="300KB/s")
        lead = servers[0]
        for machine in reversed(servers):
            await machine.start()
        workers = [asyncio.ensure_future(train(lead.url, 30 * KB, 12.0)) for _ in range(3)]
        await asyncio.sleep(2.0)  # gates begin to close
        for ended in ([servers[1]], [lead], servers):
            await asyncio.sleep(2.0)
            before, engine = rates(servers), lead.server.engine
            assert sum(before) == 300 * KB
            assert engine.budget is not None
            assert engine.budget.depth > 0
            for machine in ended:
                machine.cut_power() if power else machine.crash()
            await asyncio.gather(*(machine.start() for machine in ended))
            now = lead.server.engine
            assert (now is engine) == (lead not in ended)
            assert now.budget is not None
            assert now.budget.depth == engine.budget.depth
            await asyncio.sleep(1.0)
            assert rates(servers) == before
            used = now.report()["budget"]["used"]
            assert used > max(before), "the lead is told of its followers' bytes"
        assert min(await asyncio.gather(*workers)) > 2
        for machine in servers:
            await machine.stop()

    main()
    assert 250 * KB < crossed.busiest() <= 300 * KB


@pytest.mark.parametrize("shards", [1, 3])
def test_a_worker_that_comes_back_keeps_its_budget(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that were started again do not know what it moved just before."""
    crossed = Crossed(monkeypatch)

    @testing.virtual()
    async def main() -> None:
        if shards == 1:
            servers = [ServerMachine(**SETTINGS, worker_budget="300KB/s")]
        else:
            servers = machines("written", worker_budget="300KB/s")
        for machine in reversed(servers):
            await machine.start()
        worker = asyncio.ensure_future(train(servers[0].url, 30 * KB, 6.0))
        for ended in ([servers[-1]], servers):
            await asyncio.sleep(2.0)
            for machine in ended:
                machine.crash()
            await asyncio.gather(*(machine.start() for machine in ended))
        assert await worker > 5
        for machine in servers:
            await machine.stop()

    main()
    assert 250 * KB < crossed.busiest() <= 300 * KB


class BudgetedHost(KeptHost):
    """A server's shell with a budget: now and then it reports its use."""

    share: SetBudget | None = None

    def perform(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            if isinstance(effect, SetBudget):
                self.share = effect
            else:
                super().perform([effect])

    def restart(self, *args: Any, **named: Any) -> None:
        self.share = None
        super().restart(*args, **named)


class BudgetedWorld(KeptWorld):
    """A kept world whose servers report the use of a budget, in any order with all else."""

    ticks = 0.1  # how likely a step is a report

    def host(self, coordinator: Any) -> BudgetedHost:
        return BudgetedHost(self, coordinator)

    def step(self) -> bool:
        if self.random.random() >= self.ticks:
            return super().step()
        self.now += 0.1
        nbytes = self.random.randrange(80 * KB)
        counts = nbytes, 9 * nbytes, 9 * nbytes, nbytes, self.random.randrange(4), True
        self.random.choice(self.hosts).post(BudgetTick(self.now, *counts))
        return True


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
def test_killed_at_any_step(seed: int, acks: Acks) -> None:
    """Each server has its share at the end, and the gates' constants are those of before."""
    given = {"workers": 3, "budget": 300 * KB, "worker_budget": 150 * KB}
    world = BudgetedWorld(seed, 3, "fasgd", {"lr": 0.01}, acks, **given)
    checkers = [Checker(2.0**n, 6, SINGLE) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(checkers)]
    world.kills, world.dues = 0.003, 0.01
    world.run()
    world.kills = world.dues = world.ticks = 0
    final(world, SINGLE)
    before = world.engine.budget
    assert before is not None
    assert before.depth > 0
    world.kill(range(3))
    final(world, SINGLE)
    after = world.engine.budget
    assert after is not None
    assert after is not before
    names = "depth", "time", "averages", "limited", "last"
    assert [after.state()[name] for name in names] == [before.state()[name] for name in names]
    shares = [host.share for host in world.hosts]  # type: ignore[attr-defined]
    assert sum(share.total for share in shares) == 300 * KB
    assert sum(share.each for share in shares) == 150 * KB
    assert min(share.total for share in shares) > 90 * KB, "each has a third of the model"
    assert world.killed > 3
