"""Sums of gradients: their stamps, what a failure puts back, what 16 bits cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.algorithms.local_training import InnerOptimizer
from aiops.client.params import Params
from aiops.client.strategies import LocalStrategy, strategy_for
from aiops.model.layout import Layout


def routine_of(dtype: str = "float64", **plan: Any) -> LocalStrategy:
    params = Params(Layout([("w", dtype, (2,)), ("b", dtype, (1,))]))
    params.arena.data[:] = 0
    params.version = 0
    inner = InnerOptimizer(
        optimizer="sgd", lr=1.0, schedule=plan.pop("schedule", "constant")
    ).plan()
    plan = {"routine": "accumulate", "push_every": 2, "fetch_every": 4, "inner": inner, **plan}
    return strategy_for(plan, params)


def step(routine: LocalStrategy, value: float, *names: str) -> None:
    names = names or ("w", "b")
    routine.apply({name: np.full_like(routine.params[name], value) for name in names})


def fetched(routine: LocalStrategy, value: float, version: int, connection: int = 1) -> None:
    transfer = routine.under_way
    assert transfer is not None
    assert transfer.into is not None
    for array in transfer.into.values():
        array[...] = value
    transfer.into.version, transfer.into.versions[:] = version, version
    transfer.into.connection = ("me", connection)
    routine.arrived(None)


def pushed(routine: LocalStrategy) -> tuple[dict[str, list[float]], list[int]]:
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    values = {name: [float(x) for x in array] for name, array in transfer.arrays.items()}
    return values, transfer.at.versions.tolist()


def test_only_what_has_a_gradient_travels() -> None:
    routine = routine_of()
    step(routine, 1, "w")
    assert routine.transfer() is None
    step(routine, 2, "w")
    assert pushed(routine) == ({"w": [3, 3]}, [0, 0])
    routine.arrived(None)
    step(routine, 5, "b")
    step(routine, 1)
    assert pushed(routine)[0] == {"w": [1, 1], "b": [6]}


def test_what_failed_goes_back_with_its_stamp() -> None:
    routine = routine_of(push_every=1, fetch_every=2)
    step(routine, 1)
    assert pushed(routine)[1] == [0, 0]
    routine.failed()
    step(routine, 1)
    values, versions = pushed(routine)
    assert values["w"] == [2, 2]
    fetched(routine, 0, version=50)
    step(routine, 1)
    assert pushed(routine)[1] == [50, 50]
    step(routine, 1, "b")  # while that is under way
    routine.failed()
    step(routine, 1, "b")
    values, versions = pushed(routine)
    assert (values, versions) == ({"w": [1, 1], "b": [3]}, [50, 50])


def test_an_older_stamp_wins() -> None:
    routine = routine_of(push_every=1, fetch_every=3)
    step(routine, 1)
    routine.transfer()
    routine.failed()
    assert routine.refresh() is routine.under_way
    fetched(routine, 0, version=9)
    step(routine, 1)
    assert pushed(routine) == ({"w": [2, 2], "b": [2]}, [0, 0])


def test_after_a_restart_the_stamp_is_the_new_servers() -> None:
    """What is stamped by the server's former run would never be taken."""
    routine = routine_of(push_every=1, fetch_every=3)
    step(routine, 1)
    routine.transfer()
    routine.failed()
    routine.restarted()
    routine.refresh()
    fetched(routine, 0, version=4, connection=2)
    step(routine, 1)
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.at.connection == ("me", 2)
    assert transfer.at.versions.tolist() == [4, 4]


def test_an_offered_model_has_the_sum_already() -> None:
    routine = routine_of()
    step(routine, 1)
    routine.offered()
    assert routine.rest() is None


def test_a_sum_beyond_16_bits_is_cut_and_the_rest_travels_later() -> None:
    routine = routine_of("float16", push_every=2, fetch_every=100)
    step(routine, 40_000)
    step(routine, 40_000)
    assert pushed(routine)[0]["b"] == [65_504]
    routine.failed()
    step(routine, 0)
    step(routine, 0)
    assert pushed(routine)[0]["b"] == [65_504]
    routine.arrived(None)
    step(routine, 1)
    step(routine, 0)
    assert pushed(routine)[0]["b"] == [80_001 - 65_504 - 1]  # as float16 has it


def test_the_schedule_is_the_servers() -> None:
    """Each push is one of the server's updates, others' pushes come in with each fetch."""
    routine = routine_of(push_every=2, fetch_every=4, schedule="linear:10")
    moves = []
    for number in range(6):
        before = float(routine.params["w"][0])
        step(routine, -1)
        moves.append(float(routine.params["w"][0]) - before)
        if routine.transfer() is not None:
            if number == 3:
                fetched(routine, 0, version=8)
            else:
                routine.arrived(None)
    np.testing.assert_allclose(moves, [1, 1, 0.9, 0.9, 0.2, 0.2])
