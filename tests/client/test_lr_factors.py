"""Factors of learning rates: what may be one, how they travel, and that none is lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client.lr_factors import by_tensor, checked, in_order
from aiops.errors import BadPush, UsageError
from aiops.model.layout import Layout
from tests.rows import each_row
from tests.support import ServerThread

MODEL = {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32), "c": np.ones(1, np.float32)}
LAYOUT = Layout.of(MODEL)


def test_what_is_1_for_all_does_not_travel() -> None:
    for factors in (None, 1, 1.0, {}, {"a": 1.0}, {"a": 1.0, "b": 1, "c": 1}):
        assert checked(factors, LAYOUT) is None
    assert checked({"a": 0.5, "b": 0.5, "c": 0.5}, LAYOUT) == 0.5
    assert checked(np.float32(0.5), LAYOUT) == 0.5
    assert checked({"a": 0.5}, LAYOUT) == {"a": 0.5}


@each_row(
    ("factors", "words"),
    [
        (-0.5, "lr_factor must be from 0 to 100"),
        (101, "must be from 0 to 100"),
        (math.nan, "must be from 0 to 100"),
        ([0.5], "must be from 0 to 100, not .0.5."),
        ({"a": None}, "lr_factor of 'a' must be from 0 to 100, not None"),
        ({"b": -1.0}, "lr_factor of 'b' must be"),
        ({"bb": 1.0}, "no tensor 'bb'; did you mean 'b'"),
    ],
)
def test_what_is_no_factor_is_refused(factors: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked(factors, LAYOUT)


def test_they_travel_in_the_order_of_the_tensors_that_are_pushed() -> None:
    factors = {"c": 0.25, "a": 0.5}
    assert in_order(None, LAYOUT, MODEL) == ()
    assert in_order(0.5, LAYOUT, MODEL) == (0.5,)
    assert in_order(factors, LAYOUT, MODEL) == (0.5, 1.0, 0.25)
    assert in_order(factors, LAYOUT, ["c", "a"]) == (0.5, 0.25)
    assert in_order({"a": 0.5, "c": 0.5}, LAYOUT, ["c", "a"]) == (0.5,)
    assert by_tensor(None, LAYOUT) is None
    np.testing.assert_array_equal(by_tensor(factors, LAYOUT), [0.5, 1.0, 0.25])


GRADIENT = {name: np.full_like(array, 0.5) for name, array in MODEL.items()}


def moved(settings: dict[str, Any], factor: Any, steps: int, **options: Any) -> dict[str, Any]:
    """Return what some steps of a worker change, on a real server."""
    with ServerThread(policy="asgd", lr=1.0, kernels="numpy", **settings) as server:
        with aiops.Worker(server.url, MODEL, **options) as worker:
            for _ in range(steps):
                worker.step(GRADIENT, factor)
            worker.push_rest()
        with aiops.Client(server.url) as client:
            return {name: (MODEL[name] - array).tolist() for name, array in client.fetch().items()}


@each_row(
    ("settings", "options"),
    [
        ({}, {}),
        ({}, {"overlap": 1}),
        ({"push_codec": "int8"}, {}),
        ({"fetch_codec": "int8"}, {}),
        ({"shards": 2}, {}),
        ({"gate": "periodic:k_push=2,k_fetch=1"}, {}),
        ({"gate": "periodic:k_push=2,k_fetch=1,skipped=reapply"}, {}),
    ],
    ids=["plain", "overlap", "coded", "coded answers", "shards", "gate", "applied again"],
)
def test_a_worker_s_steps_have_them(settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Each is 0.5 · factor long, and steps without a factor before and after are as they were."""
    found = moved(settings, {"a": 0.25, "b": 0.0}, 4, **options)
    np.testing.assert_allclose(found["a"], 4 * 0.5 * 0.25, rtol=0.02)
    np.testing.assert_array_equal(found["b"], 0)
    np.testing.assert_allclose(found["c"], 4 * 0.5, rtol=0.02)


def test_steps_with_and_without_a_factor_follow_each_other() -> None:
    """The short way of steady exchanges, and the general one."""
    with (
        ServerThread(policy="asgd", lr=1.0, kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        seen = []
        for factor in (None, None, None, 0.5, None, 0.25, 0.25, None, None):
            before = worker.params["a"][0]
            worker.step(GRADIENT, factor)
            seen.append(float(before - worker.params["a"][0]))
        assert seen == [0.5, 0.5, 0.5, 0.25, 0.5, 0.125, 0.125, 0.5, 0.5]


def test_a_mapping_may_be_used_again() -> None:
    """Those that travel in the background are a copy."""
    with (
        ServerThread(policy="asgd", lr=1.0, kernels="numpy") as server,
        aiops.Worker(server.url, MODEL, overlap=True) as worker,
    ):
        factors = {"a": 0.0}
        worker.step(GRADIENT, factors)
        factors["a"] = 50.0
        worker.push_rest()
        worker.refresh()
        assert worker.params["a"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [{"policy": "asgd", "filter": "robust"}, {"policy": "softsync", "set": {"trim": 0.2}}],
    ids=["filter", "trim"],
)
def test_gradients_that_are_screened_have_none_above_1(settings: dict[str, Any]) -> None:
    """A large factor does what a large gradient may not."""
    with (
        ServerThread(**settings, workers=1, lr=1.0, kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        worker.step(GRADIENT, 0.5)
        before = worker.refresh()
        for factor in (1.5, {"a": 100.0}):
            with pytest.raises(BadPush, match="it may be 1 at most, as gradients are filtered"):
                worker.step(GRADIENT, factor)
        assert worker.refresh() == before


def test_a_server_that_comes_back_with_another_plan_gets_what_it_says() -> None:
    """Gradients where it makes directions, and directions where it does not."""
    model = {"w": np.zeros((4, 6), np.float32)}
    with ServerThread(policy="schedule-free", kernels="numpy") as server:
        worker = aiops.Worker(server.url, model, timeout=10)
        assert worker.directed == {"w"}
        port = int(server.url.rpartition(":")[2])
    with (
        ServerThread(
            policy="schedule-free", set={"collect": 2}, kernels="numpy", port=port
        ) as server,
        worker,
    ):
        gradient = {"w": np.ones((4, 6), np.float32)}
        worker.step(gradient)
        assert worker.directed == frozenset()
        worker.step(gradient)


def test_rows_have_them() -> None:
    """Also where the rule would undo a smaller gradient."""
    tables = {"t": aiops.Table(10, 2)}
    ids, grads = np.array([1, 4]), np.ones((2, 2), np.float32)
    found = []
    for factors in ((1.0, 1.0, 0.5), (1.0, 1.0, 1.0), (1.0, 1.0, 0.0)):
        with (
            ServerThread(policy="asgd", set={"optimizer": "adam", "lr": 0.5}) as server,
            aiops.Worker(server.url, MODEL, tables=tables) as worker,
        ):
            worker.fetch_rows("t", ids)
            for factor in factors:
                before = worker.fetch_rows("t", ids)
                worker.push_rows("t", ids, grads, lr_factor=factor)
            found.append(before - worker.fetch_rows("t", ids))
            with pytest.raises(UsageError, match="lr_factor must be from 0"):
                worker.push_rows("t", ids, grads, lr_factor=-1.0)
    np.testing.assert_allclose(found[0], found[1] / 2, rtol=1e-5)
    assert found[1].min() > 0
    assert not found[2].any()
