"""A hostile process lends a server wrong memory over real Unix sockets: it serves on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from aiops.client import Worker
from aiops.lab.torture.hostile_lender import HostileLender
from aiops.lab.torture.hostile_neighbour import KINDS
from aiops.lab.torture.said import errors_noted
from aiops.model.shared_memory import available
from aiops.serving.server import Server
from tests.model.test_shared_memory import descriptors, held
from tests.peers import eventually
from tests.seeds import by_turns, seeds
from tests.support import ServerThread

COUNT = 1 << 14
MODEL = {"w": np.zeros(COUNT, np.float32)}
ONES = {"w": np.ones(COUNT, np.float32)}

pytestmark = pytest.mark.skipif(not available(), reason="there is no such memory here")


def of(server: ServerThread, count: Callable[[Server], int]) -> int:
    """Count something of a server, on its thread."""
    return int(server.call(count))


def peers(server: Server) -> int:
    """Its connections."""
    return len(server.connections.peers)


def buffers(server: Server) -> int:
    """Bytes of receive buffers that are out."""
    return sum(pool.out for pool in server.coordinator.pools)


# What is lent wrongly is refused before a filter has it.
@pytest.mark.parametrize(("filter", "seed"), by_turns(["off", "norm:1000"], seeds(4)))
def test_a_server_serves_on(seed: int, filter: str) -> None:
    """`AIOPS_SEEDS=100 pytest tests/lab/torture/test_lender.py` does it for long.

    A gradient that changes between check and update is found out where gradients are filtered.
    """
    wrong = list[str]()
    with (
        errors_noted(wrong),
        ServerThread(policy="asgd", set={"lr": 1}, filter=filter, kernels="numpy") as server,
        Worker(server.url, MODEL, name="honest") as worker,
    ):
        while not worker.step(ONES).used:
            """The first pushes teach the filters."""
        lender = HostileLender(Random(seed), server.url, 4 * COUNT)
        eventually(lambda: of(server, peers) == 1, "the honest worker is there alone")
        gc.collect()
        before = descriptors(), held()
        for _ in range(40):
            lender.connect_once(12)
            assert worker.step(ONES).used
        eventually(lambda: of(server, peers) == 1, "hostile connections are gone")
        eventually(lambda: of(server, buffers) == 0, "their buffers are back")

        def back() -> bool:
            gc.collect()
            return descriptors() <= before[0] and held() <= before[1] + 16 * COUNT

        eventually(back, "what they showed is closed and unmapped")
        if filter != "off":  # without filters workers are trusted not to do so
            assert np.isfinite(worker.params["w"]).all()
    assert wrong == []
    assert set(KINDS) <= set(lender.acts)
    assert min(lender.acts["share"], lender.acts["push"]) > 5
