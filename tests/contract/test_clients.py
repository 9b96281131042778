"""Every algorithm through clients of every kind, on one of the backends by turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import kernels, testing
from aiops.client.request_kinds import Receipt
from aiops.client.strategies import LocalStrategy, strategy_for
from aiops.errors import StaleGradient
from aiops.model.layout import Array
from aiops.serving.server import Server
from tests.contract.cases import BACKENDS, CASES
from tests.support import PATIENCE, ServerThread

Compute = Callable[[Any], dict[str, Array]]
Step = Callable[[Compute], Receipt]
AsyncStep = Callable[[Compute], Coroutine[Any, Any, Receipt]]
Values = dict[str, Array]

STEPS, WORKERS = 40, 2
START: Values = {"w": np.full(8, 4, np.float32), "b": np.full(3, -2, np.float16)}


@contextlib.contextmanager
def with_worker(url: str) -> Iterator[Step]:
    with aiops.Worker(url, START, timeout=PATIENCE) as worker:
        yield worker.step


@contextlib.contextmanager
def with_client(url: str) -> Iterator[Step]:
    """Follow the plan with a bare client: every transfer is waited for."""
    with aiops.Client(url, role="worker", timeout=PATIENCE) as client:
        routine = strategy_for(client.plan, client.define(START))

        def step(compute: Compute) -> Receipt:
            while True:
                routine.apply(compute(routine.params))
                transfer = routine.transfer()
                try:
                    receipt = None if transfer is None else client.carry(transfer)
                except StaleGradient:
                    routine.failed()
                    continue
                return _over(routine, transfer, receipt)

        yield step


@contextlib.asynccontextmanager
async def with_async_worker(url: str) -> AsyncIterator[AsyncStep]:
    async with aiops.AsyncWorker(url, START, timeout=PATIENCE) as worker:
        yield worker.step


@contextlib.asynccontextmanager
async def with_async_client(url: str) -> AsyncIterator[AsyncStep]:
    async with aiops.AsyncClient(url, role="worker", timeout=PATIENCE) as client:
        routine = strategy_for(client.plan, await client.define(START))

        async def step(compute: Compute) -> Receipt:
            while True:
                routine.apply(compute(routine.params))
                transfer = routine.transfer()
                try:
                    receipt = None if transfer is None else await client.carry(transfer)
                except StaleGradient:
                    routine.failed()
                    continue
                return _over(routine, transfer, receipt)

        yield step


def _over(routine: LocalStrategy, transfer: Any, receipt: Receipt | None) -> Receipt:
    if transfer is not None:
        routine.arrived(receipt)
    return receipt or Receipt(routine.params.version, 0, 0.0, None, {}, pushed=False)


CLIENTS = {"worker": with_worker, "client": with_client}
ASYNC_CLIENTS = {"async-worker": with_async_worker, "async": with_async_client}


def pairs(clients: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return every case with a backend and a client, each pair of these with some case."""
    names = list(clients)
    return [
        (case, BACKENDS[at % len(BACKENDS)], names[at // len(BACKENDS) % len(names)])
        for at, case in enumerate(sorted(CASES))
    ]


def gradients(params: Any) -> Values:
    return {key: params[key] - 1 for key in params}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no NumPy stand in for Numba: it would be done before that has come."""
    monkeypatch.setattr(kernels, "build_later", kernels.build)


def settings_of(case: str, backend: str) -> dict[str, Any]:
    """Return a server's settings."""
    name, settings = CASES[case]
    if "n" in settings:
        settings = {**settings, "n": min(settings["n"], WORKERS)}
    return {
        "policy": name,
        "set": settings,
        "workers": WORKERS,
        "kernels": backend,
        "worker_deadline": PATIENCE,
    }


def outcome(server: Server) -> tuple[dict[str, Any], Values]:
    """Return a server's report, and its parameters."""
    assert server.engine.store is not None
    views = server.engine.store.current.arena.views
    return server.engine.report(), {key: view.copy() for key, view in views.items()}


def check(backend: str, receipts: list[Receipt], report: dict[str, Any], end: Values) -> None:
    """Expect parameters nearer to a quadratic's minimum, and that every gradient is heard of."""
    assert len(receipts) == STEPS * WORKERS
    pushed = [receipt for receipt in receipts if receipt.pushed]
    if all(receipt.pushed for receipt in receipts):  # each gradient travels as it is
        assert report["gradients"] + report["ignored"] == STEPS * WORKERS
        assert sum(not receipt.used for receipt in receipts) == report["ignored"]
    assert report["gradients"] + report["ignored"] >= max(len(pushed), WORKERS)
    assert report["kernels"] == backend
    assert max(receipt.version for receipt in receipts) <= report["version"]
    for key, start in START.items():
        assert np.abs(end[key] - 1).max() < np.abs(start - 1).max()
        assert end[key].dtype == start.dtype


@pytest.mark.parametrize(("case", "backend", "client"), pairs(CLIENTS))
def test_trains(case: str, backend: str, client: str) -> None:
    """Two workers in threads, over sockets of the machine."""
    receipts: list[Receipt] = []

    def run(url: str) -> None:
        with CLIENTS[client](url) as step:
            receipts.extend([step(gradients) for _ in range(STEPS)])

    with (
        ServerThread(**settings_of(case, backend)) as server,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        for future in [pool.submit(run, server.url) for _ in range(WORKERS)]:
            future.result(PATIENCE)
        report, end = server.call(outcome)
    check(backend, receipts, report, end)


@pytest.mark.parametrize(("case", "backend", "client"), pairs(ASYNC_CLIENTS))
@testing.virtual(pieces=200)
async def test_trains_in_virtual_time(case: str, backend: str, client: str) -> None:
    """Two workers in tasks, behind links of which each message takes another time."""
    network, receipts = testing.network(), list[Receipt]()

    async def run(url: str, number: int) -> None:
        name = network.add(testing.Host(f"worker-{number}", latency=0.001, jitter=0.02)).name
        with network.at(name):
            async with ASYNC_CLIENTS[client](url) as step:
                for _ in range(STEPS):
                    receipts.append(await step(gradients))

    async with aiops.serve(**settings_of(case, backend)) as server:
        await asyncio.gather(*(run(server.url, number) for number in range(WORKERS)))
        report, end = outcome(server)
    check(backend, receipts, report, end)
