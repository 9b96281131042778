"""The async model averager, in virtual time: the same averages, and nobody waits for a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.algorithms.average import Average
from aiops.bandwidth.units import parse_rate
from aiops.client import AsyncModelAverager
from aiops.engine.client_plan import ClientPlan
from aiops.engine.events import Options
from aiops.errors import BadPush, ConnectionLost, DeadlineExceeded, UsageError
from aiops.model.layout import Array
from tests.rows import each_row

ASKED: dict[str, Any] = {"interval": 1000.0, "grace": 100.0}
"""Nobody averages but when a test asks for it."""


def meeting_point(codec: str = "", budget: str | None = None, **settings: Any) -> Any:
    more = {"push_codec": [codec] if codec else [], "worker_budget": budget}
    return aiops.serve(policy="average", kernels="numpy", set={**ASKED, **settings}, **more)


def model(value: float, size: int = 5) -> dict[str, Array]:
    return {"w": np.full((size, 3), value, np.float32), "b": np.full(2, value)}


async def joined(
    stack: contextlib.AsyncExitStack, url: str, *params: dict[str, Array]
) -> list[AsyncModelAverager]:
    """Averagers that come one after the other, each on a host of its own."""
    found: list[AsyncModelAverager] = []
    for number, given in enumerate(params):
        with testing.network().at(f"worker-{number}"):
            averager = AsyncModelAverager(url, given)
            coming = asyncio.create_task(stack.enter_async_context(averager))
        await asyncio.sleep(0.5)
        await asyncio.gather(coming, *(other.average() for other in found))
        found.append(averager)
    return found


def run(main: Coroutine[Any, Any, None], **more: Any) -> None:
    testing.run(main, **more)


def test_all_get_the_mean_and_keep_the_sum() -> None:
    async def main() -> None:
        params = [model(0.0, 20_000) for _ in range(3)]
        async with meeting_point() as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            for index, averager in enumerate(averagers):
                async with averager.step():
                    for array in params[index].values():
                        array += 3 * index
            assert await asyncio.gather(*(one.average() for one in averagers)) == [3, 3, 3]
            for given in params:
                for array in given.values():
                    np.testing.assert_array_equal(array, 3.0)
            assert [one.steps for one in averagers] == [1, 1, 1]
            assert [one.stats.failed for one in averagers] == [0, 0, 0]
            sent = averagers[0].stats.traffic.bytes_out
            assert averagers[0].traffic[1] > sent > 4 / 3 * params[0]["w"].nbytes

    run(main())


def test_in_rings_of_two_the_models_come_together_and_their_sum_is_kept() -> None:
    async def main() -> None:
        params = [model(0.0) for _ in range(4)]
        async with meeting_point(group=2) as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            for index, given in enumerate(params):
                given["w"] += 4 * index
            for _ in range(12):
                assert await asyncio.gather(*(one.average() for one in averagers)) == [2] * 4
            for given in params:
                np.testing.assert_allclose(given["w"], 6.0, rtol=1e-3)
            assert [one.stats.failed for one in averagers] == [0] * 4

    run(main())


@pytest.mark.parametrize(("codec", "of_raw"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.255)])
def test_with_a_codec_the_sum_is_kept_and_fewer_bytes_are_sent(codec: str, of_raw: float) -> None:
    """A round of workers that have the same mean sends differences; others send values."""

    async def main() -> None:
        params = [{"w": np.zeros((20_000, 3), np.float32)} for _ in range(3)]
        rng = np.random.default_rng(0)
        async with meeting_point(codec) as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            for given in params:
                given["w"] += rng.normal(size=given["w"].shape).astype(np.float32)
            total = sum(given["w"].astype(np.float64) for given in params)
            sent = []
            for _ in range(6):
                before = averagers[0].stats.traffic.bytes_out
                assert await asyncio.gather(*(one.average() for one in averagers)) == [3, 3, 3]
                sent.append(averagers[0].stats.traffic.bytes_out - before)
                kept = sum(given["w"].astype(np.float64) for given in params)
                np.testing.assert_allclose(kept, total, atol=2e-5)
            raw = 4 / 3 * params[0]["w"].nbytes
            assert of_raw * raw < sent[-1] < of_raw * raw + 2500, "headers and hellos"
            for given in params:
                np.testing.assert_allclose(given["w"], total / 3, atol=2e-6)

    run(main())


def test_a_round_with_a_worker_that_missed_one_sends_values_again() -> None:
    async def main() -> None:
        params = [model(0.0, 4000) for _ in range(3)]
        async with meeting_point("int8", grace=0.2) as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            sent = []
            for there in (averagers, averagers[:2], averagers, averagers):
                params[0]["w"] += 3
                before = averagers[0].stats.traffic.bytes_out
                first = asyncio.create_task(there[-1].average())
                await asyncio.sleep(0.1)  # it is ready, and the others are waited for
                await asyncio.gather(first, *(one.average() for one in there[:-1]))
                sent.append(averagers[0].stats.traffic.bytes_out - before)
            assert [one.stats.failed for one in averagers] == [0] * 3
            assert sent[2] > 3 * sent[3]

    run(main())


@pytest.mark.parametrize(
    ("codec", "budget", "chosen", "rounds"),
    [("", "40KB/s", "", 15), ("", "10KB/s", "int8", 15), ("raw", "10KB/s", "", 6)],
)
def test_under_a_budget_the_codec_that_it_needs(
    codec: str, budget: str, chosen: str, rounds: int
) -> None:
    """With 16 KB there and back in a round; without a codec rounds are further apart."""

    async def main() -> None:
        point = meeting_point(codec, budget, interval=1.0, grace=0.2)
        params = [model(0.0, 1333) for _ in range(2)]
        async with point as server, contextlib.AsyncExitStack() as stack:
            coming = []
            for number, given in enumerate(params):
                with testing.network().at(f"worker-{number}"):
                    averager = AsyncModelAverager(server.url, given)
                    coming.append(asyncio.create_task(stack.enter_async_context(averager)))
            averagers = await asyncio.gather(*coming)
            await asyncio.sleep(20.0)
            assert [one.stats.codec for one in averagers] == [chosen] * 2
            assert rounds <= averagers[0].stats.rounds <= rounds * 1.5
            crossed = averagers[0].stats.traffic
            spent = crossed.bytes_in + crossed.bytes_out
            assert spent < 20.0 * parse_rate("", budget) + 34_000, "the budget and one round"

    run(main())


@each_row("specs", [["topk:0.1"], ["int8@w*"], ["int8", "fp16"]])
def test_a_codec_that_no_ring_can_use(specs: list[str]) -> None:
    with pytest.raises(UsageError, match="bf16, fp16, int8"):
        ClientPlan(Average(), Options(push_codec=tuple(specs)))


def test_who_comes_later_begins_with_the_others_model() -> None:
    async def main() -> None:
        late = model(9.0)
        async with meeting_point() as server, contextlib.AsyncExitStack() as stack:
            await joined(stack, server.url, model(1.0), late)
            np.testing.assert_array_equal(late["w"], 1.0)

    run(main())


def test_training_goes_on_during_an_average() -> None:
    """The lock is not held across a wait, and what is learnt meanwhile stays on top."""

    async def main() -> None:
        params = [model(0.0, 4000), model(0.0, 4000)]
        line = testing.SimulatedLink(
            20_000.0
        )  # bytes per second: the average takes a second or more
        testing.network().add(testing.Host("worker-1", (line,), (line,)))
        async with meeting_point() as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            params[1]["w"] += 2
            both = asyncio.gather(*(one.average() for one in averagers))
            await asyncio.sleep(0.1)  # it is under way
            async with averagers[0].step():
                params[0]["w"] += 10
            assert not both.done()
            assert await both == [2, 2]
            np.testing.assert_array_equal(params[0]["w"], 11.0)
            np.testing.assert_array_equal(params[1]["w"], 1.0)

    run(main())


def test_averages_come_at_the_interval_and_a_straggler_holds_nobody_up() -> None:
    async def main() -> None:
        params = [model(float(n)) for n in range(3)]
        settings = {"interval": 1.0, "grace": 0.2}
        async with meeting_point(**settings) as server, contextlib.AsyncExitStack() as stack:
            averagers = [AsyncModelAverager(server.url, given) for given in params]
            await asyncio.gather(*(stack.enter_async_context(one) for one in averagers))
            began = asyncio.get_running_loop().time()

            async def train(averager: AsyncModelAverager, seconds: float) -> float:
                idle, loop = 0.0, asyncio.get_running_loop()
                while loop.time() < began + 30:
                    asked = loop.time()
                    async with averager.step():
                        idle += loop.time() - asked
                        await asyncio.sleep(seconds)
                return idle

            idle = await asyncio.gather(*map(train, averagers, (0.1, 0.1, 5.0)))
            assert [one.steps for one in averagers][2] == 6
            assert min(one.steps for one in averagers[:2]) > 250
            assert max(idle[:2]) < 1
            assert averagers[0].stats.rounds > 15

    run(main())


def test_warming_up_every_step_ends_with_an_average() -> None:
    async def main() -> None:
        params = [model(0.0), model(0.0)]
        async with meeting_point(warmup=2) as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            for _step in range(2):

                async def step(number: int) -> None:
                    async with averagers[number].step():
                        params[number]["w"] += 1 + number

                await asyncio.gather(step(0), step(1))
            np.testing.assert_array_equal(params[0]["w"], 3.0)
            np.testing.assert_array_equal(params[1]["w"], 3.0)

    run(main())


def test_who_dies_in_the_midst_costs_a_round() -> None:
    async def main() -> None:
        params = [model(0.0, 100_000) for _ in range(3)]
        line = testing.SimulatedLink(1e6)
        testing.network().add(testing.Host("worker-2", (line,), (line,)))
        async with meeting_point(stall=2.0) as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            all_ = asyncio.gather(*(one.average() for one in averagers), return_exceptions=True)
            await asyncio.sleep(0.2)
            testing.network().kill("worker-2")
            assert (await all_)[:2] == [0, 0]
            assert isinstance(averagers[0].stats.last_error, ConnectionLost | DeadlineExceeded)
            assert await asyncio.gather(*(one.average() for one in averagers[:2])) == [2, 2]
            averagers[2]._averaging.cancel()  # type: ignore[union-attr]

    run(main())


def test_abort_and_resume() -> None:
    async def main() -> None:
        params = [model(0.0), model(0.0)]
        settings = {"interval": 0.5, "grace": 0.5}
        async with meeting_point(**settings) as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, *params)
            for one in averagers:
                await one.abort()
            params[1]["w"] += 2
            await asyncio.sleep(10)
            np.testing.assert_array_equal(params[0]["w"], 0.0)
            for one in averagers:
                await one.resume()
            await asyncio.sleep(2)
            np.testing.assert_array_equal(params[0]["w"], 1.0)

    run(main())


def test_what_cannot_be() -> None:
    async def main() -> None:
        async with meeting_point() as server:
            averager = AsyncModelAverager(server.url, model(0.0))
            with pytest.raises(UsageError, match=r"average\(\) needs a connection"):
                await averager.average()
            async with averager:
                assert repr(averager).startswith("<AsyncModelAverager at aiops://")
                async with averager.step():
                    for waits in (averager.average, averager.abort, averager.resume):
                        with pytest.raises(UsageError, match="leave it first"):
                            await waits()
                    with pytest.raises(UsageError, match="leave it first"):
                        async with averager.step():
                            pass
            with pytest.raises(UsageError, match="closed"):
                await averager.average()
            await averager.close()
            with pytest.raises(UsageError, match="closed"):
                await averager.connect()

    run(main())


def test_another_policy_averages_nothing() -> None:
    async def main() -> None:
        async with aiops.serve(policy="asgd", kernels="numpy") as server:
            with pytest.raises(UsageError, match="averages no models"):
                async with AsyncModelAverager(server.url, model(0.0)):
                    pass

    run(main())


def test_a_model_that_diverged_is_not_averaged() -> None:
    async def main() -> None:
        params = model(0.0)
        async with meeting_point() as server, AsyncModelAverager(server.url, params) as averager:
            async with averager.step():
                params["w"][0] = np.nan
            with pytest.raises(BadPush, match="'w' holds a value that is not finite"):
                await averager.average()
            with pytest.raises(BadPush, match="not finite"):
                async with averager.step():
                    pass

    run(main())


def test_an_average_that_is_not_over_in_time() -> None:
    async def main() -> None:
        async with meeting_point() as server, contextlib.AsyncExitStack() as stack:
            averagers = await joined(stack, server.url, model(0.0), model(0.0))
            averagers[0].timeout = 1.0  # the other one is not ready for another hundred seconds
            with pytest.raises(DeadlineExceeded, match="the average was not over in 1 s"):
                await averagers[0].average()

    run(main())


def test_over_real_sockets() -> None:
    """Without a virtual environment it uses the machine's sockets."""

    async def main() -> None:
        params = [model(0.0), model(0.0)]
        settings = {"interval": 0.05, "grace": 5.0}
        async with meeting_point(**settings) as server, contextlib.AsyncExitStack() as stack:
            averagers = [AsyncModelAverager(server.url, given) for given in params]
            await asyncio.gather(*(stack.enter_async_context(one) for one in averagers))
            params[1]["w"] += 2
            assert await asyncio.gather(*(one.average() for one in averagers)) == [2, 2]
            for given in params:
                np.testing.assert_array_equal(given["w"], 1.0)

    asyncio.run(asyncio.wait_for(main(), 30))
