"""Data sets under averaging: an example counts when a round that has its effect is taken by all.

Each worker adds 1 to a place of its own for each example, [worker, epoch, example]. Averages make
the numbers smaller, and never 0. So the models tell who did which example, and whether its effect
has survived.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import data, testing
from aiops.client import AsyncModelAverager, ModelAverager
from aiops.lab.torture.spawner import Forked, Spawner
from tests.peers import eventually
from tests.support import PATIENCE, ServerThread

EXAMPLES, EPOCHS, WORKERS = 60, 2, 6
AVERAGE = {"interval": 0.2, "grace": 0.3}


def places() -> dict[str, Any]:
    return {"seen": np.zeros((WORKERS, EPOCHS, EXAMPLES), np.float32)}


def settings(**changes: Any) -> dict[str, Any]:
    return {"batch_size": 3, "epochs": EPOCHS, "task_size": 9, **changes}


def check(params: dict[str, Any]) -> None:
    """Check that of each example of each epoch the effect of exactly one worker is there."""
    by = (params["seen"] > 0).sum(axis=0)
    assert (by == 1).all(), f"{(by == 0).sum()} are missing, {(by > 1).sum()} are there twice"


async def work(url: str, number: int, pause: float = 0.1) -> dict[str, Any]:
    params = places()
    async with AsyncModelAverager(url, params) as averager:
        batches = data.batches(averager, np.arange(EXAMPLES), **settings())
        async for batch in batches:
            await asyncio.sleep(pause)
            async with averager.step():
                params["seen"][number, batches.epoch, batch] += 1
        assert not averager.info.tasks_in_hand
        await averager.average()
    return params


@pytest.mark.parametrize("seconds", [0.35, 1.05, 1.7, 2.45])
@pytest.mark.parametrize("group", [0, 2])
def test_each_example_once_though_a_worker_dies(seconds: float, group: int) -> None:
    async def main() -> None:
        async with aiops.serve(policy="average", set={**AVERAGE, "group": group}) as running:
            network, tasks = testing.network(), []
            for number in range(3):
                with network.at(f"w{number}"):
                    tasks.append(
                        asyncio.create_task(work(running.url, number, 0.07 + 0.03 * number))
                    )
            await asyncio.sleep(seconds)
            network.kill("w1")
            tasks.pop(1).cancel()
            with network.at("w3"):
                tasks.append(asyncio.create_task(work(running.url, 3)))
            models = await asyncio.gather(*tasks)
            [row] = running.engine.report()["data_sets"]
            assert (row["epoch"], row["tasks_under_way"]) == (EPOCHS, 0)
            if not group:
                for params in models[:2]:
                    check(params)
            check({"seen": sum(params["seen"] for params in models)})

    testing.run(main())


@testing.virtual()
async def test_a_worker_alone() -> None:
    async with aiops.serve(policy="average", set=AVERAGE) as running:
        check(await work(running.url, 0))
        [row] = running.engine.report()["data_sets"]
        assert (row["epoch"], row["returned"]) == (EPOCHS, 0)


@testing.virtual()
async def test_a_worker_that_was_away_begins_anew() -> None:
    async with aiops.serve(policy="average", set=AVERAGE) as running:
        network = testing.network()
        with network.at("w0"):
            away = asyncio.create_task(work(running.url, 0))
        with network.at("w1"):
            there = asyncio.create_task(work(running.url, 1))
        await asyncio.sleep(1.0)
        network.silence("w0")
        await asyncio.sleep(40.0)
        network.restore("w0")
        for params in await asyncio.gather(away, there):
            check(params)


def train(url: str, number: int, folder: str) -> None:
    """Train in a process of its own, until all is seen."""
    params = places()
    with ModelAverager(url, params, timeout=PATIENCE) as averager:
        Path(folder, f"begun-{number}").touch()
        batches = data.batches(averager, np.arange(EXAMPLES), **settings())
        for batch in batches:
            with averager.step():
                time.sleep(0.03)
                params["seen"][number, batches.epoch, batch] += 1
        averager.average()
    np.save(Path(folder, str(number)), params["seen"])


def test_processes_that_are_killed(tmp_path: Path) -> None:
    average = {"interval": 0.05, "grace": 0.2}
    with ServerThread(policy="average", set=average) as server, Spawner() as spawner:

        def start(number: int) -> Forked:
            orders = server.url, number, str(tmp_path)
            process = spawner.start(train, tmp_path / f"output-{number}", *orders)
            eventually((tmp_path / f"begun-{number}").exists, "it has the model")
            return process

        def seen() -> int:
            rows = server.call(lambda s: s.engine.report()["data_sets"])
            return sum(row["epoch"] * EXAMPLES + row["seen"] + row["seen_ahead"] for row in rows)

        running = {number: start(number) for number in range(3)}
        for victim, mark in ((0, 15), (1, 45)):
            eventually(lambda mark=mark: seen() >= mark, "some are seen")  # type: ignore[misc]
            assert running[victim].wait(0) is None
            running.pop(victim).kill()
            running[victim + 3] = start(victim + 3)
        for process in running.values():
            assert process.wait(PATIENCE) == 0, process.text()
        assert seen() == EPOCHS * EXAMPLES
    for number in running:
        check({"seen": np.load(tmp_path / f"{number}.npy")})
