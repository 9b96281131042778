"""A worker's own optimiser is torch's, with its groups and its clipping."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.algorithms.diloco import DiLoCo
from aiops.client.params import Params
from aiops.client.strategies.flat import LocalModel
from aiops.client.strategies.plan import Plan
from aiops.model.layout import Layout

CURVES = {"weight": 0.5, "bias": 2.0, "head": 1.0}


def local_model(algorithm: DiLoCo, dtype: str = "float64") -> LocalModel:
    """Return the model of a worker that was sent the plan of an algorithm."""
    params = Params(Layout([("weight", dtype, (6, 3)), ("bias", dtype, (3,)), ("head", dtype, ())]))
    for array in params.values():
        array[...] = 2.0
    return LocalModel(params, Plan(algorithm.plan(workers=1)).inner())


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_it_is_torchs_with_groups_and_clipping(optimizer: str) -> None:
    torch = pytest.importorskip("torch")
    model = local_model(
        DiLoCo(
            inner=optimizer,
            inner_lr=1 / 64,
            inner_beta1=0.7,
            inner_beta2=0.95,
            inner_eps=1e-4,
            inner_clip=4.0,
            inner_weight_decay=0.25,
            per_tensor="inner_weight_decay=0@bias,head inner_lr=0.03125@head lr=0.5@weight"
            " inner_clip=2@bias clip=1@head",
        )
    )
    tensors = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in model.params.items()}
    groups = [
        {"params": [tensors["weight"]], "weight_decay": 0.25},
        {"params": [tensors["bias"]], "weight_decay": 0.0},
        {"params": [tensors["head"]], "weight_decay": 0.0, "lr": 1 / 32},
    ]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
    theirs = kind(groups, lr=1 / 64, betas=(0.7, 0.95), eps=1e-4)
    random, clipped = np.random.default_rng(0), [0, 0]
    for _ in range(100):
        noise = {name: 0.1 * random.normal(size=a.shape) for name, a in model.params.items()}
        gradients = {n: CURVES[n] * a + noise[n] for n, a in model.params.items()}
        model.step(*model.take(gradients))
        for name, tensor in tensors.items():
            tensor.grad = CURVES[name] * tensor.detach() + torch.as_tensor(noise[name])
        for group, (limit, names) in enumerate(((4.0, ("weight", "head")), (2.0, ("bias",)))):
            mine = [tensors[name] for name in names]
            clipped[group] += int(torch.nn.utils.clip_grad_norm_(mine, limit) > limit)
        theirs.step()
    assert all(0 < steps < 100 for steps in clipped)
    for name, tensor in tensors.items():  # torch's clipping adds 1e-6 to the norm
        np.testing.assert_allclose(model.params[name], tensor.detach(), rtol=1e-4, atol=1e-6)


def test_a_step_without_some_tensors_takes_the_rates_of_the_others() -> None:
    model = local_model(DiLoCo(inner="sgd", inner_lr=0.5, per_tensor="inner_lr=0.25@head"))
    one = np.ones(())
    model.step(*model.take({"head": one}))
    assert {name: float(a.flat[0]) for name, a in model.params.items()} == {
        "weight": 2.0,
        "bias": 2.0,
        "head": 1.75,
    }
    assert model.rate == 0.5


def test_a_matrix_that_steps_along_its_direction_has_a_rate_of_its_own() -> None:
    params = Params(Layout([("w", "float64", (16, 256)), ("bias", "float64", (256,))]))
    for algorithm in (
        DiLoCo(inner="sgd", inner_lr=0.5),
        DiLoCo(inner="sgd", inner_lr=0.5, inner_orthogonal=0.7),
    ):
        plan = algorithm.plan(workers=1)
        assert plan.get("orthogonal", 0) == algorithm.inner_orthogonal
        for array in params.values():
            array[...] = 0
        model = LocalModel(params, Plan(plan).inner())
        model.step(*model.take({name: -np.ones_like(array) for name, array in params.items()}))
        assert (params["w"] == (0.25 if algorithm.inner_orthogonal else 0.5)).all()
        assert (params["bias"] == 0.5).all()
