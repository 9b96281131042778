"""The softsync paper's network: its size, its gradient, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.errors import UsageError
from aiops.lab.workloads.dataset import Dataset
from aiops.model.layout import Layout

torch = pytest.importorskip("torch")

from aiops.lab.experiments.convnet import ConvNet  # noqa: E402


def images(shape: tuple[int, ...] = (32, 32, 3)) -> Dataset:
    """Return a few images whose class is their brightest colour."""
    random = np.random.default_rng(0)
    y = np.arange(24) % 3
    x = random.random((24, *shape), dtype=np.float32) / 2
    x[np.arange(24), ..., y] += 0.5
    return Dataset("few", x[:18], y[:18], x[18:], y[18:], 3)


def room(net: ConvNet) -> Params:
    """Return room for a gradient."""
    return Params(Layout.of(net.initial(0)))


def test_has_the_papers_number_of_parameters() -> None:
    net = ConvNet(replace(images(), classes=10))
    assert sum(int(np.prod(shape)) for shape in net.shapes.values()) == 89_578
    assert {name: array.shape for name, array in net.initial(1).items()} == net.shapes


def test_the_gradient_is_that_of_the_cost() -> None:
    net, rows = ConvNet(images(), weight_decay=0.0), np.arange(18)
    params, out, random = net.initial(0), room(net), np.random.default_rng(1)
    net.gradient(params, rows, out)

    net._test = net._x, net._y

    def cost() -> float:
        return net.validate(params)[0]

    for name in ("conv1.weight", "conv3.bias", "fc.weight"):
        along = random.standard_normal(net.shapes[name]).astype(np.float32)
        slope = float((out[name].astype(np.float64) * along).sum())
        before, step = params[name].copy(), 1e-2 / float(np.abs(along).max())
        params[name] = before + step * along
        above = cost()
        params[name] = before - step * along
        measured = (above - cost()) / (2 * step)
        params[name] = before
        assert measured == pytest.approx(slope, rel=0.1, abs=2e-3)


def test_the_decay_is_the_weights_and_not_the_biases() -> None:
    plain, decayed = (ConvNet(images(), weight_decay=decay) for decay in (0.0, 0.5))
    params = {name: array + 1 for name, array in plain.initial(0).items()}
    found = []
    for net in (plain, decayed):
        out = room(net)
        net.gradient(params, np.arange(4), out)
        found.append(out)
    for name, array in params.items():
        more = 0.5 * array if array.ndim > 1 else 0 * array
        np.testing.assert_allclose(found[1][name], found[0][name] + more, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_learns() -> None:
    net = ConvNet(images())
    params, out = net.initial(0), room(net)
    first, _error = net.validate(params)
    for _ in range(12):
        net.gradient(params, np.arange(18), out)
        for name in params:
            params[name] = params[name] - 0.01 * out[name]
    assert net.validate(params)[0] < first


def test_some_of_the_test_are_enough_to_validate() -> None:
    whole, some = ConvNet(images()), ConvNet(images(), tested=2)
    weights = whole.weights(whole.initial(0))
    assert [len(classes) for _scores, classes in whole.tested(weights)] == [6]
    ((scores, classes),) = some.tested(weights)
    assert len(scores) == len(classes) == 2


def test_says_which_images_it_takes() -> None:
    with pytest.raises(UsageError, match="32 × 32 in three colours, not \\(28, 28, 3\\)"):
        ConvNet(images((28, 28, 3)))
