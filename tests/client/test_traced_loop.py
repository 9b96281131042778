"""The spans of a worker's steps, at a real server that makes none."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.client.asyncio.worker import _TaskTransfer
from aiops.client.sync import short_way
from aiops.client.traced_loop import StepTrace, TracedLoop
from aiops.client.training_loop import TrainingLoop
from aiops.errors import BadPush, UsageError
from aiops.tracing.spans import LONGEST, LONGEST_NAME
from tests.support import PATIENCE, ServerThread
from tests.tracing.collected import Collected, collecting

MODEL = {"w": np.zeros(1000, np.float32)}
GRADIENT = {"w": np.ones(1000, np.float32)}


@pytest.fixture
def collected() -> Iterator[Collected]:
    with collecting() as found:
        yield found


def train(url: str, steps: int, **settings: Any) -> None:
    with aiops.Worker(url, MODEL, name="alice", **settings) as worker:
        for _ in range(steps):
            worker.step(GRADIENT)


def named(collected: Collected) -> dict[str, int]:
    found = [span.name for span in collected.spans()]
    return {name: found.count(name) for name in found}


ALL = ("step", "compute", "exchange", "push", "wait", "fetch")


def test_each_push_has_all_spans_of_its_step(collected: Collected) -> None:
    with ServerThread(policy="asgd", kernels="numpy", shards=1) as server:
        train(server.url, 3)
    assert named(collected) == {f"aiops.{name}": 3 for name in ALL}
    steps = collected.spans("aiops.step")
    for before, step in itertools.pairwise(steps):
        assert before.end <= step.begin
    assert steps[0].resource["service.instance.id"] == "alice"


def test_the_rank_that_a_launcher_tells(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with ServerThread(policy="asgd", kernels="numpy") as server:
        train(server.url, 1)
    [step] = collected.spans("aiops.step")
    assert step.attributes["aiops.rank"] == 2


async def test_an_async_worker(collected: Collected) -> None:
    async with (
        aiops.serve(port=0, policy="asgd", kernels="numpy") as server,
        aiops.AsyncWorker(server.url, MODEL) as worker,
    ):
        for _ in range(3):
            await worker.step(GRADIENT)
    assert named(collected) == {f"aiops.{name}": 3 for name in ALL[:3]}


async def test_an_async_worker_s_exchanges_beside_computing(collected: Collected) -> None:
    async with (
        aiops.serve(port=0, policy="asgd", kernels="numpy") as server,
        aiops.AsyncWorker(server.url, MODEL, overlap=True) as worker,
    ):
        for _ in range(3):
            await worker.step(GRADIENT)
    assert named(collected) == {f"aiops.{name}": 3 for name in ALL[:3]}
    assert all(step.end > step.begin for step in collected.spans("aiops.step"))


def test_a_gradient_that_is_not_used(collected: Collected) -> None:
    with (
        ServerThread(policy="ringmaster", set=["r=1"], kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
        aiops.Client(server.url, role="worker") as other,
    ):
        other.push(other.fetch(), GRADIENT)  # it is quicker
        worker.step(GRADIENT)
    [step] = collected.spans("aiops.step")
    assert step.attributes["aiops.used"] is False
    assert "its staleness is 1" in step.attributes["aiops.unused_reason"]
    assert not step.error


def test_exchanges_beside_computing(collected: Collected) -> None:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        train(server.url, 4, overlap=True)
    steps, exchanges = collected.spans("aiops.step"), collected.spans("aiops.exchange", "client")
    assert [span.attributes["aiops.push"] for span in steps] == [1, 2, 3, 4]
    assert not collected.spans("aiops.push")
    for step, exchange in zip(steps, exchanges, strict=True):
        assert exchange.parent == step.id
        assert step.end == exchange.end


def test_local_steps_count_as_computing_of_the_push_after_them(collected: Collected) -> None:
    with ServerThread(policy="diloco", kernels="numpy", workers=1, set=["local_steps=3"]) as server:
        train(server.url, 6)
    assert named(collected) == {f"aiops.{name}": 2 for name in ALL}
    first, second = collected.spans("aiops.step")
    computing = collected.spans("aiops.compute")[1]
    assert first.end == second.begin == computing.begin


def test_without_a_thread_steps_go_on(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has applied the push by then."""
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "aiops-tracing":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        assert [worker.step(GRADIENT).version for _ in range(2)] == [1, 2]
    assert "there can be no thread that would send them" in caplog.text
    assert not collected.spans()


def broken(*_given: object, **_settings: object) -> None:
    raise RuntimeError("of tracing")


def test_what_fails_in_tracing_fails_no_step(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepTrace, "pushed", broken)
    bad = {"w": np.full(1000, np.nan, np.float32)}
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        assert worker.step(GRADIENT).version == 1
        with pytest.raises(BadPush):
            worker.step(bad)
        assert worker.step(GRADIENT, 0.5).version == 2  # by a program
        assert worker.steps == 2
    assert caplog.text.count("an exchange could not be traced") == 1


def test_what_fails_in_tracing_is_not_what_a_step_recovers_from(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        monkeypatch.setattr(StepTrace, "pushed", broken)
        error = aiops.errors.StaleGradient("it is asked for again")
        client = worker._client
        with monkeypatch.context() as patch:
            patch.setattr(client, "exchange", lambda *_given: (_ for _ in ()).throw(error))
            assert worker._exchange(GRADIENT, again=True) is None
        assert worker.recomputed == 1


def test_rows_beside_a_step_do_not_change_its_trace(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread pushes them as soon as the exchange is over."""
    table = aiops.Table(100, 4)
    with (
        ServerThread(policy="asgd", kernels="numpy", trace="otlp:") as server,
        aiops.Worker(server.url, MODEL, tables={"t": table}) as worker,
    ):
        exchange = worker._client.exchange

        def exchanging(*given: Any) -> Any:
            receipt = exchange(*given)
            worker._client.push_rows("t", [1], np.ones((1, 4), np.float32))
            return receipt

        monkeypatch.setattr(worker._client, "exchange", exchanging)
        for _ in range(4):
            worker.step(GRADIENT)
    steps, exchanges = collected.spans("aiops.step"), collected.spans(kind="server")
    assert [span.attributes["aiops.push"] for span in steps] == [1, 3, 5, 7]
    assert [span.trace for span in steps] == [span.trace for span in exchanges]


def test_an_error_that_has_pushed_nothing_has_no_spans(collected: Collected) -> None:
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        worker.step(GRADIENT)
        with pytest.raises(UsageError):
            worker.step({"w": np.ones(7, np.float32)})
        worker.step(GRADIENT)
    steps = collected.spans("aiops.step")
    assert [(span.attributes["aiops.push"], span.error) for span in steps] == [(1, ""), (2, "")]


@pytest.mark.parametrize("share", ["always_off", ""])
def test_where_nothing_is_taken_nothing_is_wrapped(
    share: str, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", share)
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        assert type(worker._begun) is (TrainingLoop if share else TracedLoop)
        assert (worker._client._connection.times is None) is bool(share)


def test_rows_go_the_short_way(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    carried, carry = [], short_way.carry_rows

    def carrying(*given: Any) -> bool:
        carried.append(given)
        return carry(*given)

    monkeypatch.setattr(short_way, "carry_rows", carrying)
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL, tables={"t": aiops.Table(100, 4)}) as worker,
    ):
        worker.fetch_rows("t", [1])
    assert carried


def test_texts_of_others_are_cut(collected: Collected) -> None:
    with (
        ServerThread(policy="asgd", kernels="numpy", trace="otlp:") as server,
        aiops.Worker(server.url, MODEL, name="a" * 1000) as worker,
    ):
        worker.step(GRADIENT)
    [step] = collected.spans("aiops.step")
    [exchange] = collected.spans(kind="server")
    name = step.attributes["aiops.worker"]
    assert name == exchange.attributes["aiops.worker"] == "a" * (LONGEST_NAME - 1) + "…"
    assert step.resource["service.instance.id"] == name
    assert all(
        len(value) <= LONGEST
        for span in collected.spans()
        for value in span.attributes.values()
        if isinstance(value, str)
    )


async def test_the_end_of_a_push_in_the_background_is_known_once_it_is_over() -> None:
    class Client:
        url = "aiops://a"

        async def carry(self, _transfer: object) -> None:
            pass

    class Clock:
        now = staticmethod(lambda: 7)

    background = _TaskTransfer(Client(), None, Clock())  # type: ignore[arg-type]
    while not background.over:  # noqa: ASYNC110  (each turn of the loop is looked at)
        await asyncio.sleep(0)
    assert background.ended == 7


def test_workers_of_a_process_have_one_thread(collected: Collected) -> None:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        workers = [aiops.Worker(server.url, MODEL, name=f"worker {n}") for n in range(3)]
        for worker in workers:
            worker.step(GRADIENT)
        assert threads() == 1
        for worker in workers:
            worker.close()
    assert threads() == 0
    names = {span.resource["service.instance.id"] for span in collected.spans("aiops.step")}
    assert names == {"worker 0", "worker 1", "worker 2"}


def threads() -> int:
    return sum(thread.name == "aiops-tracing" for thread in threading.enumerate())


async def test_a_close_that_is_cancelled_leaves_no_thread(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiops.serve(port=0, policy="asgd", kernels="numpy") as server:
        worker = aiops.AsyncWorker(server.url, MODEL)
        await worker.connect()
        await worker.step(GRADIENT)
        [thread] = [each for each in threading.enumerate() if each.name == "aiops-tracing"]
        close, closing = worker._client.close, asyncio.Event()

        async def slowly() -> None:
            closing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(worker._client, "close", slowly)
        task = asyncio.create_task(worker.close())
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(thread.join, PATIENCE)
        assert not thread.is_alive()
        await close()
    assert collected.spans("aiops.step")


def test_a_simulation_is_not_traced(collected: Collected) -> None:
    """Its times are none of a trace, and threads of a collector's know no virtual time."""

    async def main() -> None:
        async with (
            aiops.serve(policy="asgd", kernels="numpy", trace="otlp:") as server,
            aiops.AsyncWorker(server.url, MODEL) as worker,
        ):
            await worker.step(GRADIENT)
            assert type(worker._begun) is TrainingLoop
            assert server._trace is None

    testing.run(main())
    assert threads() == 0
    assert not collected.spans()
