"""Every algorithm, on every backend, through every client: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client.requests import Receipt
from aiops.client.routines import Routine, routine_for
from aiops.errors import StaleGradient
from aiops.layout import Array
from tests.adapter import Adapter
from tests.contract.cases import BACKENDS, CASES
from tests.support import PATIENCE, ServerThread

Compute = Callable[[Any], dict[str, Array]]
Step = Callable[[Compute], Receipt]

STEPS, WORKERS = 40, 2


@contextlib.contextmanager
def with_worker(url: str, start: dict[str, Array]) -> Iterator[Step]:
    with aiops.Worker(url, start, timeout=PATIENCE) as worker:
        yield worker.step


@contextlib.contextmanager
def with_async_worker(url: str, start: dict[str, Array]) -> Iterator[Step]:
    with Adapter(
        asyncio.new_event_loop, url, start, of=aiops.AsyncWorker, timeout=PATIENCE
    ) as worker:
        yield worker.step


@contextlib.contextmanager
def with_client(url: str, start: dict[str, Array]) -> Iterator[Step]:
    with aiops.Client(url, role="worker", timeout=PATIENCE) as client:
        routine = routine_for(client.plan, client.define(start))
        yield lambda compute: _step(client, routine, compute)


@contextlib.contextmanager
def with_async_client(url: str, start: dict[str, Array]) -> Iterator[Step]:
    adapter = Adapter(asyncio.new_event_loop, url, role="worker", timeout=PATIENCE)
    with adapter as client:
        routine = routine_for(client.plan, client.define(start))
        yield lambda compute: _step(client, routine, compute)


def _step(client: Any, routine: Routine, compute: Compute) -> Receipt:
    """Follow the plan with a bare client: every transfer is waited for."""
    while True:
        routine.apply(compute(routine.params))
        transfer = routine.transfer()
        if transfer is None:
            return Receipt(routine.params.version, 0, 0.0, None, {}, pushed=False)
        try:
            receipt = client.carry(transfer)
        except StaleGradient:
            routine.failed()
            continue
        routine.arrived(receipt)
        return receipt or Receipt(routine.params.version, 0, 0.0, None, {}, pushed=False)


CLIENTS = {
    "worker": with_worker,
    "async-worker": with_async_worker,
    "client": with_client,
    "async": with_async_client,
}


@pytest.mark.parametrize("client", sorted(CLIENTS))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", sorted(CASES))
def test_trains(case: str, backend: str, client: str) -> None:
    """Two workers bring a quadratic's parameters nearer, and hear of every gradient."""
    name, settings = CASES[case]
    if "n" in settings:
        settings = {**settings, "n": min(settings["n"], WORKERS)}
    start = {"w": np.full(8, 4, np.float32), "b": np.full(3, -2, np.float64)}
    receipts: list[Receipt] = []
    faults: list[BaseException] = []

    def gradients(params: Any) -> dict[str, Array]:
        return {key: params[key] - 1 for key in params}

    def run(url: str) -> None:
        try:
            with CLIENTS[client](url, start) as step:
                receipts.extend([step(gradients) for _ in range(STEPS)])
        except BaseException as fault:
            faults.append(fault)

    server = ServerThread(
        policy=name, set=settings, workers=WORKERS, kernels=backend, worker_deadline=PATIENCE
    )
    with server:
        threads = [threading.Thread(target=run, args=(server.url,)) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        report = server.call(lambda s: s.engine.report())
        end = server.call(
            lambda s: {k: v.copy() for k, v in s.engine.store.current.arena.views.items()}
        )
    assert not faults
    assert len(receipts) == STEPS * WORKERS
    pushed = [receipt for receipt in receipts if receipt.pushed]
    if all(receipt.pushed for receipt in receipts):  # each gradient travels as it is
        assert report["gradients"] + report["ignored"] == STEPS * WORKERS
        assert sum(not receipt.used for receipt in receipts) == report["ignored"]
    assert report["gradients"] + report["ignored"] >= max(len(pushed), WORKERS)
    assert report["kernels"] == backend
    assert max(receipt.version for receipt in receipts) <= report["version"]
    for key in start:
        assert np.abs(end[key] - 1).max() < np.abs(start[key] - 1).max()
        assert end[key].dtype == start[key].dtype
