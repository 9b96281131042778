"""A ratchet: how many Python calls an exchange takes on the client. The bounds may only go down.

The server is another process, and the calls are those of the client's own thread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiops.client import AsyncWorker, Client, Worker
from aiops.compiled import COMPILED, exchange_type
from tests.client.calls import Calls, counting, median
from tests.rows import each_row
from tests.support import Process, server_process
from tests.tracing.collected import collecting

pytestmark = pytest.mark.usefixtures("none_pending")

MODEL = {"w": np.zeros(1000, np.float32), "b": np.zeros(16, np.float16)}
GRADIENT = {name: np.ones_like(array) for name, array in MODEL.items()}

STEADY_STEP = 9
STEADY_EXCHANGE = 5
STEADY_STEP_C = {False: 18, True: 10}  # calls of C functions, by whether the exchange is compiled
STEADY_EXCHANGE_C = {False: 12, True: 4}
GENERAL_STEP = 47
GENERAL_EXCHANGE = 43
ASYNC_STEP = 18  # those of aiops; the event loop has its own
ASYNC_STEP_AT_ONCE = 13  # its answer has come before the loop has had a turn
UNTAKEN_STEP = 29  # with traces, of a push that has no spans
TRACED_STEP = 61


@pytest.fixture(scope="module", params=["tcp", "near"])
def server(request: pytest.FixtureRequest) -> Iterator[Process]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tcp":
            patch.setenv("AIOPS_NO_SHM", "1")
        with server_process("--policy", "asgd", "--set", "lr=0.1") as process:
            yield process


@pytest.fixture(autouse=True, params=[False, True], ids=["python", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found: bool = request.param
    if found and exchange_type() is None:
        pytest.skip("there was no C compiler")
    if not found:
        monkeypatch.setenv(COMPILED, "0")
    return found


@pytest.fixture
def worker(server: Process, compiled: bool) -> Iterator[Worker]:
    with Worker(server.url, MODEL) as worker:
        for _ in range(3):
            worker.step(GRADIENT)
        polls_not(worker._client)
        yield worker


def polls_not(client: Client) -> None:
    """Have no wait poll: whether one begins depends on how busy the machine is."""
    client._connection.short.spin.resting = 1 << 30


def general(worker: Worker) -> None:
    """Take a step in the general way."""
    worker._client._connection.short.steady = None
    worker.step(GRADIENT)


def test_a_steady_step(worker: Worker, compiled: bool) -> None:
    found = median(worker.step, GRADIENT)
    assert found.python <= STEADY_STEP, found.by.most_common()
    assert found.c <= STEADY_STEP_C[compiled]


def test_a_steady_step_with_room(worker: Worker, compiled: bool) -> None:
    room = worker.room()
    for array in room.values():
        array[...] = 1
    found = median(worker.step, room)
    assert found.python <= STEADY_STEP, found.by.most_common()
    assert found.c <= STEADY_STEP_C[compiled]


def test_a_general_step(worker: Worker) -> None:
    found = median(general, worker)
    assert found.python - 1 <= GENERAL_STEP, found.by.most_common()


def test_an_exchange(server: Process, compiled: bool) -> None:
    with Client(server.url, role="worker") as client:
        params = client.define(MODEL)
        for _ in range(3):
            client.exchange(params, GRADIENT)
        polls_not(client)
        found = median(client.exchange, params, GRADIENT)
        assert found.python <= STEADY_EXCHANGE, found.by.most_common()
        assert found.c <= STEADY_EXCHANGE_C[compiled]

        def slowly() -> None:
            client._connection.short.steady = None
            client.exchange(params, GRADIENT)

        found = median(slowly)
        assert found.python - 1 <= GENERAL_EXCHANGE, found.by.most_common()


@each_row(("share", "most"), [("1e-9", UNTAKEN_STEP), ("1", TRACED_STEP)])
def test_a_step_with_traces(
    share: str, most: int, server: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    with collecting() as collected, Worker(server.url, MODEL) as worker:
        for _ in range(3):
            worker.step(GRADIENT)
        polls_not(worker._client)
        found = median(worker.step, GRADIENT)
        assert found.python <= most, found.by.most_common()
    assert bool(collected.spans()) is (share == "1")


async def test_an_async_step(server: Process, compiled: bool) -> None:
    gradient = GRADIENT
    async with AsyncWorker(server.url, MODEL) as worker:
        for _ in range(3):
            await worker.step(gradient)
        connection = worker._client._connection
        assert connection is not None
        short: Any = connection.short
        short.spin.resting = short.nap.resting = 1 << 30  # all by the transport
        assert await ours(worker) <= ASYNC_STEP
        if compiled:
            for _ in range(20):
                short.spin.resting = short.nap.resting = 0
                short._turned = math.inf
                found = await ours(worker, 1)
                if found <= ASYNC_STEP_AT_ONCE:
                    return
            raise AssertionError(f"{found} calls, however soon the answer comes")


async def ours(worker: AsyncWorker, count: int = 5) -> float:
    """Return the calls of aiops that a step of a worker takes, in most of some."""
    counts = []
    for _ in range(count):
        found = Calls()
        with counting(found):
            await worker.step(GRADIENT)
        counts.append(sum(n for (file, _name), n in found.by.items() if file.startswith("aiops/")))
    return statistics.median(counts)  # an answer may come in two pieces
