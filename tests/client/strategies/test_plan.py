"""A client plan is not believed blindly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.client.strategies import strategy_for
from aiops.errors import UsageError
from aiops.model.layout import Layout
from tests.rows import each_row

INNER = {"optimizer": "sgd", "lr": 0.1}
GOOD: dict[str, dict[str, Any]] = {
    "accumulate": {"push_every": 2, "fetch_every": 3, "inner": INNER},
    "local": {"push_every": 2, "overlap": "free", "limit": 4, "inner": INNER},
    "elastic": {"push_every": 2, "moving_rate": 0.3, "inner": INNER},
}


def params() -> Params:
    layout = Layout([("a", "float32", (2,)), ("b", "float32", (0,)), ("c", "float32", (1,))])
    found = Params(layout)
    found.arena.data[:] = 0
    found.version = 0
    return found


@each_row("routine", GOOD)
def test_a_good_plan(routine: str) -> None:
    assert strategy_for({"routine": routine, **GOOD[routine]}, params()).params.version == 0


@each_row(
    ("routine", "change"),
    [
        ("accumulate", {"push_every": 0}),
        ("accumulate", {"push_every": None}),
        ("accumulate", {"fetch_every": 2.5}),
        ("accumulate", {"fetch_every": True}),
        ("accumulate", {"push_every": 2**70}),
        ("accumulate", {"inner": None}),
        ("accumulate", {"inner": {"optimizer": "sgd"}}),
        ("accumulate", {"inner": {**INNER, "lr": float("nan")}}),
        ("accumulate", {"inner": {**INNER, "lr": "fast"}}),
        ("accumulate", {"inner": {**INNER, "momentum": 1.0}}),
        ("accumulate", {"inner": {**INNER, "optimizer": "sdg"}}),
        ("accumulate", {"inner": {**INNER, "clip": -1.0}}),
        ("accumulate", {"inner": {**INNER, "per_tensor": ["lr=1@a"]}}),
        ("accumulate", {"inner": {**INNER, "per_tensor": "lr=fast@a"}}),
        ("accumulate", {"inner": {**INNER, "per_tensor": "lr=-1@a"}}),
        ("accumulate", {"inner": {**INNER, "schedule": "sometimes"}}),
        ("local", {"overlap": "always"}),
        ("local", {"limit": -1}),
        ("local", {"mix": 1.0}),
        ("local", {"fragments": 0}),
        ("local", {"in_step": 1}),
        ("elastic", {"moving_rate": 1}),
        ("elastic", {"moving_rate": float("nan")}),
        ("elastic", {"lookahead": -0.1}),
    ],
)
def test_a_bad_plan_is_refused_with_a_sentence(routine: str, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        strategy_for({"routine": routine, **GOOD[routine], **change}, params())


@each_row("name", ["telepathy", None, ["local"], 3])
def test_a_routine_that_is_not_known(name: Any) -> None:
    with pytest.raises(UsageError, match="which this client does not know"):
        strategy_for({"routine": name}, params())


def test_fragments_are_of_tensors_that_have_values() -> None:
    plan = {"routine": "local", **GOOD["local"], "push_every": 1, "overlap": "none"}
    routine = strategy_for({**plan, "fragments": 2}, params())
    routine.apply({"a": np.ones(2, np.float32), "c": np.ones(1, np.float32)})
    transfer = routine.transfer()
    assert transfer is not None
    assert transfer.arrays is not None
    assert list(transfer.arrays) == ["a"]
    with pytest.raises(UsageError, match="3 fragments, but it has only 2 tensors"):
        strategy_for({**plan, "fragments": 3}, params())
