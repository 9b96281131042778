"""The spans of a worker's steps, at a real server that makes none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client.sync import connection
from aiops.tracing.delivery import SpanQueue
from tests.support import ServerThread
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
        assert before.end_time <= step.start_time
    assert steps[0].resource.attributes["service.name"] == "aiops-worker"
    assert steps[0].resource.attributes["service.instance.id"] == "alice"


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
    assert all(step.end_time > step.start_time for step in collected.spans("aiops.step"))


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
    assert step.status.status_code.name == "UNSET"


def test_what_cannot_be_traced_does_not_end_a_step(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_given: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(SpanQueue, "offer", fail)
    with ServerThread(policy="asgd", kernels="numpy") as server:
        train(server.url, 3)
    assert caplog.text.count("a step could not be traced") == 1


def test_rows_go_their_short_way(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()
    carry = connection.carry_rows

    def counted(*given: Any) -> bool:
        taken.append(1)
        return carry(*given)

    monkeypatch.setattr(connection, "carry_rows", counted)
    tables = {"t": aiops.Table(100, 4)}
    with (
        ServerThread(policy="asgd", kernels="numpy", shards=1) as server,
        aiops.Worker(server.url, MODEL, tables=tables) as worker,
    ):
        worker.step(GRADIENT)
        assert worker.fetch_rows("t", [1, 2]).shape == (2, 4)
        worker.step(GRADIENT)
    assert taken == [1]
    assert named(collected)["aiops.wait"] == 2


def test_exchanges_beside_computing(collected: Collected) -> None:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        train(server.url, 4, overlap=True)
    steps, exchanges = collected.spans("aiops.step"), collected.spans("aiops.exchange", "CLIENT")
    assert [span.attributes["aiops.push"] for span in steps] == [1, 2, 3, 4]
    assert not collected.spans("aiops.push")
    for step, exchange in zip(steps, exchanges, strict=True):
        assert exchange.parent.span_id == step.context.span_id
        assert step.end_time == exchange.end_time


def test_local_steps_count_as_computing_of_the_push_after_them(collected: Collected) -> None:
    with ServerThread(policy="diloco", kernels="numpy", workers=1, set=["local_steps=3"]) as server:
        train(server.url, 6)
    steps = collected.spans("aiops.step")
    assert len(steps) == 2
    assert named(collected) == {f"aiops.{name}": 2 for name in ALL}
