"""The residual network: its size, what it begins as, its gradient, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from aiops.lab.experiments.resnet import ResNet  # noqa: E402
from tests.lab.experiments.slopes import is_slope  # noqa: E402
from tests.lab.experiments.test_convnet import images  # noqa: E402


def test_has_as_many_parameters_as_it_says() -> None:
    net = ResNet(replace(images(), classes=10))
    assert sum(int(np.prod(shape)) for shape in net.shapes.values()) == 77_850
    assert {name: array.shape for name, array in net.initial(1).items()} == net.shapes


def test_a_block_begins_as_what_it_is_added_to() -> None:
    net = ResNet(images())
    params = net.initial(0)
    with torch.no_grad():
        before = net.scores(net.weights(params), np.arange(4))[0].clone()
        for name in params:
            if ".1." in name or ".2.weight" in name:
                params[name] = params[name] + 1  # what is inside of a block makes no difference
        after = net.scores(net.weights(params), np.arange(4))[0]
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize(
    "name", ["first.weight", "first.scale", "block1.2.scale", "block3.2.shift", "block2.across"]
)
def test_its_gradient_is_the_slope_of_its_cost(name: str) -> None:
    assert is_slope(ResNet(images()), name, np.arange(6))


def test_learns() -> None:
    net = ResNet(images())
    params = net.initial(0)
    weights = {name: torch.tensor(array).requires_grad_() for name, array in params.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.01)
    costs = []
    for _ in range(8):
        scores, classes = net.scores(weights, np.arange(18))
        cost = torch.nn.functional.cross_entropy(scores, classes)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        costs.append(cost.item())
    assert costs[-1] < 0.7 * costs[0]
