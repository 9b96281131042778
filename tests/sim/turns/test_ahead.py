"""Clients that do not wait for an answer before they compute on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.errors import ConflictError
from aiops.sim.turns.client_selection import RecordedSelection
from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation
from tests.rows import each_row
from tests.sim.turns.cases import TASK, random_pieces, simulation
from tests.sim.turns.lines import ByteLine, in_pieces


def small(policy: str, **settings: Any) -> Simulation:
    return simulation(policy, waits=False, **settings)


@pytest.mark.parametrize("codecs", [{}, {"push_codec": ("topk:0.2",), "fetch_codec": ("int8",)}])
@pytest.mark.parametrize("policy", ["hardsync", "ssp", "fasgd", "rennala"])
def test_is_the_same_however_messages_move(policy: str, codecs: dict[str, Any]) -> None:
    digests = set()
    for how in ({}, {"jobs": 3}, {"line": ByteLine}, {"line": in_pieces(random_pieces(3))}):
        with Run(small(policy, **codecs), TASK, **how) as run:
            digests.add(run.execute().digest)
    assert len(digests) == 1


def test_where_nobody_is_held_back_nothing_is_different() -> None:
    results = []
    for case in (simulation("fasgd"), small("fasgd")):
        with Run(case, TASK) as run:
            results.append(run.execute().digest)
    assert results[0] == results[1]


class TestAtABarrier:
    def test_one_gradient_is_ahead_at_most(self) -> None:
        with Run(small("hardsync", clients=3), TASK) as run:
            run.dispatcher.selection = RecordedSelection(3, [0, 0, 0, 0, 1, 2])
            assert [run.dispatcher.turn() for _ in range(4)] == [0, 0, 1, 2]

    def test_it_is_kept_with_the_versions_it_was_computed_at(self) -> None:
        """The gradient ahead is pushed after the round, and is too old for this barrier."""
        with Run(small("hardsync", clients=3), TASK) as run:
            dispatcher, engine = run.dispatcher, run.engine
            dispatcher.selection = RecordedSelection(3, [0, 0, 1, 2, 0, 1, 2])
            worker = dispatcher.workers[0]
            dispatcher.run(2)
            assert worker.waits
            assert engine.membership.ledger()["pushed"]["with_payload"] == 1
            dispatcher.run(2)
            assert engine.version == 1
            assert engine.membership.ledger()["pushed"]["with_payload"] == 4
            assert engine.training.updates.ignored == 1
            assert worker.params.version == 1
            assert not worker.waits
            dispatcher.run(3)
            assert engine.version == 2

    def test_it_is_a_copy(self) -> None:
        """The dispatcher uses its buffers again; what is kept stays as it was."""
        with Run(small("ssp", set=("s=0",), clients=2), TASK) as run:
            worker = run.dispatcher.workers[0]
            gradient = worker.params.like()
            worker.give(gradient)
            for value in (1.0, 7.0):
                gradient.arena.data.view(np.float32)[:] = value
                if not worker.waits:
                    worker.give(gradient)
            kept = worker.strategy._gradients  # type: ignore[attr-defined]
            assert {float(array.max()) for array in kept.values()} == {1.0}

    def test_less_is_waited_and_more_is_stale(self) -> None:
        """Under SSP a client that would be held back computes one more gradient, an older one."""
        outcomes = {}
        for waits in (True, False):
            with Run(simulation("ssp", set=("s=1",), waits=waits), TASK) as run:
                outcomes[waits] = run.execute()
        assert outcomes[False].mean_staleness > outcomes[True].mean_staleness


@each_row(
    ("policy", "settings", "match"),
    [
        ("easgd", {}, "under easgd a worker has a plan of its own for when it waits"),
        ("no-delay", {}, "under no-delay a worker has a plan of its own"),
        ("fasgd", {"gate": "bfasgd"}, "behind a gate a worker has a plan of its own"),
        ("hardsync", {"set": ("admission=reject",)}, "computes a refused gradient again at once"),
    ],
)
def test_refused(policy: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConflictError, match=match):
        small(policy, **settings).engine()
