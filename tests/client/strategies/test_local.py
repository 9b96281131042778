"""Local training: hand-overs, merges, and what a failure must not lose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms.local_training import InnerOptimizer
from aiops.client.params import Params
from aiops.client.strategies import LocalStrategy, strategy_for
from aiops.model.layout import Layout

SGD = InnerOptimizer(optimizer="sgd", lr=1.0).plan()


def params_of(dtype: str = "float64", **sizes: int) -> Params:
    layout = Layout((name, dtype, (size,)) for name, size in (sizes or {"w": 3}).items())
    params = Params(layout)
    params.arena.data[:] = 0
    params.version = 0
    return params


def routine_of(params: Params | None = None, **plan: Any) -> LocalStrategy:
    plan = {"routine": "local", "push_every": 1, "inner": SGD, **plan}
    return strategy_for(plan, params or params_of())


def step(routine: LocalStrategy, value: float = -1.0) -> None:
    routine.apply({name: np.full_like(w, value) for name, w in routine.params.items()})


def answer(routine: LocalStrategy, value: float, version: int = 1) -> None:
    """Have the server's parameters come."""
    transfer = routine.under_way
    assert transfer is not None
    assert transfer.into is not None
    for array in transfer.into.values():
        array[...] = value
    transfer.into.version, transfer.into.versions[:] = version, version
    routine.arrived(None)


def test_without_overlap_the_servers_parameters_are_taken_over() -> None:
    routine = routine_of(push_every=2)
    step(routine)
    assert routine.transfer() is None
    step(routine)
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    np.testing.assert_array_equal(transfer.arrays["w"], -2)
    assert routine.waits
    answer(routine, 7.0, version=5)
    np.testing.assert_array_equal(routine.params["w"], 7)
    assert routine.params.version == 5
    assert not routine.waits


def test_what_is_learnt_meanwhile_stays_on_top() -> None:
    routine = routine_of(overlap="free", limit=8)
    step(routine)
    assert routine.transfer() is not None
    for _ in range(3):
        step(routine)
        assert routine.transfer() is None
    answer(routine, 10.0)
    np.testing.assert_array_equal(routine.params["w"], 13)
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    np.testing.assert_array_equal(transfer.arrays["w"], -3)


def test_the_lead_is_counted_from_what_the_newest_model_has() -> None:
    routine = routine_of(overlap="free", limit=4)
    step(routine)
    routine.transfer()
    for _ in range(3):
        assert not routine.waits
        step(routine)
        routine.transfer()
    assert routine.waits
    answer(routine, 0.0)  # it has the first step; three are not in it
    assert routine.transfer() is not None
    assert not routine.waits
    step(routine)
    assert routine.transfer() is None
    assert routine.waits


def test_a_cycle_merges_at_its_end_only() -> None:
    routine = routine_of(push_every=2, overlap="cycle", limit=4)
    for _ in range(2):
        step(routine)
    assert routine.transfer() is not None
    step(routine)
    answer(routine, 100.0)
    np.testing.assert_array_equal(routine.params["w"], 3)  # not yet
    assert not routine.due
    step(routine)
    assert routine.transfer() is not None
    np.testing.assert_array_equal(routine.params["w"], 102)
    step(routine)
    step(routine)
    assert routine.due
    assert not routine.waits


def test_what_failed_travels_again() -> None:
    routine = routine_of(overlap="free", limit=8)
    step(routine)
    routine.transfer()
    step(routine)
    routine.failed()
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    np.testing.assert_array_equal(transfer.arrays["w"], -2)


def test_fragments_take_turns() -> None:
    params = params_of(a=2, b=2, c=2)
    params.version = 1  # it joins when one round has been
    routine = routine_of(params, fragments=2)
    pushed = []
    for version in range(2, 6):
        step(routine)
        transfer = routine.transfer()
        assert transfer is not None
        assert transfer.arrays is not None
        pushed.append({name: float(array[0]) for name, array in transfer.arrays.items()})
        answer(routine, 0.0, version)
    assert pushed == [{"b": -1}, {"a": -2, "c": -2}, {"b": -2}, {"a": -2, "c": -2}]


def test_what_comes_is_mixed_in() -> None:
    routine = routine_of(mix=0.25)
    step(routine)
    routine.transfer()
    answer(routine, 5.0)
    np.testing.assert_array_equal(routine.params["w"], 0.25 * 1 + 0.75 * 5)
    step(routine)
    transfer = routine.transfer()  # measured from the server's parameters, not from the mixture
    assert transfer is not None
    assert transfer.arrays is not None
    np.testing.assert_array_equal(transfer.arrays["w"], 5 - 5)


@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    moves=st.lists(st.tuples(st.sampled_from(["step", "answer", "fail"]), st.integers(-9, 9))),
)
def test_nothing_is_lost_or_counted_twice(dtype: str, moves: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order: the server's sum and the worker's news are all steps."""
    routine = routine_of(params_of(dtype), overlap="free", limit=100)
    taken = total = on_its_way = 0.0
    for what, value in moves:
        if what == "step":
            step(routine, value / 7)
            total -= float(np.asarray(value / 7, routine.params["w"].dtype))
        elif routine.under_way is not None and what == "answer":
            taken, on_its_way = taken + on_its_way, 0.0
            answer(routine, taken)
        elif routine.under_way is not None:
            on_its_way = 0.0
            routine.failed()
        transfer = routine.transfer()
        if transfer is not None:
            assert transfer.arrays is not None
            on_its_way = -float(transfer.arrays["w"][0])
        model, anchor = routine._model, routine._anchor  # type: ignore[attr-defined]
        news = float(model.x[0][0]) - float(anchor[0][0])
        tolerance = 1e-9 if dtype == "float64" else 1e-3
        assert taken + on_its_way + news == pytest.approx(total, abs=tolerance)


def test_a_refresh_does_not_touch_what_waits_for_the_cycles_end() -> None:
    routine = routine_of(push_every=2, overlap="cycle", limit=4)
    for _ in range(2):
        step(routine)
    routine.transfer()
    step(routine)
    answer(routine, 100.0)
    routine.refresh()
    np.testing.assert_array_equal(routine.params["w"], 101)  # merged first
    assert routine.under_way is not None
    assert routine.under_way.into is not None
    routine.under_way.into["w"][:2] = 7  # ... and the fetch is lost midway
    routine.failed()
    step(routine)
    routine.transfer()
    np.testing.assert_array_equal(routine.params["w"], 102)


def test_at_the_end_all_fragments_are_told() -> None:
    routine = routine_of(params_of(a=2, b=2, c=2), fragments=2)
    step(routine)
    routine.transfer()
    answer(routine, 0.0)
    rest = routine.rest()
    assert rest is not None
    assert rest.arrays is not None
    assert {name: float(array[0]) for name, array in rest.arrays.items()} == {"b": -1}


def test_a_fragments_stamp_is_that_of_its_own_values() -> None:
    """Other fragments' values stay what they were, however new the model that came with them."""
    routine = routine_of(params_of(a=2, b=2), fragments=2)
    step(routine)
    routine.transfer()
    answer(routine, 0.0, version=5)
    step(routine)
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    assert list(transfer.arrays) == ["b"]
    assert transfer.at.versions.tolist() == [5, 0]


def test_workers_in_step_come_back_into_step() -> None:
    routine = routine_of(params_of(a=2, b=2, c=2), fragments=3, in_step=True)
    step(routine)
    routine.transfer()
    answer(routine, 0.0, version=5)  # it missed some rounds
    step(routine)
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    assert list(transfer.arrays) == ["c"]


def test_an_offered_model_has_the_local_steps_already() -> None:
    routine = routine_of(push_every=5)
    step(routine)
    routine.offered()
    assert routine.rest() is None
    routine.refresh()
    answer(routine, 1.0)
    np.testing.assert_array_equal(routine.params["w"], 1)


def test_a_way_beyond_16_bits_is_cut_and_the_rest_travels_later() -> None:
    routine = routine_of(params_of("float16"), push_every=2)
    for value in (-40_000, -40_000):
        step(routine, value)
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    assert float(transfer.arrays["w"][0]) == -65_504
    answer(routine, 0.0)
    assert np.isfinite(routine.params["w"]).all()
