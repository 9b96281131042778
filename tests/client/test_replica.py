"""A worker's own model, copied out and changed by a difference."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from aiops.averaging.ring_allreduce import Flat
from aiops.client.replica import Arrays, Replica
from aiops.errors import UsageError
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout, dtype_named
from tests.rows import each_row

DTYPES = ("float64", "float32", "bfloat16", "float16")

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def average(replica: Replica, others: float, learn: Any = lambda: None) -> None:
    """Average with a worker whose model is all ``others``; ``learn`` happens meanwhile."""
    layout = Layout.of(replica.arrays())
    base, flat = Arena(layout), Flat(layout)
    replica.copy_out(base)
    flat.load(base)
    for run in flat.runs:
        run += (np.asarray(others, run.dtype) - run) / 2
    prepared = replica.prepare(flat, base)
    learn()
    replica.add(prepared)


def mean_of(values: Array, others: float) -> Array:
    wide = values.astype(np.float32) if values.dtype.itemsize < 4 else values
    return (wide + (np.asarray(others, wide.dtype) - wide) / 2).astype(values.dtype)


@each_row("dtype", DTYPES)
def test_what_nobody_touched_is_the_mean_to_the_bit(dtype: str) -> None:
    given = np.random.default_rng(0).normal(size=70_000).astype(dtype_named(dtype))
    params = {"w": given.copy()}
    average(Arrays(params), 0.1)
    assert params["w"].tobytes() == mean_of(given, 0.1).tobytes()


@each_row("dtype", DTYPES)
def test_what_was_learnt_meanwhile_stays_on_top(dtype: str) -> None:
    given = np.linspace(-1, 1, 64).reshape(8, 8).astype(dtype_named(dtype))
    params = {"w": given.copy()}

    def learn() -> None:
        params["w"][2:4] += np.asarray(0.5, params["w"].dtype)

    average(Arrays(params), 0.25, learn)
    expected = mean_of(given, 0.25)
    np.testing.assert_array_equal(params["w"][:2], expected[:2])
    np.testing.assert_array_equal(params["w"][4:], expected[4:])
    wide = params["w"][2:4].astype(np.float64)
    eps = {"bfloat16": 2**-7, "float16": 2**-9}.get(dtype, 1e-6)
    np.testing.assert_allclose(wide, expected[2:4].astype(np.float64) + 0.5, atol=eps)


def test_arrays_of_any_stride_and_shape() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    params: dict[str, Array] = {
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "part": whole[:, ::2],
        "scalar": np.array(3.0),
        "empty": np.zeros((0, 2)),
    }
    expected = {name: mean_of(array.copy(), 1.0) for name, array in params.items()}
    average(Arrays(params), 1.0)
    for name, array in params.items():
        np.testing.assert_array_equal(array, expected[name])
    np.testing.assert_array_equal(whole[:, 1::2], np.arange(24.0).reshape(4, 6)[:, 1::2])


def test_a_rebound_array_is_found() -> None:
    params = {"w": np.zeros(4)}
    replica = Arrays(params)
    params["w"] = params["w"] + 2.0
    average(replica, 4.0)
    np.testing.assert_array_equal(params["w"], 3.0)


@pytest.mark.parametrize("changed", [np.zeros(5), np.zeros(4, np.float32)])
def test_a_model_may_not_change_its_form(changed: Array) -> None:
    params: dict[str, Array] = {"w": np.zeros(4)}
    replica = Arrays(params)
    params["w"] = changed
    with pytest.raises(UsageError, match=r"'w' was float64 of shape \(4,\) and is now"):
        replica.copy_out(Arena(Layout.of({"w": np.zeros(4)})))


def test_what_cannot_be_averaged_is_refused() -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(UsageError, match="'w' is read-only"):
        Arrays({"w": fixed})
    with pytest.raises(UsageError, match="'w' is a list"):
        Arrays({"w": [1.0]})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="int64"):
        Arrays({"w": np.zeros(3, np.int64)})


@needs_torch
class TestModule:
    @each_row("dtype", DTYPES)
    def test_untouched_and_learnt(self, dtype: str) -> None:
        import torch

        from aiops.client.torch_replica import Module

        module = torch.nn.Linear(5, 3).to(getattr(torch, dtype))
        replica = Module(module)
        given = {name: array.copy() for name, array in replica.arrays().items()}

        def learn() -> None:
            with torch.no_grad():
                module.bias.add_(0.5)

        average(replica, 0.25, learn)
        found = replica.arrays()
        np.testing.assert_array_equal(found["weight"], mean_of(given["weight"], 0.25))
        wide = found["bias"].astype(np.float64)
        expected = mean_of(given["bias"], 0.25).astype(np.float64) + 0.5
        np.testing.assert_allclose(wide, expected, atol=2**-6)

    def test_frozen_parameters_and_buffers_stay(self) -> None:
        import torch

        from aiops.client.torch_replica import Module

        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        module[0].bias.requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        replica = Module(module)
        assert set(replica.arrays()) == {"0.weight", "1.weight", "1.bias"}
        average(replica, 9.0)
        after = module.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"0.weight", "1.weight", "1.bias"}

    def test_memory_of_any_order(self) -> None:
        import torch

        from aiops.client.torch_replica import Module

        module = torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
        replica = Module(module)
        given = replica.arrays()["weight"].copy()
        average(replica, 1.0)
        np.testing.assert_array_equal(replica.arrays()["weight"], mean_of(given, 1.0))

    def test_pytorch_sees_that_parameters_changed(self) -> None:
        """A backward pass across an average is refused, not silently wrong."""
        import torch

        from aiops.client.torch_replica import Module

        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        loss = module(torch.ones(1, 2)).sum()
        average(Module(module), 3.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestSharedMemory:
    def test_tied_arrays_are_refused_by_name(self) -> None:
        table, bias = np.zeros((4, 3), np.float32), np.zeros(3)
        for tied in (table, table.T, table[1:], table[::2]):
            with pytest.raises(UsageError, match=r"('in' and 'out'|'out' and 'in') share memory"):
                Arrays({"in": table, "bias": bias, "out": tied})

    def test_neighbours_in_one_block_are_apart(self) -> None:
        block = np.zeros((6, 4), np.float32)
        Arrays({"top": block[:3], "bottom": block[3:]})
        Arrays({"even": block[:, ::2], "odd": block[:, 1::2]})
