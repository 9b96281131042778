"""Directions of collected gradients, which a store makes of its sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aiops.kernels.exact_orthogonalise import orthogonalised_exactly
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.store.backends import HostBackend
from aiops.store.finite_guard import refused_tensor
from aiops.store.gradient import Gradient
from aiops.store.parameters import Store, UpdateJob
from aiops.store.resources import Resources
from aiops.store.sum_directions import SumDirections, growth

SHAPES = {"w": (20, 30), "b": (30,), "conv": (8, 4, 3, 3), "long": (400, 4), "double": (6, 5)}


def model(seed: int = 1) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    return {name: a if name == "double" else a.astype("f4") for name, a in arrays.items()}


def plain(w: Array, g: Array, step: Scalar) -> tuple[Array]:
    return (w - step * g,)


class Collected:
    """A store that takes steps with sums."""

    def __init__(self, momentum: float | None = 0.5, backend: str = "numpy") -> None:
        arrays = model()
        self.layout = Layout.of(arrays)
        arena = Arena(self.layout)
        for name, array in arrays.items():
            arena.views[name][...] = array
        self.store = Store(
            self.layout, Rule(plain), backend=backend, arena=arena, momentum=momentum
        )

    def step(self, *gradients: dict[str, Any], lr: float = 1.0) -> Any:
        store, sums = self.store, None
        for number, each in enumerate(gradients):
            data = Arena(self.layout)
            for name, array in each.items():
                data.views[name][...] = array
            cover = self.layout.covered(self.layout.parts(store.current.tensor_versions))
            job = UpdateJob(store, store.cost, gradient=Gradient(data.data, cover))
            job.weights, job.begins_sum = np.ones(len(cover.tensors)), not number
            if number == len(gradients) - 1:
                job.touched, job.factor = self.layout.all, 1 / len(gradients)
                job.steps, job.target = np.full(len(job.touched), lr), store.begin()
            sums = job.run()
            if job.target is not None and refused_tensor(sums) is None:
                store.commit(job.target, job.touched, sums)
            elif job.target is not None:
                store.abandon(job.target)
        return sums

    @property
    def values(self) -> dict[str, Any]:
        arrays = self.store.current.arena.views
        return {name: arrays[name].copy() for name in SHAPES}


def direction(momentum: Any, new: Any, shape: tuple[int, int]) -> Any:
    length = math.sqrt(max(shape)) * math.sqrt(float(np.square(new, dtype="f8").mean()))
    return (orthogonalised_exactly(momentum.reshape(shape)) * length).reshape(new.shape)


MATRICES = {"w": (20, 30), "conv": (8, 36), "double": (6, 5)}


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_steps_are_made_of_directions_of_the_means_momentum(backend: str) -> None:
    collected, plainly = Collected(0.5, backend), Collected(None, backend)
    momenta = {name: np.zeros(SHAPES[name]) for name in MATRICES}
    wanted = collected.values
    for seed in range(3):
        first, second = model(10 + seed), model(20 + seed)
        collected.step(first, second)
        plainly.step(first, second)
        for name, shape in MATRICES.items():
            new = first[name].astype("f8") + second[name]
            momenta[name] = 0.5 * momenta[name] + 0.5 * new
            wanted[name] = wanted[name] - direction(momenta[name], new, shape) / 2
            np.testing.assert_allclose(collected.values[name], wanted[name], atol=1e-4)
        for name in ("b", "long"):  # what is no matrix
            np.testing.assert_array_equal(collected.values[name], plainly.values[name])


def test_what_a_capture_has_goes_on_to_the_same_bits() -> None:
    first = Collected()
    first.step(model(2), model(3))
    other = Collected()
    arrays = {name: array.copy() for name, array in first.store.updater.arrays().items()}
    assert {name for name in arrays if name.startswith("momentum")} == {"momentum/0", "momentum/1"}
    for name, array in first.values.items():
        other.store.current.arena.views[name][...] = array
    updater = other.store.updater
    updater.restore(first.store.updater.filled, lambda name, to: np.copyto(to, arrays[name]))
    for each in (first, other):
        each.step(model(4), model(5))
    for name, array in first.values.items():
        assert array.tobytes() == other.values[name].tobytes()


def test_a_refused_step_leaves_no_momentum() -> None:
    collected, fresh = Collected(), Collected()
    before = collected.values
    large = {name: np.full(shape, 9e17) for name, shape in SHAPES.items()}
    assert refused_tensor(collected.step(large, large, lr=1e30)) is not None
    for name, array in before.items():
        np.testing.assert_array_equal(collected.values[name], array)
    for each in (collected, fresh):
        each.step(model(4), model(5))
    for name, array in fresh.values.items():
        assert array.tobytes() == collected.values[name].tobytes()


def test_a_cut_matrix_is_one_matrix_for_each_piece() -> None:
    whole = Layout.of({"w": np.zeros((30, 20), "f4"), "long": np.zeros((200, 4), "f4")})
    random = np.random.default_rng(3)
    pieces = Placement.even(whole, 3).layouts
    assert sum("w" in [tensor.name for tensor in layout.tensors] for layout in pieces) == 2
    for layout in pieces:
        compute = HostBackend(layout, "numpy", Resources())
        directions = SumDirections(layout, compute, 0.0)
        [given] = [random.normal(size=layout.parameters).astype("f4")]
        found = given.copy()
        directions.put([found], layout.all)
        for index, tensor in enumerate(layout.tensors):
            low, high = (int(each[0]) for each in layout.ranges(0, np.array([index])))
            mine = given[low:high]
            if tensor.name == "w":
                shape = tensor.size // 20, 20
                np.testing.assert_allclose(
                    found[low:high], direction(mine, mine, shape), rtol=1e-5, atol=1e-6
                )
            else:  # a piece of it is as wide as a matrix, and it is none
                np.testing.assert_array_equal(found[low:high], mine)


def test_the_bound_of_directions_holds() -> None:
    layout = Layout.of({"w": np.zeros((4, 60), "f4")})
    directions = SumDirections(layout, HostBackend(layout, "numpy", Resources()), 0.9)
    random = np.random.default_rng(4)
    for power in (1, 3, 9):
        values = (random.normal(size=240) ** power).astype("f4")
        most = np.abs(values).max() * growth(layout)
        directions.put([values], layout.all)
        assert np.abs(values).max() <= most
