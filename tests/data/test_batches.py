"""Batches of a data set that workers share, in virtual time: each example once an epoch."""

from __future__ import annotations

import asyncio
import gc
import io
import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import aiops
from aiops import data, testing
from aiops.cli.stats import tables
from aiops.engine.data_sets import GRACE
from aiops.errors import BadPush, UsageError
from aiops.testing import ServerMachine
from tests.rows import each_row
from tests.support import ServerThread

MODEL = {"w": np.zeros(3, np.float32)}
EXAMPLES, EPOCHS = 60, 3


def gradient(params: Any) -> dict[str, Any]:
    return {"w": np.ones(3, np.float32)}


def settings(**changes: Any) -> dict[str, Any]:
    return {"batch_size": 4, "epochs": EPOCHS, "task_size": 12, **changes}


class Seen(Counter[tuple[int, int]]):
    """The examples whose gradients were used, by epoch."""

    def note(self, epoch: int, batch: Any) -> None:
        self.update((epoch, int(example)) for example in batch)

    def check(self, epochs: int = EPOCHS) -> None:
        assert self == Counter((e, x) for e in range(epochs) for x in range(EXAMPLES))


async def work(url: str, seen: Seen, pause: float = 0.1, **changes: Any) -> None:
    async with aiops.AsyncWorker(url, MODEL) as worker:
        batches = data.batches(worker, np.arange(EXAMPLES), **settings(**changes))
        async for batch in batches:
            epoch = batches.epoch
            await asyncio.sleep(pause)
            if (await worker.step(gradient)).used:
                seen.note(epoch, batch)


async def some(seen: Seen, steps: int, **server: Any) -> None:
    """Have workers of different speeds share the data, and end one in the middle of a step."""
    async with aiops.serve(**server) as running:
        network, tasks = testing.network(), []
        for number in range(3):
            with network.at(f"w{number}"):
                tasks.append(asyncio.create_task(work(running.url, seen, 0.1 * (1 + number))))
        await asyncio.sleep(0.1 * steps)
        network.kill("w1")
        tasks.pop(1).cancel()
        await asyncio.gather(*tasks)
        [row] = running.engine.report()["data_sets"]
        assert (row["epoch"], row["tasks_under_way"]) == (EPOCHS, 0)


POLICIES: dict[str, dict[str, Any]] = {
    "asgd": {},
    "fasgd": {},
    "hardsync": {"workers": 3},
    "rennala": {},
    "ssp": {},
    "dcasgd": {},
}
"""Policies under which each gradient is pushed by itself, so that its receipt is about it."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [1, 9, 30])
def test_each_example_is_used_once_an_epoch_though_a_worker_dies(policy: str, steps: int) -> None:
    seen = Seen()
    testing.run(some(seen, steps, policy=policy, **POLICIES[policy]))
    lost = Counter((e, x) for e in range(EPOCHS) for x in range(EXAMPLES)) - seen
    # The worker that died may have been told nothing of its last push, which was used all the same.
    assert len(lost) <= 4
    assert set(seen.values()) == {1}


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("downpour", {}),
        ("easgd", {"workers": 3}),
        ("diloco", {"workers": 3}),
        ("fasgd", {"gate": "bfasgd:c_push=0.1,c_fetch=0.1"}),
        ("asgd", {"gate": "periodic:k_push=3,k_fetch=2"}),
    ],
)
def test_policies_that_push_less_come_to_an_end(policy: str, more: dict[str, Any]) -> None:
    testing.run(some(Seen(), 9, policy=policy, **more))


@testing.virtual()
async def test_a_worker_comes_and_one_leaves() -> None:
    seen = Seen()
    async with aiops.serve(policy="asgd") as server:

        async def leaving() -> None:
            async with aiops.AsyncWorker(server.url, MODEL) as worker:
                batches = data.batches(worker, np.arange(EXAMPLES), **settings())
                async for batch in batches:
                    epoch = batches.epoch
                    await asyncio.sleep(0.1)
                    if sum(seen.values()) > 40:
                        break  # this one was not pushed
                    await worker.step(gradient)
                    seen.note(epoch, batch)
                await asyncio.sleep(60)

        first = asyncio.create_task(leaving())
        await asyncio.sleep(1)
        await work(server.url, seen)
        assert asyncio.get_running_loop().time() < 15, "what was given back was not waited for"
        await first
    seen.check()


@testing.virtual()
async def test_a_worker_that_was_away_for_long_does_not_apply_what_others_have() -> None:
    seen = Seen()
    async with aiops.serve(policy="asgd") as server:
        network = testing.network()
        with network.at("far"):
            far = asyncio.create_task(work(server.url, seen))
        await asyncio.sleep(0.55)
        network.silence("far")
        await work(server.url, seen)
        assert asyncio.get_running_loop().time() > GRACE
        network.restore("far")
        await far
    seen.check()


@testing.virtual()
async def test_a_connection_that_breaks_at_any_byte() -> None:
    for nbytes in range(0, 1500, 37):
        seen = Seen()
        async with aiops.serve(policy="asgd") as server:
            network, name = testing.network(), f"alice{nbytes}"
            with network.at(name):
                network.after(name, "up", nbytes, partial(network.cut, name))
                await work(server.url, seen, 0.01)
        seen.check()


@testing.virtual()
async def test_a_run_goes_on_where_it_was() -> None:
    machine = ServerMachine(policy="asgd", state="state", acks="durable", seed=1)
    await machine.start()
    seen = Seen()
    await work(machine.url, seen, epochs=2)
    await machine.stop()
    await machine.start()
    await work(machine.url, seen, epochs=EPOCHS)
    await machine.stop()
    seen.check()


@testing.virtual()
async def test_a_run_that_goes_on_with_other_data_is_refused() -> None:
    machine = ServerMachine(policy="asgd", state="state", acks="durable", seed=1)
    await machine.start()
    await work(machine.url, Seen(), epochs=2)
    await machine.stop()
    await machine.start()
    told = (
        r"'data' has examples=60, and this worker says examples=61, .*; 2 epochs of it are complete"
        r" and 0 examples of the next are seen\. .* needs another name, which begins with epoch 0"
    )
    async with aiops.AsyncWorker(machine.url, MODEL) as worker:
        with pytest.raises(BadPush, match=told):
            await anext(aiter(data.batches(worker, np.arange(61), **settings())))
        again = data.batches(worker, np.arange(61), **settings(name="data-2"))
        assert len(await anext(aiter(again))) == 4
        assert (again.epoch, worker.version) == (0, 30)
    await machine.stop()


@pytest.mark.parametrize("seed", range(6))
def test_each_example_is_used_once_though_the_server_crashes(seed: int) -> None:
    async def main() -> None:
        machine = ServerMachine(
            policy="asgd", state="state", acks="durable", snapshot_every=0.5, seed=seed
        )
        await machine.start()
        seen = Seen()
        workers = [asyncio.create_task(work(machine.url, seen, 0.05 + 0.01 * n)) for n in range(2)]
        for point in ("journal.torn", "journal.synced", "snapshot.written"):
            machine.crash_at(point, 2 + seed, power=True)
            await testing.until(
                lambda: not machine.running or all(task.done() for task in workers), "it crashed"
            )
            if not machine.running:
                await machine.start()
        await asyncio.gather(*workers)
        await machine.stop()
        seen.check()

    testing.run(main(), seed=seed)


@testing.virtual()
async def test_a_server_without_a_state_comes_back() -> None:
    machine = ServerMachine(policy="asgd", seed=0)
    await machine.start()
    seen = Seen()
    task = asyncio.create_task(work(machine.url, seen, 0.1))
    await testing.until(lambda: seen[1, 5] > 0, "it is in the second epoch")
    machine.crash()
    await machine.start()
    await task
    await machine.stop()
    assert {x for e, x in seen if e == 2} == set(range(EXAMPLES))
    assert max(count for (e, _x), count in seen.items() if e in (0, 2)) == 1
    assert max(count for (e, _x), count in seen.items() if e == 1) == 2


@testing.virtual()
async def test_a_mini_batch_without_a_step_counts_with_the_next_push() -> None:
    async with aiops.serve(policy="asgd") as server:
        async with aiops.AsyncWorker(server.url, MODEL) as worker:
            taken = 0
            async for _batch in data.batches(worker, np.arange(EXAMPLES), **settings()):
                taken += 1
                if taken % 2:
                    await worker.step(gradient)
        [row] = server.engine.report()["data_sets"]
    assert (taken, row["epoch"], row["returned"]) == (EXAMPLES * EPOCHS // 4, EPOCHS, 0)


@testing.virtual()
async def test_a_step_that_fails_leaves_its_examples_to_the_next() -> None:
    async with aiops.serve(policy="asgd") as server:
        async with aiops.AsyncWorker(server.url, MODEL) as worker:
            taken = 0
            async for _batch in data.batches(worker, np.arange(EXAMPLES), **settings()):
                taken += 1
                bad = {"w": np.full(3, np.nan, np.float32)}
                if taken == 3:
                    with pytest.raises(BadPush):
                        await worker.step(bad)
                else:
                    await worker.step(gradient)
        [row] = server.engine.report()["data_sets"]
    assert (taken, row["epoch"], row["returned"]) == (EXAMPLES * EPOCHS // 4, EPOCHS, 0)


def test_the_blocking_face() -> None:
    seen = Seen()
    with ServerThread(policy="asgd") as server:
        with aiops.Worker(server.url, MODEL) as worker:
            batches = data.batches(worker, np.arange(EXAMPLES), **settings())
            for batch in batches:
                epoch = batches.epoch
                assert worker.step(gradient(worker.params)).used
                seen.note(epoch, batch)
                if sum(seen.values()) > 30:
                    break
        with aiops.Worker(server.url, MODEL) as worker:
            batches = data.batches(worker, np.arange(EXAMPLES), **settings())
            for batch in batches:
                epoch = batches.epoch
                worker.step(gradient(worker.params))
                seen.note(epoch, batch)
            console = Console(record=True, width=200, file=io.StringIO())
            console.print(tables(server.url, worker.stats()))
            assert re.search(r"data +60 +3 +0 +0 +60 +0 +\d+ +0", console.export_text())
            with pytest.raises(BadPush, match="says examples=7"):
                next(iter(data.batches(worker, np.arange(7), **settings())))
            with pytest.raises(UsageError, match="async for"):
                next(iter(data.batches(aiops.AsyncWorker(server.url, MODEL), MODEL, batch_size=1)))
    seen.check()


@each_row(
    ("changes", "words"),
    [
        *(
            ({name: number}, f"{name} must be a whole number from 1 to 2**53 - 1, not {number!r}")
            for name in ("batch_size", "task_size", "epochs")
            for number in (0, 10.0, 2.5, "a", True, 2**53)
        ),
        ({"batch_size": None}, "batch_size must be a whole number from 1 to"),
        ({"seed": 0.5}, "the seed must be a whole number from 0 to"),
        ({"shuffle": "a"}, "shuffle, where it is not True or False, must be a whole number"),
        ({"shuffle": 2.5}, "shuffle, where it is not True or False, must be a whole number"),
        ({"shuffle": -1}, "shuffle, where it is not True or False, must be a whole number"),
        ({"name": ""}, "name must be a text of 1 to 256 characters, not ''"),
        ({"name": "a" * 257}, "name must be a text of 1 to 256 characters"),
        ({"name": 3}, "name must be a text of 1 to 256 characters, not 3"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(changes: dict[str, Any], words: str) -> None:
    worker = aiops.AsyncWorker("aiops://127.0.0.1:1", MODEL)
    with pytest.raises(UsageError, match=re.escape(words)):
        data.batches(worker, np.arange(7), **settings(**changes))


@testing.virtual()
async def test_numbers_of_numpy_will_do() -> None:
    given = {name: np.int64(number) for name, number in settings(shuffle=4, seed=2).items()}
    seen = Seen()
    async with aiops.serve(policy="asgd") as server:
        await work(server.url, seen, name=np.str_("data"), **given)
        await work(server.url, seen, shuffle=np.True_, name="another")
    assert set(seen.values()) == {2}


def test_one_loop_at_a_time() -> None:
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        shared = [data.batches(worker, np.arange(EXAMPLES), **settings()) for _ in range(2)]
        first = iter(shared[0])
        next(first)
        for again in shared:
            with pytest.raises(UsageError, match="in a loop over the data set 'data' already"):
                next(iter(again))
        next(iter(data.batches(worker, np.arange(9), batch_size=1, name="another")))
        next(first)  # it goes on
        first.close()  # type: ignore[attr-defined]
        second = iter(shared[1])
        next(second)
        cycle: list[Any] = [second]
        cycle.append(cycle)
        del second, cycle
        gc.disable()
        try:
            next(iter(shared[0]))  # the garbage is collected first
        finally:
            gc.enable()
        for _batch in shared[1]:
            assert worker.step(gradient(worker.params)).used
        assert shared[1].over
        assert [*shared[0]] == []


@each_row("same", [False, True])
@testing.virtual()
async def test_one_loop_at_a_time_that_awaits(same: bool) -> None:
    seen = Seen()
    async with (
        aiops.serve(policy="asgd") as server,
        aiops.AsyncWorker(server.url, MODEL) as worker,
    ):
        first = data.batches(worker, np.arange(EXAMPLES), **settings())
        second = first if same else data.batches(worker, np.arange(EXAMPLES), **settings())
        going = aiter(first)
        seen.note(0, await anext(going))
        assert (await worker.step(gradient)).used
        with pytest.raises(UsageError, match="in a loop over the data set 'data' already"):
            await anext(aiter(second))
        await going.aclose()  # type: ignore[attr-defined]
        async for batch in first:
            seen.note(0, batch)
            assert (await worker.step(gradient)).used
            break
        async for batch in second:  # asyncio has yet to close the iterator of the first
            await asyncio.sleep(0.1)  # now it does
            seen.note(second.epoch, batch)
            assert (await worker.step(gradient)).used
    seen.check()


def test_what_is_no_worker() -> None:
    with pytest.raises(UsageError, match="not str"):
        data.batches("worker", np.arange(7), batch_size=1)  # type: ignore[arg-type]


@testing.virtual()
async def test_a_model_on_several_servers() -> None:
    """Each example adds 1 to its place; a push for the examples of another adds nothing."""
    model = {"w": np.zeros(EXAMPLES, np.float32)}
    async with aiops.serve(
        policy="asgd", shards=3, shard_bytes=1, set={"lr": 1}, kernels="numpy"
    ) as server:

        async def train(strange: bool) -> None:
            async with aiops.AsyncWorker(server.url, model) as worker:
                async for batch in data.batches(worker, np.arange(EXAMPLES), **settings()):
                    await asyncio.sleep(0.1)
                    ones = np.zeros(EXAMPLES, np.float32)
                    ones[batch] = -1
                    assert (await worker.step({"w": ones})).used
                    if strange:
                        worker.info.note_examples(1, 0, 4)  # seen already, or another's
                        assert not (await worker.step({"w": ones})).used

        await asyncio.gather(train(False), train(True))
        async with aiops.AsyncClient(server.url) as client:
            assert ((await client.fetch())["w"] == EPOCHS).all()
