"""Traces of real exchanges, over TCP: those of the server and of its workers are one."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import tracing
from aiops.common.gathering import gathered
from aiops.engine.engine import Engine
from aiops.errors import BadPush, UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving import exchange_trace
from aiops.serving.embedded import config_of
from aiops.serving.exchange_trace import ExchangeTrace
from aiops.serving.run_state import RunState
from aiops.serving.server import Server
from aiops.tracing import spans
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
    assert all(not step.parent and not step.error for step in steps)
    assert {step.attributes["aiops.worker"] for step in steps} == {"alice"}
    [whole] = [span for span in collected.spans(kind="server") if _same(span, steps[3])]
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
    [exchange] = [s for s in collected.spans("aiops.exchange", "client") if _same(s, steps[3])]
    assert whole.parent == exchange.id
    assert exchange.parent == steps[3].id
    assert parts["aiops.compute"].parent == steps[3].id
    for name in ("aiops.push", "aiops.wait", "aiops.fetch"):
        assert parts[name].parent == exchange.id
    order = [parts[f"aiops.{name}"] for name in ("compute", "push", "wait", "fetch")]
    for one, following in itertools.pairwise(order):
        assert one.begin <= one.end == following.begin
    assert exchange.begin <= whole.begin <= whole.end <= exchange.end
    assert ("aiops.update" in parts) is not short
    if not short:
        assert parts["aiops.update"].parent == whole.id


async def until(server: Server, holds: Callable[[], bool]) -> None:
    """Wait until the events of a server have brought about what is to hold."""
    server._dispatcher.changed = changed = asyncio.Event()
    while not holds():
        changed.clear()
        await changed.wait()


def _same(span: Any, other: Any) -> bool:
    return bool(span.trace == other.trace)


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
            await until(server, lambda: gathered(server.gather(0))["waiting"] == 1)
            await late.step(GRADIENT)
            await step

    asyncio.run(main())
    exchanges = {s.attributes["aiops.worker"]: s for s in collected.spans(kind="server")}
    barriers = collected.spans("aiops.barrier")
    [waited] = [span for span in barriers if _same(span, exchanges["early"])]
    assert waited.begin < exchanges["late"].begin <= waited.end
    assert waited.end == exchanges["early"].end
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
    _used, refused = collected.spans(kind="server")
    assert refused.attributes["aiops.refused"] == refused.error
    assert "nan" in refused.error
    _first, failed = collected.spans("aiops.step")
    assert failed.error.startswith("BadPush: ")
    assert _same(failed, refused)


@pytest.mark.parametrize("short", [True, False])
def test_an_exchange_ends_when_the_journal_is_as_safe_as_its_answer_promises(
    short: bool, collected: Collected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is synced only after the update: each exchange is held back meanwhile."""
    if not short:
        monkeypatch.setattr(Engine, "steady", lambda *_arguments: None)
    sync, allowed, reached = os.fdatasync, threading.Event(), threading.Event()
    allowed.set()

    def syncing(descriptor: int) -> None:
        reached.set()
        assert allowed.wait(PATIENCE)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", syncing)
    released = []
    with serving(state=tmp_path / "state", acks="durable") as server:
        with aiops.Worker(server.url, MODEL, name="alice") as worker:
            worker.step(GRADIENT)
            for _ in range(3):
                allowed.clear()
                reached.clear()
                step = threading.Thread(target=worker.step, args=[GRADIENT])
                step.start()
                assert reached.wait(PATIENCE)
                released.append(CURRENT_ENVIRONMENT.get().trace_clock())  # type: ignore[misc]
                allowed.set()
                step.join(PATIENCE)
                assert not step.is_alive()
        assert server.server is not None
        assert server.server._trace is not None
        assert not server.server._trace.pending
    exchanges = collected.spans(kind="server")
    assert [span.attributes["aiops.push"] for span in exchanges] == [1, 2, 3, 4]
    for span, time in zip(exchanges[1:], released, strict=True):
        assert span.begin < time <= span.end


def test_a_push_that_is_sent_again_has_a_span_of_its_own(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    push_twice()
    first, again = collected.spans(kind="server")
    assert first.trace == again.trace
    assert first.id != again.id
    assert "aiops.repeated" not in first.attributes
    assert again.attributes["aiops.repeated"] is True


def test_one_that_repeats_an_early_push_does_not_have_it_traced_again(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans.Sampler, "of", lambda _environment: (spans.Sampler(10, 0.0), ""))
    push_twice()
    assert len(collected.spans(kind="server")) == 1


def push_twice() -> None:
    """Send one push, and send it again as after a lost answer."""
    with serving() as server, aiops.Client(server.url, role="worker") as client:
        params = client.define(MODEL)
        request = client._requests.push(GRADIENT, params, None)
        payloads = request.payloads
        assert client._run(request).version == 1
        request.done, request.payloads = False, payloads
        client._session.ask(request)
        assert client._run(request).version == 1


async def test_packages_that_are_missing_leave_the_state_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise UsageError("traces need packages")

    monkeypatch.setattr(tracing, "_exporters", fail)
    settings: Any = {"port": 0, "policy": "asgd", "kernels": "numpy", "state": tmp_path / "state"}
    with pytest.raises(UsageError, match="traces need packages"):
        Server(config_of({**settings, "trace": "otlp:"}))
    async with aiops.serve(**settings) as server:
        assert server.url


async def test_a_server_that_fails_at_its_end_leaves_no_thread(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_state: RunState) -> None:
        raise OSError("of the copies")

    serving = aiops.serve(port=0, policy="asgd", kernels="numpy", trace="otlp:")
    server = await serving.__aenter__()
    async with aiops.AsyncWorker(server.url, MODEL) as worker:
        await worker.step(GRADIENT)
    monkeypatch.setattr(RunState, "end_copies", fail)
    found = [each for each in threading.enumerate() if each.name == "aiops-tracing"]
    with pytest.raises(OSError, match="of the copies"):
        await serving.__aexit__(None, None, None)
    assert found
    assert not any(thread.is_alive() for thread in found)
    assert collected.spans(kind="server")


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
    exchanges = collected.spans(kind="server")
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
                await until(server, lambda: trace.pending == 1)
                step.cancel()
                await worker.abandon()
            await until(server, lambda: not trace.pending)
            return trace

    assert not asyncio.run(main()).pending


def test_what_cannot_be_traced_does_not_end_the_run(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_given: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(exchange_trace, "_about", fail)
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
