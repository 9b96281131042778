"""A client's turn, counted in Python calls: a ratchet, which may only go down.

The task computes its gradient without a call, so that what is counted is the simulator's: the rule
of turns, the client, the wire between it and the server, the engine and the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.model.layout import Array, Ints
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.run import Run
from tests.calls import Calls, calls
from tests.sim.turns.cases import simulation

pytestmark = pytest.mark.usefixtures("none_pending")

STEADY = 40
"""Calls of a turn by the short way (`aiops.sim.turns.steady`)."""

GENERAL = 151
"""Calls of the same turn by messages."""

POLICIES = ["asgd", "sasgd", "fasgd", "exponential", "ringmaster"]


class Idle:
    """A task whose gradient is always the same."""

    examples = 100

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"w": np.ones((40, 30), np.float32), "b": np.zeros(30, np.float32)}

    def gradient(self, params: Mapping[str, Array], rows: Ints, out: Params) -> None:
        out.arena.sections[0][:] = 1e-3

    def validate(self, params: Mapping[str, Array]) -> tuple[float, float]:
        return 0.0, 0.0


def turn(policy: str) -> Calls:
    """Return the calls of a turn, the median of several."""
    with Run(simulation(policy, kernels="numba"), Idle()) as run:
        run.dispatcher.run(40)
        found = sorted([calls(run.dispatcher.turn) for _ in range(9)], key=lambda each: each.count)
    return found[len(found) // 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_short_way(policy: str) -> None:
    pytest.importorskip("numba")
    found = turn(policy)
    assert "sim/turns/steady.py" in found.files
    assert found.count <= STEADY, str(found)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_general_way(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    nothing: Any = lambda *_arguments: None  # noqa: E731
    monkeypatch.setattr(MemoryServer, "shortened", nothing)
    found = turn(policy)
    assert "sim/turns/steady.py" not in found.files
    assert found.count <= GENERAL, str(found)
