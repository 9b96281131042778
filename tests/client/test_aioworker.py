"""The async worker: a training loop against a server in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import pytest
import uvloop

import aiops
from aiops import testing
from aiops.client import AsyncClient, AsyncWorker, Params
from aiops.client.asyncio.worker import _TaskTransfer
from aiops.errors import (
    BadPush,
    ConnectionLost,
    DeadlineExceeded,
    Unavailable,
    UsageError,
)
from aiops.model.layout import Array
from aiops.serving.server import Server
from tests.client.test_dlpack import Tensor
from tests.rows import each_row
from tests.support import PATIENCE
from tests.test_rooms import MODULES, imports

START: dict[str, Array] = {"w": np.zeros(8, np.float32), "b": np.full(3, 4, np.float64)}


def ones(params: Mapping[str, Array], times: float = 1) -> dict[str, Array]:
    return {name: np.full_like(array, times) for name, array in params.items()}


def serve(
    policy: str = "asgd",
    workers: int = 1,
    port: int = 0,
    failure_timeout: float = 5.0,
    **settings: Any,
) -> contextlib.AbstractAsyncContextManager[Server]:
    return aiops.serve(
        policy=policy,
        workers=workers,
        port=port,
        failure_timeout=failure_timeout,
        set=settings or {"lr": 1},
        kernels="numpy",
        worker_deadline=PATIENCE,
    )


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def version_of(server: Server) -> int:
    return int(server.engine.report()["version"])


def value_of(server: Server) -> float:
    assert server.engine.store is not None
    return float(server.engine.store.current.arena.views["w"][0])


def waiting_at(server: Server) -> int:
    return int(server.engine.report()["waiting"])


async def until(check: Callable[[], bool], what: str) -> None:
    """Give others their turns until it is so."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not check():  # noqa: ASYNC110 (it may be anybody's doing)
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE:g} s: {what}") from None


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and see it end so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class TestLoop:
    async def test_params_are_up_to_date_after_every_step(self) -> None:
        async with serve() as server, aiops.AsyncWorker(server.url, START) as worker:
            arrays = list(worker.params.values())
            for step in range(1, 4):
                receipt = await worker.step(ones(worker.params))
                assert worker.last is receipt
                assert (receipt.version, receipt.staleness) == (step, 0)
                assert worker.version == worker.params.version == worker.steps == step
                np.testing.assert_array_equal(worker.params["w"], -step)
                np.testing.assert_array_equal(worker.params["b"], 4 - step)
            assert all(a is b for a, b in zip(arrays, worker.params.values(), strict=True))
            assert (worker.policy, worker.url, worker.lr) == ("asgd", server.url, 1)
            assert worker.plan["recompute"] is False
            assert worker.recomputed == 0
            assert min(worker.traffic) > 3 * worker.params.layout.nbytes
            assert worker.ledger.report()

    async def test_the_callers_arrays_are_left_alone(self) -> None:
        mine = {name: array.copy() for name, array in START.items()}
        async with serve() as server, AsyncWorker(server.url, mine) as worker:
            await worker.step(ones(worker.params))
        for name, array in START.items():
            np.testing.assert_array_equal(mine[name], array)

    async def test_a_function_is_called_with_the_parameters(self) -> None:
        async def compute(params: Params) -> dict[str, Array]:
            await asyncio.sleep(0)
            return {"b": params["b"].copy()}

        async with serve() as server, AsyncWorker(server.url, START) as worker:
            await worker.step(lambda params: {"w": params["w"] + 1})
            np.testing.assert_array_equal(worker.params["w"], -1)
            await worker.step(compute)
            np.testing.assert_array_equal(worker.params["b"], 0)
            np.testing.assert_array_equal(worker.params["w"], -1)

    async def test_gradients_may_be_computed_in_a_thread(self) -> None:
        async with serve() as server, AsyncWorker(server.url, START) as worker:
            for _ in range(3):
                await worker.step(lambda params: asyncio.to_thread(ones, params))
            np.testing.assert_array_equal(worker.params["w"], -3)

    async def test_what_the_function_raises_is_the_callers(self) -> None:
        def compute(params: Params) -> dict[str, Array]:
            return next(iter(()))

        async with serve() as server, AsyncWorker(server.url, START) as worker:
            with pytest.raises(RuntimeError, match="StopIteration"):  # in any coroutine
                await worker.step(compute)
            assert (await worker.step(ones(START))).version == 1

    async def test_a_second_worker_gets_the_firsts_model(self) -> None:
        async with serve() as server, AsyncWorker(server.url, START) as first:
            await first.step(ones(START))
            async with AsyncWorker(server.url, ones(START, 99)) as second:
                np.testing.assert_array_equal(second.params["w"], -1)
                assert second.version == 1
                await second.step(ones(START))
                assert first.version == 1
                assert await first.refresh() == 2
                np.testing.assert_array_equal(first.params["w"], -2)
                assert (await first.stats())["gradients"] == 2

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_many_workers_at_once(self, new_loop: Callable[[], Any]) -> None:
        async def work(url: str, index: int) -> int:
            async with AsyncWorker(url, START, name=f"w{index}") as worker:
                for _ in range(25):
                    await worker.step(ones(worker.params))
                return worker.version

        async def train() -> None:
            async with serve() as server:
                versions = await asyncio.gather(*(work(server.url, index) for index in range(8)))
                assert max(versions) == 200
                assert value_of(server) == -200
                async with AsyncClient(server.url) as observer:
                    workers = (await observer.stats())["workers"]
                pushes = {w["name"]: w["pushes"] for w in workers if w["role"] == "worker"}
                assert pushes == {f"w{index}": 25 for index in range(8)}

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(train())

    async def test_connecting_by_hand(self) -> None:
        async with serve() as server:
            worker = AsyncWorker(server.url, START)
            for ask in (lambda: worker.params, lambda: worker.version, lambda: worker.steps):
                with pytest.raises(UsageError, match="not connected: use it as `async with"):
                    ask()
            with pytest.raises(UsageError, match="not connected"):
                await worker.step(ones(START))
            assert await worker.connect() is worker
            params = worker.params
            assert (await worker.connect()).params is params, "once is enough"
            await worker.step(ones(START))
            await worker.close()
            assert value_of(server) == -1

    async def test_rows_of_tables(self) -> None:
        tables = {"t": aiops.Table(100, 2, "float64", init="zeros")}
        async with serve() as server, AsyncWorker(server.url, {}, tables=tables) as worker:
            rows = await worker.fetch_rows("t", [3, 4])
            np.testing.assert_array_equal(rows, 0)
            await worker.push_rows("t", [3], np.ones((1, 2)))
            (receipt, after), other, stats = await asyncio.gather(
                worker.exchange_rows("t", [4], np.ones((1, 2)), [3, 4]),
                worker.fetch_rows("t", [3]),
                worker.stats(),
            )
            assert receipt.version == 2
            np.testing.assert_array_equal(after, -1)
            np.testing.assert_array_equal(other, -1)
            assert stats["policy"] == "asgd"


class TestTurns:
    """A step is one whole, however often it waits."""

    async def test_one_step_at_a_time(self) -> None:
        async with (
            serve("hardsync", 2) as server,
            AsyncWorker(server.url, START) as one,
            AsyncWorker(server.url, START) as two,
        ):
            step = asyncio.create_task(one.step(ones(START)))
            await until(lambda: waiting_at(server) == 1, "the first push")
            for name, call in {
                "step": lambda: one.step(ones(START)),
                "refresh": one.refresh,
                "connect": one.connect,
            }.items():
                with pytest.raises(UsageError, match=rf"one thing at a time.* {name}\(\)"):
                    await call()
            assert (await one.stats())["waiting"] == 1, "others may ask meanwhile"
            await two.step(ones(START))
            assert (await step).version == one.version == 1

    async def test_a_function_cannot_take_a_step_within_its_step(self) -> None:
        async with serve() as server, AsyncWorker(server.url, START) as worker:

            async def compute(params: Params) -> dict[str, Array]:
                await worker.refresh()
                return ones(params)

            with pytest.raises(UsageError, match="one thing at a time"):
                await worker.step(compute)
            assert (await worker.step(ones(START))).version == 1

    async def test_closing_in_the_middle_of_a_step_breaks_it_off(self) -> None:
        async with serve("hardsync", 2) as server, AsyncWorker(server.url, START):
            worker = await AsyncWorker(server.url, START).connect()
            step = asyncio.create_task(worker.step(ones(START)))
            await until(lambda: waiting_at(server) == 1, "the first push")
            with pytest.raises(UsageError, match=r"in the middle of a step: await that before clo"):
                await worker.close()
            with pytest.raises(ConnectionLost, match="closed before the answer came"):
                await step
            await worker.close()
            await until(lambda: len(server.engine.membership.present()) == 1, "its goodbye")


class TestRefusals:
    async def test_a_bad_gradient_costs_nothing(self) -> None:
        async with serve() as server, AsyncWorker(server.url, START) as worker:
            with pytest.raises(BadPush, match="'b' holds inf"):
                await worker.step(ones(START, np.inf))
            with pytest.raises(UsageError, match="did you mean 'w'"):
                await worker.step({"ww": np.zeros(8, np.float32)})
            assert worker.version == worker.steps == 0
            np.testing.assert_array_equal(worker.params["w"], 0)
            assert (await worker.step(ones(START))).version == 1

    async def test_another_model(self) -> None:
        async with serve() as server, AsyncWorker(server.url, START):
            with pytest.raises(BadPush, match=r"'w' has shape \(8,\)"):
                async with AsyncWorker(server.url, {**START, "w": np.zeros(9, np.float32)}):
                    pass
            await until(lambda: len(server.engine.membership.present()) == 1, "its goodbye")

    async def test_a_plan_that_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aiops.algorithms.asgd import ASGD

        plan: Callable[..., Any] = lambda self, workers: {"routine": "telepathy"}  # noqa: E731
        monkeypatch.setattr(ASGD, "plan", plan)
        async with serve() as server:
            with pytest.raises(UsageError, match="the routine 'telepathy'"):
                async with AsyncWorker(server.url, START):
                    pass
            await until(lambda: not server.engine.membership.present(), "its goodbye")

    async def test_a_closed_worker(self) -> None:
        async with serve() as server:
            worker = await AsyncWorker(server.url, START).connect()
            await worker.close()
            await worker.close()
            for call in (lambda: worker.step(ones(START)), worker.refresh, worker.stats):
                with pytest.raises(UsageError, match="closed"):
                    await call()

    async def test_nobody_waits_for_a_worker_that_said_goodbye(self) -> None:
        async with serve() as server:
            async with AsyncWorker(server.url, START, name="w") as worker:
                assert (await worker.stats())["waited_for"] == [1]
            async with AsyncClient(server.url) as observer:
                stats = await observer.stats()
            assert stats["waited_for"] == []
            assert [w["present"] for w in stats["workers"] if w["name"] == "w"] == [False]

    async def test_an_error_in_the_loop_says_goodbye_too(self) -> None:
        async with serve() as server:
            with pytest.raises(ZeroDivisionError):
                async with AsyncWorker(server.url, START):
                    raise ZeroDivisionError
            async with AsyncClient(server.url) as observer:
                assert (await observer.stats())["waited_for"] == []


class TestPlans:
    async def test_a_refused_gradient_is_computed_again(self) -> None:
        async with (
            serve("hardsync", admission="reject", lr=1) as server,
            AsyncWorker(server.url, START) as worker,
            AsyncClient(server.url, role="worker") as other,
        ):
            seen: list[float] = []

            async def compute(params: Params) -> dict[str, Array]:
                seen.append(float(params["w"][0]))
                return ones(params)

            await other.push(await other.fetch(), ones(START))
            receipt = await worker.step(compute)
            assert (receipt.version, receipt.staleness) == (2, 0)
            assert seen == [0, -1], "the same mini-batch, on the parameters that came with the no"
            assert (worker.steps, worker.recomputed) == (1, 1)
            with pytest.raises(UsageError, match=r"call step\(function\)"):
                await worker.step(ones(START))

    async def test_local_steps(self) -> None:
        async with serve("downpour", lr=1, n_push=2, n_fetch=4) as server:
            async with AsyncWorker(server.url, START) as worker:
                receipts = []
                for step in range(1, 9):
                    receipts.append(await worker.step(ones(worker.params)))
                    np.testing.assert_array_equal(worker.params["w"], -step)
                assert [receipt.pushed for receipt in receipts] == [False, False, False, True] * 2
                assert worker.last == receipts[-1]
            assert (version_of(server), value_of(server)) == (4, -8)

    @each_row(
        ("policy", "settings"),
        [
            ("downpour", {"lr": 1, "n_push": 5, "n_fetch": 5}),
            ("fedbuff", {"local_steps": 5, "inner": "sgd", "inner_lr": 1, "k": 1}),
            ("no-delay", {"lr": 1, "tau_max": 4}),
            ("no-delay", {"lr": 1, "tau_max": 4, "variant": 2}),
            ("ssp", {"lr": 1, "get_model_frequency": 5}),
        ],
    )
    async def test_closing_pushes_the_rest(self, policy: str, settings: dict[str, Any]) -> None:
        async with serve(policy, **settings) as server:
            async with AsyncWorker(server.url, START) as worker:
                for _ in range(7):
                    await worker.step(ones(worker.params))
            assert value_of(server) == -7

    async def test_an_error_in_the_loop_pushes_nothing_more(self) -> None:
        async with serve("downpour", lr=1, n_push=5, n_fetch=5) as server:

            async def fail() -> None:
                async with AsyncWorker(server.url, START) as worker:
                    await worker.step(ones(worker.params))
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail()
            assert version_of(server) == 0

    async def test_the_merge_overlaps_compute(self) -> None:
        """With the other at rest, a worker goes on for τ_max steps, and then waits for it."""
        async with (
            serve("no-delay", 2, lr=1, tau_max=4) as server,
            AsyncWorker(server.url, START) as fast,
            AsyncWorker(server.url, START) as slow,
        ):
            for _ in range(3):
                assert not (await fast.step(ones(fast.params))).pushed
            await until(lambda: waiting_at(server) == 1, "the first push, which nobody awaits")
            waiting = asyncio.create_task(fast.step(ones(fast.params)))
            assert (await fast.stats())["waiting"] == 1
            assert not waiting.done()
            await slow.step(ones(slow.params))
            await waiting
            # Both gave one step; the three that the fast one has taken since are its own.
            np.testing.assert_array_equal(fast.params["w"], -1 - 3)

    async def test_a_failed_push_is_told_by_the_step_after_it(self) -> None:
        async with serve("no-delay", 2, lr=1, tau_max=2) as server, AsyncWorker(server.url, START):
            worker = await AsyncWorker(server.url, START).connect()
            worker._client.timeout = 1.0
            await worker.step(ones(worker.params))
            await until(lambda: waiting_at(server) == 1, "the first push")
            ((_step, background),) = worker._steps._background
            server.stop()
            await asyncio.sleep(0)
            await until(lambda: background.over, "what became of it")
            with pytest.raises(Unavailable, match="shutting down"):
                await worker.step(ones(worker.params))
            np.testing.assert_array_equal(worker.params["w"], -1)  # nothing of this step was done
            await worker.close(flush=False)

    async def test_a_push_that_somebody_else_cancelled(self) -> None:
        """Its task is ended (by a framework, say): it stays under way, and is carried again."""
        async with serve("no-delay", 2, lr=1, tau_max=2) as server:
            async with AsyncWorker(server.url, START) as one, AsyncWorker(server.url, START) as two:
                await one.step(ones(START))
                await until(lambda: waiting_at(server) == 1, "the first push")
                background = one._steps._background[0][1]
                assert isinstance(background, _TaskTransfer)
                await cancel(background.task)
                with pytest.raises(ConnectionLost, match="in the background was cancelled"):
                    await one.step(ones(START))
                await two.step(ones(START))
                await asyncio.gather(one.step(ones(START)), two.step(ones(START)))
            assert value_of(server) == -2


CANCELLED = [
    ("downpour", {"lr": 1, "n_push": 1, "n_fetch": 1}),
    ("downpour", {"lr": 1, "n_push": 2, "n_fetch": 3}),
    ("fedbuff", {"local_steps": 2, "inner": "sgd", "inner_lr": 1, "k": 1}),
    ("no-delay", {"lr": 1, "tau_max": 2}),
    ("no-delay", {"lr": 1, "tau_max": 4, "variant": 2}),
    ("ssp", {"lr": 1, "s": 1}),
]


class TestCancelled:
    """Cancelled at any await, a worker goes on, or closes; no local step is lost or made twice."""

    @each_row(("policy", "settings"), CANCELLED)
    async def test_steps_cancelled_at_any_turn(self, policy: str, settings: dict[str, Any]) -> None:
        async with serve(policy, **settings) as server:
            async with AsyncWorker(server.url, START, timeout=PATIENCE) as worker:
                taken = 0
                for turns in range(24):
                    step = asyncio.create_task(worker.step(ones(START)))
                    for _ in range(1 + turns):
                        await asyncio.sleep(0)
                    step.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await step
                    taken += 1
                await worker.step(ones(START))
                taken += 1
            assert value_of(server) == -taken

    async def test_a_gradient_that_travels_as_it_is(self) -> None:
        """Nobody knows of a cancelled one. The others count; the parameters are the server's."""
        async with serve("asgd") as server, AsyncWorker(server.url, START) as worker:
            done = 0
            for turns in range(16):
                step = asyncio.create_task(worker.step(ones(START)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                step.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await step
                    done += 1
            await worker.step(ones(START))
            assert worker.steps == done + 1
            assert worker.params["w"][0] == value_of(server) == -version_of(server)
            assert done + 1 <= version_of(server) <= 17

    @pytest.mark.parametrize("way", ["up", "down"])
    @testing.virtual()
    async def test_in_the_middle_of_a_payload(self, way: Any) -> None:
        """What has been sent by half is not sent on, and what comes is not written any more."""
        start, network = {"w": np.zeros(1 << 20, np.float32)}, testing.network()
        async with serve() as server:
            with network.at("alice"):
                worker = await AsyncWorker(server.url, start, timeout=PATIENCE).connect()
            async with AsyncClient(server.url, role="worker") as other:
                await other.push(await other.fetch(), ones(start))
            network.after("alice", way, 1 << 18, lambda: network.silence("alice"))
            gradients = ones(start)
            step = asyncio.create_task(worker.step(gradients))
            await testing.until(lambda: network.host("alice").silent, "half of it has come")
            [link] = [peer.link for peer in server.connections.peers.values()]
            await cancel(step)
            network.restore("alice")
            gradients["w"][:] = np.nan  # they are their owner's again
            seen = worker.params["w"].copy()
            await worker.stats()
            np.testing.assert_array_equal(worker.params["w"], seen)
            [again] = [peer.link for peer in server.connections.peers.values()]
            version = await worker.refresh()
            assert version == (1 if way == "up" else 2)
            np.testing.assert_array_equal(worker.params["w"], -version)
            assert again is not link, "it has connected again"
            await worker.close()

    async def test_waiting_for_the_background(self) -> None:
        """The wait is cancelled, and what is waited for is not."""
        async with (
            serve("no-delay", 2, lr=1, tau_max=2) as server,
            AsyncWorker(server.url, START) as one,
            AsyncWorker(server.url, START) as two,
        ):
            await one.step(ones(START))
            await until(lambda: waiting_at(server) == 1, "the first push")
            step = asyncio.create_task(one.step(ones(START)))
            await one.stats()
            await cancel(step)
            np.testing.assert_array_equal(one.params["w"], -2)
            ((_step, background),) = one._steps._background
            assert not background.over
            await two.step(ones(START))
            assert await one.refresh() == 1
            assert value_of(server) == -1
            np.testing.assert_array_equal(one.params["w"], -2)

    async def test_while_gradients_are_computed(self) -> None:
        async with serve("downpour", lr=1) as server, AsyncWorker(server.url, START) as worker:

            async def compute(params: Params) -> dict[str, Array]:
                await asyncio.Event().wait()
                raise AssertionError

            step = asyncio.create_task(worker.step(compute))
            await asyncio.sleep(0)
            await cancel(step)
            assert worker.steps == 0
            await worker.step(ones(START))
            assert worker.steps == 1

    @each_row("turns", range(12))
    async def test_connecting(self, turns: int) -> None:
        async with serve() as server:
            worker = AsyncWorker(server.url, START)
            connecting = asyncio.create_task(worker.connect())
            for _ in range(turns):
                await asyncio.sleep(0)
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            await worker.connect()
            assert (await worker.step(ones(START))).version == 1
            await worker.close()
            await until(lambda: not server.engine.membership.present(), "its goodbye")

    @each_row("turns", range(12))
    async def test_closing(self, turns: int) -> None:
        """Whatever has been pushed by then: the connection is closed, and no task is left."""
        async with serve("fedbuff", local_steps=9, inner="sgd", inner_lr=1, k=1) as server:
            tasks = asyncio.all_tasks()
            worker = await AsyncWorker(server.url, START).connect()
            await worker.step(ones(START))
            closing = asyncio.create_task(worker.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await closing
            await worker.close()
            await until(lambda: not server.engine.membership.present(), "its end")
            await until(lambda: asyncio.all_tasks() <= tasks, "the end of its tasks")
            assert value_of(server) in (0, -1)

    async def test_leaving_does_not_wait_for_a_barrier(self) -> None:
        """As Ctrl-C does it: with a push in the background that the barrier holds."""
        async with serve("no-delay", 2, lr=1, tau_max=8) as server:
            async with AsyncWorker(server.url, START) as slow:

                async def train() -> None:
                    async with AsyncWorker(server.url, START) as worker:
                        await worker.step(ones(START))
                        await asyncio.Event().wait()

                training = asyncio.create_task(train())
                await until(lambda: waiting_at(server) == 1, "the first push")
                began = asyncio.get_running_loop().time()
                await cancel(training)
                assert asyncio.get_running_loop().time() - began < 2
                await slow.step(ones(START))
            assert value_of(server) == -1  # the mean of both: what was handed over counts


class TestServerGone:
    @testing.virtual()
    async def test_a_server_that_stays_away(self) -> None:
        async with serve() as server:
            worker = await AsyncWorker(server.url, START, timeout=40).connect()
        with pytest.raises(ConnectionLost, match="is the server running"):
            await worker.step(ones(START))
        assert 30 <= asyncio.get_running_loop().time() <= 40
        await worker.close()

    @testing.virtual()
    async def test_nobody_there_at_all(self) -> None:
        async with serve() as server:
            url = server.url
        with pytest.raises(ConnectionLost, match="is the server running"):
            async with AsyncWorker(url, START, timeout=20):
                pass
        assert 10 <= asyncio.get_running_loop().time() <= 20

    async def test_nobody_there_on_this_machine(self) -> None:
        async with serve() as server:
            url = server.url
        with pytest.raises(ConnectionLost, match="is the server running"):
            async with AsyncWorker(url, START, timeout=0.01):
                pass

    async def test_a_server_that_was_restarted_without_its_model(self) -> None:
        async with serve() as server:
            worker = await AsyncWorker(server.url, START).connect()
            await worker.step(ones(START))
            port = port_of(server)
        async with serve(port=port) as server, worker_of(worker):
            receipt = await worker.step(ones(START))  # the server gets the worker's parameters
            assert not receipt.used
            assert worker.version == 0
            np.testing.assert_array_equal(worker.params["w"], -1)
            assert (await worker.step(ones(START))).version == 1
            assert value_of(server) == -2

    async def test_a_server_that_was_restarted_with_a_model(self) -> None:
        async with serve() as server:
            worker = await AsyncWorker(server.url, START).connect()
            await worker.step(ones(START))
            port = port_of(server)
        async with serve(port=port) as server, worker_of(worker):
            async with AsyncWorker(server.url, START):
                pass
            computed = []

            def compute(params: Params) -> dict[str, Array]:
                computed.append(float(params["w"][0]))
                return ones(params)

            receipt = await worker.step(compute)  # again, at the parameters that are there now
            assert receipt.used
            assert computed == [-1, 0]
            assert (worker.recomputed, worker.version) == (1, 1)

    async def test_tables_are_offered_again(self) -> None:
        tables = {"t": aiops.Table(10, 2, init="zeros")}
        async with serve() as server:
            worker = await AsyncWorker(server.url, START, tables=tables).connect()
            port = port_of(server)
        async with serve(port=port) as server, worker_of(worker):
            np.testing.assert_array_equal(await worker.fetch_rows("t", [1]), 0)
            assert not (await worker.step(ones(START))).used
            np.testing.assert_array_equal(await worker.fetch_rows("t", [1]), 0)

    @pytest.mark.parametrize(
        ("policy", "settings"),
        [
            ("downpour", {"lr": 1, "n_push": 2, "n_fetch": 4}),
            ("fedbuff", {"local_steps": 4, "inner": "sgd", "inner_lr": 1, "k": 1}),
            ("no-delay", {"lr": 1, "tau_max": 3}),
        ],
    )
    async def test_a_server_that_lost_its_model_gets_every_step_once(
        self, policy: str, settings: dict[str, Any]
    ) -> None:
        async with serve(policy, **settings) as server:
            worker = await AsyncWorker(server.url, START).connect()
            for _ in range(5):
                await worker.step(ones(worker.params))
            port = port_of(server)
        async with serve(policy, port=port, **settings) as server:
            async with worker_of(worker):
                for _ in range(6):
                    await worker.step(ones(worker.params))
                np.testing.assert_array_equal(worker.params["w"], -11)
            assert value_of(server) == -11


@contextlib.asynccontextmanager
async def worker_of(worker: AsyncWorker) -> AsyncIterator[AsyncWorker]:
    """Close it at the end."""
    try:
        yield worker
    finally:
        await worker.close()


class TestClock:
    """All time is the event loop's."""

    @testing.virtual()
    async def test_compute_and_idle_time_are_told_apart(self) -> None:
        async with (
            serve("hardsync", 2) as server,
            AsyncWorker(server.url, START) as worker,
            AsyncClient(server.url, role="worker") as other,
        ):
            params = await other.fetch()
            await asyncio.sleep(1000)
            computed, idled = worker.compute_seconds, worker.idle_seconds
            step = asyncio.create_task(worker.step(ones(START)))
            await asyncio.sleep(15)
            await other.push(params, ones(START))
            await step
            assert worker.compute_seconds - computed == 1000
            assert worker.idle_seconds - idled == 15

    @pytest.mark.parametrize("policy", ["hardsync", "no-delay"])
    @testing.virtual()
    async def test_a_deadline_comes_when_the_loop_says_so(self, policy: str) -> None:
        """The server's network falls silent while a barrier holds the push."""
        with testing.network().at("server"):
            serving = serve(policy, 2)
            server = await serving.__aenter__()
        with testing.network().at("alice"):
            worker = await AsyncWorker(server.url, START).connect()
        async with AsyncClient(server.url, role="worker"):
            step = asyncio.create_task(self.steps(worker, 20))
            await testing.until(lambda: waiting_at(server) == 1, "its push waits in the barrier")
            testing.network().silence("alice")
            with pytest.raises((DeadlineExceeded, ConnectionLost)):
                await step
            assert asyncio.get_running_loop().time() >= worker.plan["patience"]
            testing.network().restore("alice")
        await worker.close(flush=False)
        await serving.__aexit__(None, None, None)

    async def steps(self, worker: AsyncWorker, count: int) -> None:
        for _ in range(count):
            await worker.step(ones(START))

    @testing.virtual()
    async def test_a_call_has_all_its_time(self) -> None:
        """However long the connection had been away before it."""
        network, loop = testing.network(), asyncio.get_running_loop()
        with network.at("server"):
            serving = serve()
            server = await serving.__aenter__()
        with network.at("alice"):
            worker = await AsyncWorker(server.url, START, timeout=100).connect()
        network.kill("server")
        await asyncio.sleep(90)
        step = asyncio.create_task(worker.step(ones(START)))
        loop.call_later(95, network.revive, "server")
        assert (await step).version == 1
        assert loop.time() > 180
        await worker.close()
        await serving.__aexit__(None, None, None)

    @each_row("module", ["asyncio.worker", "asyncio.client", "asyncio.connection", "facade"])
    def test_there_is_no_other_clock_and_no_thread(self, module: str) -> None:
        used = {name.partition(".")[0] for name in imports(MODULES[f"aiops.client.{module}"])}
        assert not used & {"time", "threading", "concurrent", "queue", "select", "signal"}

    @testing.virtual()
    async def test_pings_are_answered_while_nobody_calls(self) -> None:
        async with serve(failure_timeout=15.0) as server, AsyncWorker(server.url, START) as worker:
            [link] = [peer.link for peer in server.connections.peers.values()]
            before = link.wire.traffic.messages_in
            await asyncio.sleep(10 * 15)
            assert link.wire.traffic.messages_in >= before + 5
            assert (await worker.step(ones(START))).version == 1
            assert list(server.connections.peers) == [link.number]

    async def test_pings_are_answered_over_sockets_of_the_machine(self) -> None:
        async with serve(failure_timeout=0.05) as server, AsyncWorker(server.url, START) as worker:
            [link] = [peer.link for peer in server.connections.peers.values()]
            before = link.wire.traffic.messages_in
            await until(lambda: link.wire.traffic.messages_in >= before + 1, "a ping answered")
            assert (await worker.step(ones(START))).version == 1
            assert list(server.connections.peers) == [link.number]


LARGE: dict[str, Array] = {"w": np.zeros((512, 512), np.float32)}


class TestDirections:
    """Those of large matrices are made in a thread, one step's at a time."""

    @staticmethod
    def slowed(worker: AsyncWorker, go: threading.Event) -> list[int]:
        """Have directions wait until the event; return a list of how many are being made."""
        steps = worker._steps
        assert steps._directions is not None
        making, seen, of = [0], list[int](), steps._directions.of

        def slow(gradients: Any) -> Any:
            making[0] += 1
            seen.append(making[0])
            assert go.wait(PATIENCE)
            found = of(gradients)
            making[0] -= 1
            return found

        steps._directions.of = slow  # type: ignore[method-assign]
        return seen

    async def test_the_event_loop_runs_meanwhile(self) -> None:
        go = threading.Event()
        async with serve("schedule-free") as server, AsyncWorker(server.url, LARGE) as worker:
            seen = self.slowed(worker, go)
            step = asyncio.create_task(worker.step(ones(LARGE)))
            await until(lambda: bool(seen), "directions that are being made")
            assert (await worker.stats())["version"] == 0
            go.set()
            assert (await step).version == 1

    async def test_a_step_that_is_cancelled_ends_before_the_next_begins(self) -> None:
        go = threading.Event()
        async with serve("schedule-free") as server, AsyncWorker(server.url, LARGE) as worker:
            seen = self.slowed(worker, go)
            first = asyncio.create_task(worker.step(ones(LARGE)))
            await until(lambda: bool(seen), "directions that are being made")
            await cancel(first)
            second = asyncio.create_task(worker.step(ones(LARGE)))
            await worker.stats()
            assert seen == [1]
            go.set()
            assert (await second).version == 1
            assert seen == [1, 1]

    async def test_what_fails_there_is_raised_by_the_step(self) -> None:
        async with serve("schedule-free") as server, AsyncWorker(server.url, LARGE) as worker:
            with pytest.raises(UsageError, match="'w'"):
                await worker.step({"w": Tensor(LARGE["w"], copies=False)})  # type: ignore[dict-item]
            assert (await worker.step(ones(LARGE))).version == 1
