"""Traces of real exchanges, over TCP: those of the server and of its workers are one."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.engine.engine import Engine
from aiops.errors import BadPush
from aiops.serving.exchange_trace import ExchangeTrace
from tests.support import PATIENCE, ServerThread
from tests.tracing.collected import Collected, collecting

MODEL = {"w": np.zeros(1000, np.float32)}
GRADIENT = {"w": np.ones(1000, np.float32)}


@pytest.fixture
def collected() -> Iterator[Collected]:
    with collecting() as found:
        yield found


@pytest.fixture(params=["tcp", "near"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tcp":
        monkeypatch.setenv("AIOPS_NO_SHM", "1")


def serving(policy: str = "asgd", **settings: Any) -> ServerThread:
    return ServerThread(policy=policy, kernels="numpy", trace="otlp:", **settings)


def train(url: str, steps: int, **settings: Any) -> None:
    with aiops.Worker(url, MODEL, name="alice", **settings) as worker:
        for _ in range(steps):
            worker.step(GRADIENT)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("short", [True, False])
def test_a_step_and_its_exchange_are_one_trace(
    short: bool, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not short:
        monkeypatch.setattr(Engine, "steady", lambda *_arguments: None)
    with serving() as server:
        train(server.url, 4)
    steps = collected.spans("aiops.step")
    assert [step.attributes["aiops.push"] for step in steps] == [1, 2, 3, 4]
    assert [step.attributes["aiops.version"] for step in steps] == [1, 2, 3, 4]
    assert all(step.parent is None and step.status.is_ok for step in steps)
    assert {step.attributes["aiops.worker"] for step in steps} == {"alice"}
    [whole] = [span for span in collected.spans(kind="SERVER") if _same(span, steps[3])]
    assert dict(whole.attributes) == {
        "aiops.worker": "alice",
        "aiops.worker_number": 1,
        "aiops.push": 4,
        "aiops.bytes": 4000,
        "aiops.answer_bytes": 4000,
        "aiops.version": 4,
        "aiops.staleness": 0,
        "aiops.used": True,
    }
    parts = {span.name: span for span in collected.spans() if _same(span, steps[3])}
    [exchange] = [s for s in collected.spans("aiops.exchange", "CLIENT") if _same(s, steps[3])]
    assert whole.parent.span_id == exchange.context.span_id
    assert exchange.parent.span_id == steps[3].context.span_id
    assert parts["aiops.compute"].parent.span_id == steps[3].context.span_id
    for name in ("aiops.push", "aiops.wait", "aiops.fetch"):
        assert parts[name].parent.span_id == exchange.context.span_id
    order = [parts[f"aiops.{name}"] for name in ("compute", "push", "wait", "fetch")]
    for one, following in itertools.pairwise(order):
        assert one.start_time <= one.end_time == following.start_time
    assert exchange.start_time <= whole.start_time <= whole.end_time <= exchange.end_time
    assert ("aiops.update" in parts) is not short
    if not short:
        assert parts["aiops.update"].parent.span_id == whole.context.span_id


def _same(span: Any, other: Any) -> bool:
    return bool(span.context.trace_id == other.context.trace_id)


def test_waits_for_a_barrier(collected: Collected) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE),
            aiops.serve(
                port=0, policy="hardsync", workers=2, kernels="numpy", trace="otlp:"
            ) as server,
            aiops.AsyncWorker(server.url, MODEL, name="early") as early,
            aiops.AsyncWorker(server.url, MODEL, name="late") as late,
        ):
            step = asyncio.create_task(early.step(GRADIENT))
            while server.report(0)["waiting"] != 1:  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.001)
            await late.step(GRADIENT)
            await step

    asyncio.run(main())
    exchanges = {s.attributes["aiops.worker"]: s for s in collected.spans(kind="SERVER")}
    barriers = collected.spans("aiops.barrier")
    [waited] = [span for span in barriers if _same(span, exchanges["early"])]
    assert waited.start_time < exchanges["late"].start_time <= waited.end_time
    assert waited.end_time == exchanges["early"].end_time
    steps = {span.attributes["aiops.worker"]: span for span in collected.spans("aiops.step")}
    assert _same(steps["early"], exchanges["early"])
    names = {span.name for span in collected.spans() if _same(span, steps["early"])}
    assert "aiops.wait" not in names, "an event loop's sockets are not timed"


def test_a_push_that_is_refused(collected: Collected) -> None:
    bad = {"w": np.full(1000, np.nan, np.float32)}
    with serving() as server, aiops.Worker(server.url, MODEL) as worker:
        worker.step(GRADIENT)
        with pytest.raises(BadPush):
            worker.step(bad)
    _used, refused = collected.spans(kind="SERVER")
    assert refused.attributes["aiops.refused"] == refused.status.description
    assert "nan" in refused.status.description
    _first, failed = collected.spans("aiops.step")
    assert failed.status.description.startswith("BadPush: ")
    assert _same(failed, refused)


def test_with_a_journal(collected: Collected, tmp_path: Path) -> None:
    with serving(state=tmp_path / "state", acks="durable") as server:
        train(server.url, 4)
    assert len(collected.spans(kind="SERVER")) == 4


def test_a_model_on_two_servers(collected: Collected) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE),
            aiops.serve(
                port=0, policy="asgd", shards=2, shard_bytes=8, kernels="numpy", trace="otlp:"
            ) as server,
        ):
            await asyncio.to_thread(train, server.url, 3)

    asyncio.run(main())
    assert len(collected.spans("aiops.step")) == 3
    exchanges = collected.spans(kind="SERVER")
    assert [span.attributes["aiops.version"] for span in exchanges] == [1, 2, 3]
    assert not collected.spans("aiops.wait")


def test_a_worker_that_is_gone_leaves_nothing(collected: Collected) -> None:
    async def main() -> ExchangeTrace:
        async with (
            asyncio.timeout(PATIENCE),
            aiops.serve(
                port=0, policy="hardsync", workers=2, kernels="numpy", trace="otlp:"
            ) as server,
        ):
            trace = server._trace
            assert trace is not None
            async with aiops.AsyncWorker(server.url, MODEL) as worker:
                step = asyncio.create_task(worker.step(GRADIENT))
                while not trace._open:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                step.cancel()
                await worker.abandon()
            while trace._open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return trace

    assert not asyncio.run(main())._open


def test_what_cannot_be_traced_does_not_end_the_run(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_given: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ExchangeTrace, "_about", fail)
    with serving() as server:
        train(server.url, 3)
        assert server.server.version == 3
    assert caplog.text.count("an exchange could not be traced") == 1
    assert len(collected.spans("aiops.step")) == 3


def test_without_it_there_is_nothing_of_it() -> None:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        assert server.server._trace is None
        with aiops.Worker(server.url, MODEL) as worker:
            worker.step(GRADIENT)
            assert type(worker._begun).__name__ == "TrainingLoop"
            assert worker._client._connection.times is None
            names = [thread.name for thread in threading.enumerate()]
        assert "aiops-tracing" not in names
