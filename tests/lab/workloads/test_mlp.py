from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import aiops.lab.workloads
from aiops.errors import UsageError
from aiops.lab.workloads import MLP

SIZES = [(5, 3), (5, 4, 3), (6, 5, 4, 2), (3, 8, 1)]


def examples(sizes: tuple[int, ...], n: int = 7) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(11)
    return rng.standard_normal((n, sizes[0])), rng.integers(sizes[-1], size=n)


def jittered(model: MLP, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Parameters whose biases are not zero either."""
    rng = np.random.default_rng(5)
    params = model.init(seed)
    return {
        name: (array + 0.1 * rng.standard_normal(array.shape)).astype(model.dtype)
        for name, array in params.items()
    }


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_agree_with_finite_differences(sizes: tuple[int, ...]) -> None:
    model = MLP(sizes, dtype=np.float64)
    params = jittered(model)
    x, y = examples(sizes)
    loss, grads = model.gradients(params, x, y)
    assert loss == model.loss(params, x, y)
    step = 1e-6
    for name, array in params.items():
        numeric = np.empty_like(array)
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept + step
            above = model.loss(params, x, y)
            array[place] = kept - step
            below = model.loss(params, x, y)
            array[place] = kept
            numeric[place] = (above - below) / (2 * step)
        np.testing.assert_allclose(grads[name], numeric, rtol=1e-6, atol=1e-8, err_msg=name)


def test_float32_gradients_agree_with_float64() -> None:
    sizes = (20, 30, 10)
    single, double = MLP(sizes), MLP(sizes, dtype=np.float64)
    params = jittered(double)
    x, y = examples(sizes, n=50)
    loss, grads = single.gradients(
        {name: array.astype(np.float32) for name, array in params.items()}, x, y
    )
    exact_loss, exact = double.gradients(params, x, y)
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    for name, grad in grads.items():
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, exact[name], atol=1e-5)


def test_the_loss_is_the_mean_so_halves_average_to_the_whole() -> None:
    model = MLP((5, 4, 3), dtype=np.float64)
    params = jittered(model)
    x, y = examples((5, 4, 3), n=8)
    whole_loss, whole = model.gradients(params, x, y)
    halves = [model.gradients(params, x[part], y[part]) for part in (slice(4), slice(4, 8))]
    assert whole_loss == pytest.approx(np.mean([loss for loss, _ in halves]))
    for name in whole:
        np.testing.assert_allclose(whole[name], (halves[0][1][name] + halves[1][1][name]) / 2)


def test_the_gradient_without_the_loss() -> None:
    model = MLP((5, 4, 3))
    rng = np.random.default_rng(0)
    params, x, y = model.init(1), rng.standard_normal((6, 5)).astype(np.float32), np.arange(6) % 3
    out = {name: np.empty(shape, np.float32) for name, shape in model.shapes.items()}
    model.gradient(params, x, y, out)
    _loss, grads = model.gradients(params, x, y)
    for name, grad in grads.items():
        np.testing.assert_array_equal(out[name], grad)


def test_gradients_can_be_written_into_an_arena() -> None:
    model = MLP((5, 4, 3))
    params = jittered(model)
    x, y = examples((5, 4, 3))
    arena = np.full(5 * 4 + 4 + 4 * 3 + 3, np.nan, dtype=np.float32)
    views, start = {}, 0
    for name, shape in model.shapes.items():
        views[name] = arena[start : start + int(np.prod(shape))].reshape(shape)
        start += views[name].size
    loss, grads = model.gradients(params, x, y, out=views)
    expected_loss, expected = model.gradients(params, x, y)
    assert loss == expected_loss
    for name in model.shapes:
        assert grads[name] is views[name]
    np.testing.assert_array_equal(
        arena, np.concatenate([expected[name].ravel() for name in model.shapes])
    )


def test_read_only_parameters_and_examples_are_fine_and_stay_as_they_are() -> None:
    model = MLP((5, 4, 3))
    params = jittered(model)
    x, y = examples((5, 4, 3))
    x = x.astype(np.float32)
    before = {name: array.copy() for name, array in params.items()} | {"x": x.copy()}
    for array in (*params.values(), x, y):
        array.flags.writeable = False
    _, grads = model.gradients(params, x, y)
    model.accuracy(params, x, y)
    for name, array in (params | {"x": x}).items():
        np.testing.assert_array_equal(array, before[name])
    assert all(grad.flags.writeable for grad in grads.values())


def test_images_are_flattened() -> None:
    model = MLP((12, 3))
    params = model.init(0)
    x, y = examples((12, 3))
    assert model.loss(params, x.reshape(-1, 2, 2, 3), y) == model.loss(params, x, y)


def test_huge_scores_neither_overflow_nor_lose_the_loss() -> None:
    model = MLP((1, 2))
    params = {
        "layer0.weight": np.array([[1e4, -1e4]], dtype=np.float32),
        "layer0.bias": np.zeros(2, dtype=np.float32),
    }
    x = np.ones((1, 1))
    assert model.loss(params, x, np.array([0])) == 0
    loss, grads = model.gradients(params, x, np.array([1]))
    assert loss == pytest.approx(2e4)
    np.testing.assert_array_equal(grads["layer0.bias"], [1, -1])


def test_a_sure_answer_makes_no_subnormal_gradients() -> None:
    """Probabilities go down to e^-120 here; a product with a subnormal takes a hundred cycles."""
    model = MLP((4, 6, 61))
    params = {name: array.copy() for name, array in jittered(model).items()}
    params["layer1.bias"] -= 2 * np.arange(61, dtype=np.float32)
    x, _y = examples(model.sizes)
    _loss, grads = model.gradients(params, x, np.zeros(len(x), int))
    sizes = np.concatenate([abs(array).ravel() for array in grads.values()])
    assert 0 < np.count_nonzero(sizes) < sizes.size
    assert sizes[sizes > 0].min() > np.finfo(np.float32).tiny


def test_diverged_parameters_give_nan_and_no_warning() -> None:
    model = MLP((2, 2, 2))
    params = {name: np.full_like(array, 3e38) for name, array in model.init(0).items()}
    loss, _ = model.gradients(params, np.ones((1, 2)), np.array([0]))
    assert np.isnan(loss)
    assert np.isnan(model.loss(params, np.ones((1, 2)), np.array([0])))


def test_accuracy_counts_the_right_answers() -> None:
    model = MLP((2, 2))
    params = {"layer0.weight": np.eye(2), "layer0.bias": np.zeros(2)}
    x = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 2.0], [0.0, 5.0]])
    assert model.predict(params, x).tolist() == [0, 1, 0, 1]
    assert model.predict(params, x).dtype == np.int64
    assert model.accuracy(params, x, np.array([0, 1, 1, 1])) == 0.75
    np.testing.assert_array_equal(model.logits(params, x), x)


def test_an_evaluation_is_the_loss_and_the_accuracy() -> None:
    model = MLP((6, 5, 3))
    params = model.init(seed=0)
    x = np.random.default_rng(1).standard_normal((20, 6)).astype(np.float32)
    y = np.arange(20) % 3
    expected = (model.loss(params, x, y), model.accuracy(params, x, y))
    assert model.evaluate(params, x, y) == expected


def test_initial_parameters_have_their_names_shapes_and_spread() -> None:
    model = MLP((784, 200, 10))
    params = model.init(seed=3)
    assert {name: array.shape for name, array in params.items()} == {
        "layer0.weight": (784, 200),
        "layer0.bias": (200,),
        "layer1.weight": (200, 10),
        "layer1.bias": (10,),
    }
    assert list(params) == list(model.shapes)
    assert {array.dtype for array in params.values()} == {np.dtype(np.float32)}
    for layer, inputs in ((0, 784), (1, 200)):
        assert not params[f"layer{layer}.bias"].any()
        spread = float(params[f"layer{layer}.weight"].std())
        assert spread == pytest.approx(np.sqrt(2 / inputs), rel=0.05)


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    single, double = MLP((5, 4, 3)), MLP((5, 4, 3), dtype=np.float64)
    one, other = single.init(1), single.init(2)
    for name, array in double.init(1).items():
        np.testing.assert_array_equal(one[name], array.astype(np.float32))
    assert not np.array_equal(one["layer0.weight"], other["layer0.weight"])


@pytest.mark.parametrize("sizes", [(), (5,), (5, 0), (5, -1, 3)])
def test_layer_sizes_that_cannot_be_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="layer sizes"):
        MLP(sizes)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match="dtype float16"):
        MLP((5, 3), dtype=np.float16)


@pytest.mark.parametrize("shape", [(4, 6), (0, 5), (5, 2, 2)])
def test_examples_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = MLP((5, 3))
    with pytest.raises(UsageError, match="takes one or more examples of 5 numbers"):
        model.loss(model.init(0), np.zeros(shape), np.zeros(shape[0], dtype=np.int64))


def test_a_label_for_each_example_is_needed() -> None:
    model = MLP((5, 3))
    with pytest.raises(UsageError, match="4 examples, but 1 labels"):
        model.gradients(model.init(0), np.zeros((4, 5)), np.zeros(1, dtype=np.int64))


def test_the_example_of_the_package_runs() -> None:
    outcome = doctest.testmod(aiops.lab.workloads)
    assert outcome.attempted
    assert not outcome.failed
