"""The spring: one round trip, and an answer that was lost."""

from __future__ import annotations

import numpy as np

from aiops.algorithms.local_training import InnerOptimizer
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.strategies import LocalStrategy, strategy_for
from aiops.model.layout import Layout


def routine_of(kappa: float = 0.9) -> LocalStrategy:
    params = Params(Layout([("w", "float64", (2,))]))
    params["w"][:] = 0
    params.version = 0
    inner = InnerOptimizer(optimizer="sgd", lr=1.0).plan()
    plan = {"routine": "elastic", "push_every": 1, "moving_rate": kappa, "inner": inner}
    return strategy_for(plan, params)


def answer(routine: LocalStrategy, centre: float, version: int, current: int) -> None:
    transfer = routine.under_way
    assert transfer is not None
    assert transfer.into is not None
    transfer.into["w"][:] = centre
    transfer.into.version, transfer.into.versions[:] = current, current
    routine.arrived(Receipt(version, 0, 0.0, None, {}))


def test_the_worker_takes_the_move_that_the_server_made() -> None:
    routine = routine_of()
    routine.apply({"w": np.full(2, -10.0)})
    routine.transfer()
    answer(routine, 9.0, version=1, current=1)  # from 0, by 0.9 of 10
    np.testing.assert_allclose(routine.params["w"], 1)


def test_an_answer_given_again_does_not_throw_the_worker_about() -> None:
    """The centre that comes with it has others' moves in it, which were none of this worker's."""
    routine = routine_of()
    routine.apply({"w": np.full(2, -10.0)})
    routine.transfer()
    answer(routine, 3.1, version=1, current=7)
    np.testing.assert_allclose(routine.params["w"], 10 - 0.9 * (10 - 3.1))


def test_what_was_offered_is_the_centre() -> None:
    routine = routine_of()
    routine.apply({"w": np.full(2, -10.0)})
    np.testing.assert_array_equal(routine.offer()["w"], 0)
