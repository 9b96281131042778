"""Exchanges beside computing: stamps, buffers, and where parameters come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.strategies import Transfer, strategy_for
from aiops.client.strategies.overlapped import Overlapped
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import UsageError
from aiops.model.layout import Array, Layout
from tests.rows import each_row

PLAN: dict[str, Any] = {"routine": "direct"}
INNER = {"optimizer": "sgd", "lr": 1.0}


def routine_of(depth: int = 1, plan: dict[str, Any] = PLAN) -> Any:
    """A strategy on tensors (w: 2 elements, b: 1) of version 0, all zero."""
    params = Params(Layout([("w", "float32", (2,)), ("b", "float64", (1,))]))
    params.arena.data[:] = 0
    params.version = 0
    params.connection = ("me", 1)
    return strategy_for(plan, params, depth)


def gradient(value: float) -> dict[str, Array]:
    return {"w": np.full(2, value, np.float32), "b": np.full(1, value, np.float64)}


def give(routine: Any, value: float) -> Transfer:
    """Hand over a gradient that may travel at once."""
    routine.apply(gradient(value))
    assert not (routine.due and routine.under_way)
    transfer = routine.transfer()
    assert transfer is not None
    return transfer


def answer(routine: Any, value: float, version: int) -> None:
    """Answer the oldest exchange with a model of a version."""
    transfer = routine.under_way
    assert transfer.into is not None
    for array in transfer.into.values():
        array[...] = value
    transfer.into.version, transfer.into.versions[:] = version, version
    transfer.into.connection = ("me", 1)
    routine.arrived(Receipt(version, 0, 0.0, None, {}) if transfer.arrays is not None else None)


def values(transfer: Transfer) -> list[float]:
    assert transfer.arrays is not None
    return [float(x) for name in sorted(transfer.arrays) for x in transfer.arrays[name]]


def test_the_parameters_stay_while_their_successors_come() -> None:
    routine = routine_of()
    w = routine.params["w"]
    transfer = give(routine, 1)
    assert not routine.waits
    assert transfer.into is not routine.params
    transfer.into["w"][...] = 7  # half of the answer has come
    assert w.tolist() == [0, 0]
    answer(routine, 8, 1)
    assert w.tolist() == [8, 8]
    assert routine.params["w"] is w
    assert routine.params.version == 1


def test_a_gradient_has_the_version_that_it_was_computed_at() -> None:
    """Although newer parameters have taken the place of these when it is pushed."""
    routine = routine_of()
    assert give(routine, 1).at.versions.tolist() == [0, 0]
    routine.apply(gradient(2))
    assert routine.due
    answer(routine, 5, 3)
    assert routine.params.version == 3
    transfer = routine.transfer()
    assert (transfer.at.newest, transfer.at.versions.tolist()) == (0, [0, 0])
    answer(routine, 6, 4)
    assert give(routine, 3).at.versions.tolist() == [4, 4]
    answer(routine, 7, 5)
    assert routine.under_way is None


def test_the_callers_arrays_are_free_after_the_step() -> None:
    routine, mine = routine_of(), gradient(1)
    routine.apply(mine)
    transfer = routine.transfer()
    mine["w"][:] = 9
    assert values(transfer) == [1, 1, 1]
    routine.apply({"b": np.full(1, 2.0)})
    answer(routine, 0, 1)
    assert values(routine.transfer()) == [2]


@each_row("depth", [1, 2, 3])
def test_memory_is_used_again(depth: int) -> None:
    """Gradients in `room` are not copied, and a room is not given while it may travel."""
    routine, rooms, fresh = routine_of(depth), set(), set()
    for number in range(10):
        room = routine.room()
        assert room is routine.room()
        assert all(room is not transfer.arrays for transfer, _room in routine._sent)
        for array in room.values():
            array[...] = number
        routine.apply(room)
        if routine.due:
            answer(routine, number, number)
        transfer = routine.transfer()
        assert transfer.arrays is room
        assert all(transfer.into is not each.into for each, _ in list(routine._sent)[:-1])
        rooms.add(id(room))
        fresh.add(id(transfer.into))
    assert (len(rooms), len(fresh)) == (depth + 1, depth)


def test_exchanges_arrive_in_order() -> None:
    routine = routine_of(2)
    first, second = give(routine, 1), give(routine, 2)
    assert (first.at.newest, second.at.newest) == (0, 0)
    assert routine.due
    assert routine.under_way is first
    answer(routine, 1, 1)
    assert (routine.under_way, routine.params.version) == (second, 1)
    third = give(routine, 3)
    assert third.at.newest == 1
    routine.failed()  # the second
    assert (routine.under_way, routine.params.version) == (third, 1)
    answer(routine, 3, 2)
    assert routine.params["w"].tolist() == [3, 3]
    assert routine.refresh().arrays is None
    answer(routine, 4, 5)
    assert routine.params.version == 5


def test_a_gradient_that_does_not_fit() -> None:
    routine = routine_of()
    routine.apply({"w": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match="shape"):
        routine.transfer()
    assert routine.under_way is None
    give(routine, 1)


def test_increments_need_the_version_before() -> None:
    assert routine_of(2, {**PLAN, "fetch_codec": [["*", "int8"]]}).depth == 1


def test_gradients_behind_a_gate() -> None:
    """It is waited for only when the gate is open, and the gradient has its true version."""
    gate = {
        "kind": "constant",
        "p_push": 0.5,
        "p_fetch": 0.5,
        "skipped": "discard",
        "combine": "sum",
    }
    routine = routine_of(1, {"routine": "gated", "gate": gate, "worker": 0})
    opened, version, mine = 0, 0, gradient(0)
    for number in range(60):
        before, held = routine.under_way, routine.params.versions.tolist()
        for array in mine.values():
            array[...] = number
        routine.apply(mine)
        passes = bool(routine._opened.any())
        assert routine.due == passes
        if before is not None and passes:
            version += 1
            if before.into is not None:
                before.into.version, before.into.versions[:] = version, version
            routine.arrived(Receipt(version, 0, 0.0, None, {}) if before.pushes else None)
        transfer = routine.transfer()
        assert (transfer is not None) == passes
        assert not routine.waits
        if transfer is None:
            continue
        opened += 1
        assert transfer.into is not routine.params
        if transfer.arrays is not None:
            assert transfer.at.versions.tolist() == held
            mine["w"][:] = -1
            assert values(transfer) == [number] * 3
    assert 20 < opened < 60


def test_local_steps_stay_on_top_of_what_is_fetched() -> None:
    plan = {"routine": "accumulate", "push_every": 2, "fetch_every": 2, "inner": INNER}
    routine = routine_of(1, plan)
    for _ in range(2):
        routine.apply(gradient(1))
        transfer = routine.transfer()
    assert transfer is not None
    assert transfer.into is not None
    assert not routine.waits
    assert routine.params["w"].tolist() == [-2, -2]
    routine.apply(gradient(1))  # while it is under way
    assert not routine.due
    answer(routine, 10, 7)  # the others' steps are in it
    assert routine.params["w"].tolist() == [9, 9]
    assert routine.params.version == 7
    routine.apply(gradient(1))
    assert values(routine.transfer()) == [2, 2, 2]
    answer(routine, 20, 8)
    assert routine.params["w"].tolist() == [20, 20]


AT_ONCE = {
    *("asgd", "sasgd", "fasgd", "exponential", "ringmaster", "schedule-free"),
    *("softsync", "downpour"),
}
BY_PLAN = {"no-delay"}
"""Its plan has workers compute on in any case."""


@each_row(
    ("policy", "settings", "why"),
    [
        *((name, {}, None) for name in sorted(AT_ONCE | BY_PLAN)),
        ("diloco", {"overlap": True}, None),
        ("diloco", {}, "--set overlap=true"),
        ("fedbuff", {}, "several steps for each exchange"),
        ("easgd", {}, "--set p=N"),
        ("eamsgd", {}, "--set p=N"),
        ("hardsync", {}, "waits for other workers"),
        ("ssp", {}, "waits for other workers"),
        ("ssp", {"get_model_frequency": 4}, "waits for other workers"),
        ("dcasgd", {}, "was sent last, and these would be newer"),
        ("gap-aware", {}, "was sent last, and these would be newer"),
        ("rennala", {}, "only gradients of the newest parameters are used"),
    ],
)
def test_policies_that_do_not_answer_at_once_refuse_it(
    policy: str, settings: dict[str, Any], why: str | None
) -> None:
    plan = Engine(find(policy).make(settings), Options(workers=2, backend="numpy")).plan
    routine_of(0, plan)
    if why is None:
        routine = routine_of(1, plan)
        assert not routine.waits
        assert isinstance(routine, Overlapped) == (plan["routine"] == "direct")
    else:
        with pytest.raises(UsageError, match=f"does not work with overlap: .*{why}"):
            routine_of(1, plan)


def test_a_server_that_says_no_for_another_reason() -> None:
    with pytest.raises(UsageError, match="the server refuses it, because of 'moon'"):
        routine_of(1, {**PLAN, "no_overlap": "moon"})
