"""Data sets under averaging: an example counts when a round that has its effect is taken by all.

Each worker adds 1 to a place of its own for each example, [worker, epoch, example]. Averages make
the numbers smaller, and never 0. So the models tell who did which example, and whether its effect
has survived.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import data, testing
from aiops.client import AsyncModelAverager, ModelAverager
from aiops.client.rounds import RoundsClient
from aiops.lab.torture.spawner import Forked, Spawner
from aiops.sim.virtual.network import HERE
from aiops.wire.fields import Examples
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


@pytest.mark.parametrize("voted", [False, True])
def test_a_worker_dies_between_its_round_and_its_vote(
    voted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its vote no other worker may take the mean over, which has the dead one's effects."""
    settle_round, votes = RoundsClient.settle_round, list[tuple[bool, bool]]()

    async def main() -> None:
        network, dead = testing.network(), asyncio.Event()

        async def cut(client: RoundsClient, number: int, whole: bool, seen: Examples) -> Any:
            if HERE.get() == "w1" and whole and seen and not dead.is_set():
                voting = asyncio.ensure_future(settle_round(client, number, whole, seen))
                if voted:
                    await asyncio.sleep(0.004)  # it has been sent, and not answered
                network.kill("w1")
                dead.set()
                voting.cancel()
                await asyncio.Event().wait()
            answer = await settle_round(client, number, whole, seen)
            if dead.is_set():
                votes.append((whole, answer.taken))
            return answer

        monkeypatch.setattr(RoundsClient, "settle_round", cut)
        async with aiops.serve(policy="average", set=AVERAGE) as running:
            tasks = []
            for number in range(3):
                with network.at(f"w{number}") as host:
                    host.latency = 0.003
                    tasks.append(asyncio.create_task(work(running.url, number)))
            await dead.wait()
            tasks.pop(1).cancel()
            models = await asyncio.gather(*tasks)
            assert votes[:2] == [(True, voted), (True, voted)]
            for params in models:
                check(params)
            [row] = running.engine.report()["data_sets"]
            assert row["returned"] > 0

    testing.run(main())


@testing.virtual()
async def test_a_worker_alone() -> None:
    async with aiops.serve(policy="average", set=AVERAGE) as running:
        check(await work(running.url, 0))
        [row] = running.engine.report()["data_sets"]
        assert (row["epoch"], row["returned"]) == (EPOCHS, 0)


@testing.virtual()
async def test_a_worker_that_was_away_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with aiops.serve(policy="average", set=AVERAGE) as running:
        network = testing.network()
        with network.at("w0"):
            away = asyncio.create_task(work(running.url, 0))
        with network.at("w1"):
            there = asyncio.create_task(work(running.url, 1))
        await asyncio.sleep(1.0)
        network.silence("w0")
        await testing.until(
            lambda: running.engine.report()["data_sets"][0]["returned"] > 0,
            "the other one was given its examples",
        )
        network.restore("w0")
        for params in await asyncio.gather(away, there):
            check(params)
    assert "this worker was away, and others were given its examples" in caplog.text


def train(url: str, number: int, folder: str, dies: bool) -> None:
    """Train in a process of its own, until all is seen.

    The first ones begin when all are there: what one has trained alone is lost with it.

    ``dies``: it is killed when the ring of its third round with examples is through, and the server
    has not heard of it.
    """
    params, settle_round, votes = places(), RoundsClient.settle_round, [0]

    async def die(client: RoundsClient, round: int, whole: bool, seen: Examples) -> Any:
        votes[0] += whole and bool(seen)
        if votes[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return await settle_round(client, round, whole, seen)

    if dies:
        RoundsClient.settle_round = die  # type: ignore[method-assign]
    with ModelAverager(url, params, timeout=PATIENCE) as averager:
        Path(folder, f"begun-{number}").touch()
        eventually(Path(folder, "all-there").exists, "the others are there")
        batches = data.batches(averager, np.arange(EXAMPLES), **settings())
        for batch in batches:
            with averager.step():
                time.sleep(0.03)
                params["seen"][number, batches.epoch, batch] += 1
        averager.average()
    np.save(Path(folder, str(number)), params["seen"])


def test_processes_that_are_killed(tmp_path: Path) -> None:
    """One between a round and its vote, one at any instant; both are replaced."""
    average = {"interval": 0.05, "grace": 0.2}
    with ServerThread(policy="average", set=average) as server, Spawner() as spawner:

        def start(number: int) -> Forked:
            orders = server.url, number, str(tmp_path), number == 0
            process = spawner.start(train, tmp_path / f"output-{number}", *orders)
            eventually((tmp_path / f"begun-{number}").exists, "it has the model")
            return process

        def seen() -> int:
            rows = server.call(lambda s: s.engine.report()["data_sets"])
            return sum(row["epoch"] * EXAMPLES + row["seen"] + row["seen_ahead"] for row in rows)

        def averaging() -> int:
            return int(server.call(lambda s: s.engine.report()["averages"]["averaging"]))

        running = {number: start(number) for number in range(3)}
        eventually(lambda: averaging() == 3, "all average")
        (tmp_path / "all-there").touch()
        assert running.pop(0).wait(PATIENCE) == -signal.SIGKILL
        running[3] = start(3)
        eventually(lambda: seen() >= 45, "some are seen")
        assert running[1].wait(0) is None
        running.pop(1).kill()
        running[4] = start(4)
        for process in running.values():
            assert process.wait(PATIENCE) == 0, process.text()
        assert seen() == EPOCHS * EXAMPLES
    # A worker that is late for the others' last round (on a loaded machine, by more than the grace)
    # ends without what that round has, so the models are looked at together.
    models = [np.load(tmp_path / f"{number}.npy") for number in running]
    check({"seen": sum(models)})
    assert all((seen > 0).any() for seen in models)
